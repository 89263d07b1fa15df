"""Run all measurements: ``python -m benchmarks.checkpoint``. With ``--quick`` a smoke test, whose figures mean nothing.

Ratios of medians, measured in turns in one run. What each side does:

- A save of ours hashes every byte, writes, syncs file and folder, asks back for the size, and commits a log entry. The
  peers write and sync. Removing old checkpoints is timed for nobody.
- A load ends with the values copied into the tensors of a model and an optimizer, and begins in the page cache. Ours
  checks the digest of every byte; no peer checks anything.
- Our put to S3 computes a BLAKE3 digest, and a HEAD asks the server for the size. All but "unsigned" let the server
  check the body by its signature.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import local, protocol, remote, report
from benchmarks.rounds import Row, Run

RESULTS = Path(__file__).parent / "results"
NAME = "checkpoint"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        states: Sizes of the training states, in megabytes.
        object: Size of the object that goes to S3, in megabytes.
        rounds: Rounds of each large case.
        beats: Rounds of the heartbeat.
        partitions: Partitions of a loop.
    """

    states: tuple[int, ...] = (100, 400)
    object: int = 400
    rounds: int = 7
    beats: int = 20
    partitions: int = 50


QUICK = Scale(states=(13, 26), object=12, rounds=1, beats=2, partitions=3)


def measure(scale: Scale, folder: Path, run: Run) -> list[Row]:
    """Run all cases in a folder and return the rows of the table."""
    rows = local.local_rows(folder, scale.states, scale.rounds, run)
    with remote.s3_place(folder / "s3") as place:
        rows += remote.remote_rows(place, scale.object, scale.rounds, run)
        rows += protocol.local_partition_rows(folder / "loop", scale.partitions, run)
        rows += protocol.s3_partition_rows(place, scale.partitions, run)
    rows += protocol.beat_rows(folder / "beats", scale.beats, run)
    return rows + protocol.request_rows(run)


def main() -> None:
    """Measure, keep the raw rounds, and print the table."""
    options = _options()
    results = options.results or (None if options.quick else RESULTS)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
    logging.getLogger("dagster_resilient").setLevel(logging.ERROR)
    scale = QUICK if options.quick else Scale()
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        Run(_in(results, ".jsonl"), settle=not options.quick) as run,
    ):
        about = report.machine(Path(folder))
        run.note(machine=about, quick=options.quick, rounds=scale.rounds)
        rows = measure(scale, Path(folder), run)
        report.show(rows, about, _in(results, ".txt"))


def _in(results: Path | None, suffix: str) -> Path | None:
    return None if results is None else results / f"{NAME}{suffix}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description="Measure speed as ratios.")
    parser.add_argument("--quick", action="store_true", help="a smoke test in seconds; its figures mean nothing")
    parser.add_argument("--folder", type=Path, help="where to write what is measured; default: the temporary folder")
    parser.add_argument(
        "--results",
        type=Path,
        help="where to keep raw rounds and table; default: benchmarks/results, none with --quick",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
