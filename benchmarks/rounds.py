"""Measuring fairly: all contenders in the same run, in turns, each at the best of its settings, medians of raw rounds.

A ratio between two medians of one run says something on any machine; seconds from one machine say little. What is not
the work itself (making room, deleting what the last round left, writing back other contenders' pages) is not timed.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

OURS = "dagster_resilient"


def nothing() -> None:
    """Do nothing: a contender that leaves nothing behind."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case.

    Attributes:
        peer: Whose way it is; `OURS` for this library.
        run: The work, which is timed.
        clean: Removes what the work left. Not timed.
        setting: Which setting of the peer this is, where several compete. The fastest one counts.
    """

    peer: str
    run: Callable[[], object]
    clean: Callable[[], object] = nothing
    setting: str = ""

    @property
    def name(self) -> str:
        """Peer and setting, as a table shows them."""
        return f"{self.peer} ({self.setting})" if self.setting else self.peer


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        section: What was measured in general.
        case: What was measured in particular.
        ours: Our result, as text.
        peer: Whom it is compared with, empty where with nobody.
        theirs: The peer's result, as text.
        ratio: Our time divided by the peer's; None where there is nothing to compare.
    """

    section: str
    case: str
    ours: str
    peer: str = ""
    theirs: str = ""
    ratio: float | None = None


class Run(AbstractContextManager["Run"]):
    """One run of all measurements. Every raw round becomes one JSON line as soon as it is measured."""

    def __init__(self, file: Path | None = None, *, settle: bool = True) -> None:
        """Begin a run.

        Args:
            file: Where raw rounds are kept; it is replaced. None: nowhere.
            settle: Whether the disk comes to rest before each round. Else one's fsync pays for the pages of another.
        """
        self._file = None if file is None else file.open("w")
        self._settle = settle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def note(self, **fields: Any) -> None:
        """Keep one line."""
        if self._file is not None:
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()

    def compare(self, section: str, case: str, contenders: Sequence[Contender], rounds: int) -> list[Row]:
        """Measure a case; return one row for each peer, at the best of its settings."""
        seconds = self._in_turns(section, case, contenders, rounds)
        medians = {name: statistics.median(all_rounds) for name, all_rounds in seconds.items()}
        ours = min(medians[contender.name] for contender in contenders if contender.peer == OURS)
        rows = []
        for peer in dict.fromkeys(contender.peer for contender in contenders if contender.peer != OURS):
            best = min((c.name for c in contenders if c.peer == peer), key=lambda name: medians[name])
            rows.append(Row(section, case, duration(ours), best, duration(medians[best]), ours / medians[best]))
        return rows

    def _in_turns(
        self, section: str, case: str, contenders: Sequence[Contender], rounds: int
    ) -> dict[str, list[float]]:
        """Return the seconds of each contender by its name.

        The order moves on by one in each round, so that nobody always follows the same other one. A first round warms
        up caches, connections and memory, and does not count.
        """
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for number in range(rounds + 1):
            gc.collect()
            first = number % len(contenders)
            for one in [*contenders[first:], *contenders[:first]]:
                took = self._timed(one)
                if number:
                    seconds[one.name].append(took)
                    where = {"section": section, "case": case, "peer": one.peer, "setting": one.setting}
                    self.note(**where, round=number, seconds=round(took, 6))
        return seconds

    def _timed(self, contender: Contender) -> float:
        if self._settle:
            os.sync()
        begun = time.perf_counter()
        contender.run()
        took = time.perf_counter() - begun
        contender.clean()
        return took


def duration(seconds: float) -> str:
    """Return a time as a person reads it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
