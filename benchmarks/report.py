"""The table, and in words where we are slower."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Row

_WIDEST = 200
_PACKAGES = ("dagster-resilient", "torch", "safetensors", "obstore", "s3fs", "blake3")
_EQUAL = 1.05  # below this, a ratio of medians of a few rounds says nothing


def machine(folder: Path) -> dict[str, Any]:
    """Return what a reader needs to know of the machine: no names, no paths."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "filesystem": _filesystem(folder),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name))},
    }


def _field(file: str, name: str) -> str | None:
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _filesystem(folder: Path) -> str:
    """The type of the file system: an fsync in tmpfs costs nothing, so that must be seen."""
    where, mounts, best = folder.resolve(), Path("/proc/mounts"), ("", "unknown")
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, point, kind, *_ = line.split()
        if where.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(rows: Sequence[Row]) -> Table:
    """Return the one table."""
    shown = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in ("measured", "", "ours", "against", "theirs", "ours / theirs"):
        shown.add_column(column, justify="right" if column.endswith("theirs") else "left", no_wrap=True)
    section = None
    for row in rows:
        if section not in {None, row.section}:
            shown.add_section()
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        shown.add_row(row.section if row.section != section else "", row.case, row.ours, row.peer, row.theirs, ratio)
        section = row.section
    return shown


def verdict(rows: Sequence[Row]) -> list[str]:
    """Say where we are slower, and by how much, worst first."""
    slower = sorted((row for row in rows if (row.ratio or 0) > _EQUAL), key=lambda row: -(row.ratio or 0))
    lines = [f"  {row.ratio:.2f} x  {row.section}, {row.case}: than {row.peer}" for row in slower]
    return ["We are slower here:", *lines] if lines else ["We are slower nowhere in this run."]


def show(rows: Sequence[Row], about: dict[str, Any], file: Path | None) -> None:
    """Print the table and the verdict, and write both to a file too."""
    console = Console(width=_WIDEST, record=file is not None, highlight=False)
    console.print(table(rows))
    console.print("\n".join(verdict(rows)), soft_wrap=True, markup=False)
    console.print("\n" + ", ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, markup=False)
    if file is not None:
        console.save_text(str(file))
