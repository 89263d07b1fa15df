"""The table at the end of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table


class Row(Protocol):
    """What the table shows of a loss."""

    what: str
    reached: str
    detected: float
    resumed: float
    resumed_at: str
    redone: str
    redone_from_zero: str


def print_table(console: Console, losses: Sequence[Row], ttl: float) -> None:
    """Print what each loss cost, beside a restart from zero."""
    table = Table(title=f"What two losses cost (heartbeat TTL {ttl:.0f} s)", title_justify="left")
    headings = ("lost", "had reached", "detected", "working again", "resumed at", "redone", "redone from zero")
    for heading in headings:
        table.add_column(heading)
    for loss in losses:
        seconds = f"{loss.detected:.1f} s", f"{loss.resumed:.1f} s"
        table.add_row(loss.what, loss.reached, *seconds, loss.resumed_at, loss.redone, loss.redone_from_zero)
    console.print()
    console.print(table)
