"""The code location of the runs that are well, and look ill.

Each computation is one line of a journal, and then waits at a gate, a file that the test makes. No postponed
annotations here: Dagster inspects the assets.
"""

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from calm_terms import BUSY, CALM, DOOMED, HELD, IMPORT, IMPORTED, SEATED, SLOW, STANDING, STORY, TIMES
from dagster._core.execution.plan.active import ActiveExecution

from dagster_resilient import RecoveryPolicy, ResilientResource, build_recovery_sensor, resilient_executor
from dagster_resilient.state.store import RecordStore

FOLDER = Path(os.environ["CHAOS_FOLDER"])
LONGEST_WAIT = 2 * TIMES.patience
# The doomed run is lost twice: with nobody but the sensor to notice, and with its code server looking on.
LOSSES = 2
_HOLDS_THE_GIL = ctypes.PyDLL(None)
stories = dg.StaticPartitionsDefinition([*CALM, DOOMED])


def _take_long_to_import() -> None:
    """Sleep in the run worker that is the first to see the file, and in its steps; never in the code server."""
    claimed = FOLDER / IMPORTED.format(os.getpid())
    if multiprocessing.parent_process() is None:
        return
    if not (FOLDER / IMPORTED.format(os.getppid())).exists():
        try:
            (FOLDER / IMPORT).rename(claimed)
        except FileNotFoundError:
            return
    time.sleep(TIMES.imported)


def _leave_cores_to_others() -> None:
    """Dagster's executor spins while it waits for a slot of a pool: all others would be slow for that alone."""
    plain = ActiveExecution.get_steps_to_execute

    def rested(execution: ActiveExecution, limit: int | None = None) -> Any:
        found = plain(execution, limit)
        if not found:
            time.sleep(0.05)
        return found

    setattr(ActiveExecution, "get_steps_to_execute", rested)  # noqa: B010 - of another type than the method


def _hold_the_gil() -> None:
    """Do what a C extension does that computes for long without a thought for others: no thread gets its turn."""
    deadline = time.monotonic() + TIMES.held
    while (left := deadline - time.monotonic()) > 0:
        _HOLDS_THE_GIL.sleep(int(left) + 1)


def _wait_until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_WAIT
    while not look() and time.monotonic() < deadline:
        time.sleep(0.1)


def journal(story: str) -> Path:
    """Where the computations of a story are noted."""
    return FOLDER / f"journal-{story}"


def note(asset: str, partition: str, run: dg.DagsterRun) -> None:
    """Write the line: a computation begins."""
    line = f"{asset} {partition} {os.getpid()} {run.run_id}\n"
    with journal(run.tags[STORY]).open("a") as file:
        file.write(line)


def act(story: str) -> None:
    """Do what makes the story look ill, and wait at the gate: the doomed run only until it was lost often enough."""
    if story == BUSY:
        _hold_the_gil()
        (FOLDER / HELD.format("step")).touch()
    if story != DOOMED or len(journal(story).read_text().splitlines()) <= LOSSES:
        _wait_until((FOLDER / f"gate-{story}").exists)


class CalmResource(ResilientResource):
    """Makes the worker of the busy run hold its GIL while its step does."""

    @contextmanager
    def run_worker(
        self,
        run: dg.DagsterRun,
        instance: dg.DagsterInstance,
        begun: Callable[[RecordStore], None] = lambda _: None,
    ) -> Iterator[None]:
        """Hold it in a thread beside the executor, once the heartbeat has begun."""
        with super().run_worker(run, instance, begun):
            if run.tags.get(STORY) == BUSY:
                threading.Thread(target=self._hold, daemon=True).start()
            yield

    def _hold(self) -> None:
        _wait_until(journal(BUSY).exists)
        _hold_the_gil()
        (FOLDER / HELD.format("worker")).touch()


def an_asset(name: str, resource: str = "resilient", *, gate: bool = True, **options: Any) -> dg.AssetsDefinition:
    """Return an asset each partition of which is a story's computation.

    Args:
        name: Its name.
        resource: Key of the resource through which it goes to the store.
        gate: Whether the story happens here.
        options: Of `dagster.asset`.
    """

    @dg.asset(name=name, partitions_def=stories, code_version="1", required_resource_keys={resource}, **options)
    def asset(context: dg.AssetExecutionContext) -> None:
        for part in getattr(context.resources, resource).task(context).partitions():
            note(name, part.key, context.run)
            if gate:
                act(context.run.tags[STORY])
            part.save({"run": context.run.run_id, "read": {}})

    return asset


def a_resource(**options: Any) -> CalmResource:
    """Return a resource on the store."""
    url = dg.EnvVar("RESILIENT_URL")
    return CalmResource(url=url, heartbeat_seconds=TIMES.interval, ttl_seconds=TIMES.ttl, **options)


_take_long_to_import()
_leave_cores_to_others()
# The sensor looks through the slow connection too: what it sees of a heartbeat is old when it judges.
defs = dg.Definitions(
    assets=[
        an_asset("calm"),
        an_asset("slowly", "slow"),
        an_asset(STANDING, gate=False),
        an_asset(SEATED, deps=[STANDING], pool="seats"),
    ],
    executor=resilient_executor,
    jobs=[
        dg.define_asset_job("calm_job", selection=["calm"]),
        dg.define_asset_job(f"{SLOW}_job", selection=["slowly"]),
        dg.define_asset_job(f"{BUSY}_job", selection=[SEATED]),
        dg.define_asset_job("waiting_job", selection=[STANDING, SEATED]),
    ],
    sensors=[
        build_recovery_sensor(
            RecoveryPolicy(first_wait=1.0, longest_wait=2.0), resource_key="slow", minimum_interval_seconds=1
        )
    ],
    resources={
        "resilient": a_resource(),
        "slow": a_resource(storage_options={"endpoint_url": os.environ["CALM_SLOW_URL"]}),
    },
)
