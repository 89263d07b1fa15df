"""What a tick of the recovery costs: ``python -m benchmarks.recovery_tick``. With ``--quick`` a smoke test.

5,000 runs of the last day stand in PostgreSQL, 500 of them live with 10,000 steps that beat; assets have 100,000
partitions. Heartbeats lie in memory, so what is measured is the tick and the database; requests to the store are
counted. The aim is a tick of less than 5 s with less than 20 pages of listings and 300 reads, and less than 3 s from
the beginning of the tick that sees a lost run to its re-execution in the queue.

Many that are lost at once have no aim: of the queries of each launch, three for every partition of every asset that is
planned are Dagster's own. The lost runs are of 20 partitions of two assets, of which 5 were committed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rounds import Row, Run, duration

RESULTS = Path(__file__).parent / "results"
TESTS = Path(__file__).parents[1] / "tests"
SECONDS, REQUESTS = "tick of the recovery", "its requests"
QUIET, RESTARTED, SUBMITTED, TOGETHER = "quiet", "first of a process", "lost run until queued", "finds {} lost runs"
_AIM, _AIM_SUBMITTED, _MOST_LISTS, _MOST_READS = 5.0, 3.0, 20, 300


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: Of each case.
        together: Runs that are lost at once.
        small: Whether 500 runs must do.
    """

    rounds: int = 5
    together: int = 20
    small: bool = False


QUICK = Scale(rounds=1, together=2, small=True)


@contextmanager
def a_world(scale: Scale) -> Iterator[Any]:
    """Build the world of the tests on a PostgreSQL of its own."""
    sys.path[:0] = [str(TESTS), str(TESTS / "integration")]
    postgres, scale_world = importlib.import_module("postgres"), importlib.import_module("scale_world")
    server = postgres.PostgresServer()
    try:
        server.create()
        size = scale_world.SMALL if scale.small else scale_world.FULL
        with scale_world.scale_world(server.schema_url(), size) as world:
            yield world
    finally:
        server.remove()


def measure(world: Any, scale: Scale, run: Run) -> list[Row]:
    """Run all cases; return the rows of the table."""
    together = TOGETHER.format(scale.together)
    costs: dict[str, list[Any]] = {}
    for number in range(scale.rounds + 1):  # the first one warms up
        for case, tick in _cases(world, scale, together):
            cost = tick()
            if number:
                costs.setdefault(case, []).append(cost)
                run.note(section=SECONDS, case=case, round=number, **dataclasses.asdict(cost))
    rows = [_seconds(case, [cost.seconds for cost in costs[case]], _AIM) for case in (QUIET, RESTARTED)]
    rows.append(_seconds(SUBMITTED, [cost.submitted[0] for cost in costs[SUBMITTED]], _AIM_SUBMITTED))
    median = statistics.median(cost.seconds for cost in costs[together])
    rows.append(Row(SECONDS, together, f"{duration(median)}, {duration(median / scale.together)} each"))
    return rows + [_requests(case, costs[case][-1]) for case in costs]


def _cases(world: Any, scale: Scale, together: str) -> Iterable[tuple[str, Callable[[], Any]]]:
    return (
        (RESTARTED, lambda: _restarted(world)),
        (QUIET, world.tick),
        (SUBMITTED, lambda: _finds_lost(world, 1)),
        (together, lambda: _finds_lost(world, scale.together)),
    )


def _restarted(world: Any) -> Any:
    """One tick of a new code server: what the old one remembered in its memory is gone."""
    world.rests = type(world.rests)()
    return world.tick()


def _finds_lost(world: Any, count: int) -> Any:
    """The tick that convicts so many runs; some partitions of each are committed."""
    lost = world.take(count)
    for one in lost:
        world.commit(one, 5)
    world.lose(lost)
    for _ in range(10):
        cost = world.tick()
        if cost.submitted:
            return cost
    raise RuntimeError(f"No tick convicted the {count} lost runs; the last one said: {cost.words}")


def _seconds(case: str, seconds: list[float], aim: float) -> Row:
    median = statistics.median(seconds)
    return Row(SECONDS, case, duration(median), "the aim", duration(aim), median / aim)


def _requests(case: str, cost: Any) -> Row:
    shown = f"{cost.lists} LIST, {cost.reads} GET, {cost.writes} PUT, {cost.queries} queries"
    if case != QUIET:
        return Row(REQUESTS, case, shown)
    worst = max(cost.lists / _MOST_LISTS, cost.reads / _MOST_READS)
    return Row(REQUESTS, case, shown, "the aim", f"{_MOST_LISTS} LIST, {_MOST_READS} GET", worst)


def main() -> None:
    """Measure, keep the raw rounds, and print the table."""
    options = _options()
    results = options.results or (None if options.quick else RESULTS)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
    files = {s: None if results is None else results / f"recovery_tick{s}" for s in (".jsonl", ".txt")}
    for name in ("dagster_resilient", "dagster"):
        logging.getLogger(name).setLevel(logging.ERROR)
    scale = QUICK if options.quick else Scale()
    with (
        tempfile.TemporaryDirectory() as folder,
        Run(files[".jsonl"], settle=False) as run,
        a_world(scale) as world,
    ):
        about = report.machine(Path(folder))
        run.note(machine=about, quick=options.quick, rounds=scale.rounds)
        report.show(measure(world, scale, run), about, files[".txt"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery_tick", description="Measure a recovery tick.")
    parser.add_argument("--quick", action="store_true", help="a smoke test in seconds; its figures mean nothing")
    parser.add_argument(
        "--results",
        type=Path,
        help="where to keep raw rounds and table; default: benchmarks/results, none with --quick",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
