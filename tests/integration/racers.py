"""Twenty processes that race for the same records, round after round: run as a script by `test_races`.

One process loads the library once and forks the racers before any store is opened, so that they are real processes with
connections of their own, whose start-up is paid once. The job comes in by a pipe: it may hold credentials.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from dagster_resilient.errors import TaskHeldError
from dagster_resilient.state.fences import claim_attempt
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.records import Entry
from dagster_resilient.state.sql_store import open_records
from dagster_resilient.state.store import ObjectRecords, RecordStore
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.object_store import open_store

RACERS = 20
ROUND_SECONDS = 120.0
_FORK = multiprocessing.get_context("fork")


def opened(url: str, options: dict[str, Any]) -> RecordStore:
    """Records at the URL of a database or of an object store."""
    if url.startswith(("sqlite:", "postgresql:")):
        return open_records(url)
    return ObjectRecords(open_store(url, options))


def append(records: RecordStore, n: int) -> Callable[[int], bool]:
    """A racer that appends entry after entry to one log, each under a number that all others want too."""
    log = NumberedLog(records, "race/log")
    return lambda number: log.append(Entry(n=number, op=f"{n}", parent_op=None, kind="value", asset=("race",)))


def acquire(records: RecordStore, n: int) -> Callable[[int], bool]:
    """A racer that wants the lease of one task after the other, as a lineage of its own."""
    claim = claim_attempt(records, root=f"racer-{n}", run_id=f"racer-{n}", series=f"racer-{n}")
    owner = this_process(claim, heartbeat=None, interval=10.0, ttl=45.0)
    data = open_store(f"memory://{n}")

    def race(number: int) -> bool:
        task = DurableTask(data, (f"race-{number}",), None, claim, owner, lambda: datetime.now(UTC), records=records)
        try:
            task.acquire()
        except TaskHeldError:
            return False
        return True

    return race


RACES = {"append": append, "acquire": acquire}


def racer(job: dict[str, Any], n: int, together: Any, results: Any) -> None:
    """Run all rounds, and hand in which of them were won. One that fails ends the race of all."""
    try:
        race = RACES[job["race"]](opened(*job["place"]), n)
        won = []
        for number in range(1, job["rounds"] + 1):
            together.wait(ROUND_SECONDS)
            if race(number):
                won.append(number)
        together.wait(ROUND_SECONDS)  # an owner that ended would be taken for dead, and its lease for free
    except BaseException:
        together.abort()
        raise
    results.put((n, won))


def main() -> None:
    """Start the racers, and print who won which rounds."""
    job = json.load(sys.stdin)
    together, results = _FORK.Barrier(RACERS), _FORK.Queue()
    racers = [_FORK.Process(target=racer, args=(job, n, together, results), daemon=True) for n in range(RACERS)]
    for process in racers:
        process.start()
    for process in racers:
        process.join()
    if any(process.exitcode for process in racers):
        sys.exit("a racer failed")
    print(json.dumps(dict(results.get(timeout=ROUND_SECONDS) for _ in racers)))


if __name__ == "__main__":
    main()
