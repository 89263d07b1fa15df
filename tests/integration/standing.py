"""Dagster's own daemons, single-stepped, over a real instance and a real code location, beside our recovery.

The code server, the queue, the retries, the monitoring, the backfills and the sensors are Dagster's. Only the run
worker is played by the test's own process, step after step, or not at all: that is what a lost machine looks like.
"""

import datetime as dt
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import sqlalchemy as sa
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run
from dagster._core.storage.runs.schema import RunsTable
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.asset_daemon import AssetDaemon
from dagster._daemon.auto_run_reexecution.event_log_consumer import EventLogConsumerDaemon
from dagster._daemon.backfill import execute_backfill_iteration
from dagster._daemon.freshness import FreshnessDaemon
from dagster._daemon.monitoring.run_monitoring import execute_run_monitoring_iteration
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon
from dagster._daemon.sensor import execute_sensor_iteration
from dagster._grpc.types import ExecuteRunArgs
from dagster._scheduler.scheduler import launch_scheduled_runs

from dagster_resilient.state.beats import list_beats
from dagster_resilient.state.fences import claim_attempt, read_fence
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.records import Fence, Verdict
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.task import Attempt
from dagster_resilient.values import store_value

FAILURE, SUCCESS = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS
QUEUED, STARTED, STARTING = dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING
SETTINGS = """
telemetry: {enabled: false}
run_launcher: {module: standing_launcher, class: Launcher}
"""
LOCATION = Path(__file__).with_name("standing_location.py")
_LOGGER = logging.getLogger("standing")


class Standing:
    """An instance, a code location and a store in one folder.

    Attributes:
        folder: It also holds the flags by which a test makes assets fail, and what the code location notes down.
    """

    def __init__(self, folder: Path, instance: dg.DagsterInstance, context: Any) -> None:
        self.folder, self.instance, self._context = folder, instance, context
        self._store = open_store(str(folder / "store"))
        self.records = ObjectRecords(self._store)
        self._module = _load(folder / "pipeline.py")
        self._here = self._module.definitions(dg.in_process_executor).get_repository_def()

    # ---- Dagster's daemons

    def tick(self, *others: str) -> str:
        """Evaluate the recovery sensor, and others by name, once; return what the recovery said."""
        wanted = {"resilient_recovery", *others}
        with mock.patch("dagster._daemon.sensor.is_under_min_interval", lambda _, found: found.name not in wanted):
            list(execute_sensor_iteration(self._context, _LOGGER, None, None))
        states = [state for state in self.instance.all_instigator_state() if "recovery" in state.instigator_name]
        (state,) = states
        (latest,) = self.instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1)
        assert latest.error is None, latest.error
        return latest.skip_reason or ""

    def queue(self) -> None:
        """Let the queue launch what may run."""
        list(QueuedRunCoordinatorDaemon(1).run_iteration(self._context))

    def retry(self) -> None:
        """Let Dagster's run retries look at what has ended since they looked last."""
        list(EventLogConsumerDaemon().run_iteration(self._context))

    def monitor(self) -> None:
        """Let Dagster's run monitoring look."""
        list(execute_run_monitoring_iteration(self._context, _LOGGER))

    def monitored(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """Let Dagster's run monitoring look, and return a run as it stands thereafter."""
        self.monitor()
        return self.now(run)

    def backfill(self, times: int = 1) -> None:
        """Let Dagster's backfill daemon go on."""
        for _ in range(times):
            errors = [error for error in execute_backfill_iteration(self._context, _LOGGER) if error is not None]
            assert not errors, errors

    def automate(self) -> None:
        """Let declarative automation ask for what it wants."""
        daemon = AssetDaemon(settings={}, pre_sensor_interval_seconds=0)
        with mock.patch("dagster._daemon.asset_daemon.is_under_min_interval", return_value=False):
            daemon._run_iteration_impl(self._context, None, {}, {})

    def schedule(self, now: dt.datetime) -> None:
        """Let Dagster's scheduler look at a given time."""
        errors = list(filter(None, launch_scheduled_runs(self._context, _LOGGER, now, {})))
        assert not errors, errors

    def freshness(self, asset: str) -> Any:
        """Let Dagster judge how fresh things are, and return what it says of an asset."""
        list(FreshnessDaemon().run_iteration(self._context))
        key = dg.AssetKey(asset)
        return self.instance.get_freshness_state_records([key])[key].freshness_state

    def request(self) -> Any:
        """Return the workspace as the UI sees it."""
        return self._context.create_request_context()

    # ---- runs

    def launch(self, job: str, *assets: str, **tags: str) -> dg.DagsterRun:
        """Queue a run and let the queue launch it."""
        run = self.submit(job, *assets, **tags)
        self.queue()
        return self.now(run)

    def submit(self, job: str, *assets: str, **tags: str) -> dg.DagsterRun:
        """Queue a run of the code location, as the UI does."""
        workspace = self.request()
        (location,) = workspace.code_locations
        (remote,) = [j for repo in location.get_repositories().values() for j in repo.get_all_jobs() if j.name == job]
        keys = frozenset(dg.AssetKey(name) for name in assets) or None
        definition = self._here.get_job(job)
        chosen = definition if keys is None else definition.get_subset(asset_selection=keys)
        run = self.instance.create_run_for_job(
            chosen,
            tags=tags,
            asset_selection=keys,
            remote_job_origin=remote.get_remote_origin(),
            job_code_origin=remote.get_python_origin(),
        )
        return self.instance.submit_run(run.run_id, workspace)

    def start(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """Log that the run's worker has started. It does nothing and sends no heartbeat."""
        event = dg.DagsterEvent(event_type_value=dg.DagsterEventType.PIPELINE_START.value, job_name=run.job_name)
        self.instance.report_dagster_event(event, run.run_id)
        return self.now(run)

    def work(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """Execute a launched run here and now, and return it as it ended."""
        assert self.now(run).status is STARTING
        execute_run(InMemoryJob(self._here.get_job(run.job_name)), self.now(run), self.instance)
        return self.now(run)

    @contextmanager
    def worker(self, run: dg.DagsterRun) -> Iterator[None]:
        """Execute a launched run in a process of its own, with its real executor, until the end of the block."""
        assert run.job_code_origin is not None
        arguments = ExecuteRunArgs(run.job_code_origin, run.run_id, self.instance.get_ref()).get_command_args()
        command = [sys.executable, "-m", "dagster", *arguments[arguments.index("api") :]]
        env = os.environ | {"DAGSTER_HOME": str(self.folder / "home")}
        with (self.folder / "worker.log").open("w") as log:
            process = subprocess.Popen(command, env=env, cwd=self.folder, stdout=log, stderr=log)
        try:
            self.wait(lambda: any(beat.run_id == run.run_id for beat in list_beats(self._store)))
            yield
        finally:
            process.kill()
            process.wait()

    def work_all(self) -> list[dg.DagsterRun]:
        """Launch what may run, execute all of it, and return it as it ended."""
        self.queue()
        waiting = self.instance.get_runs(dg.RunsFilter(statuses=[STARTING]), ascending=True)
        return [self.work(run) for run in waiting]

    def fail_next(self, asset: str, partition: str | None = None, times: int = 1) -> None:
        """Let the next computations of an asset fail."""
        (self.folder / f"fail-{asset}-{partition}").write_text("x" * times)

    def noted(self, name: str) -> list[str]:
        """Return what the code location noted down, in order."""
        notes = self.folder / name
        return notes.read_text().split() if notes.exists() else []

    def computed(self) -> list[str]:
        """Return what was computed, in order: `asset` or `asset[partition]`."""
        return self.noted("computed")

    def commit(self, run: dg.DagsterRun, asset: str, *partitions: str | None) -> None:
        """Commit values as a step of the run does that dies before Dagster's event."""
        root = run.root_run_id or run.run_id
        claim = claim_attempt(self.records, root=root, run_id=run.run_id, series=root)
        owner = this_process(claim, heartbeat=None, interval=1, ttl=5)
        attempt = Attempt(self._store, claim, owner, None, self.records)
        for partition in partitions or (None,):
            store_value(attempt.durable((asset,), partition, "code:1"), 1)

    def now(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """The run as it stands now."""
        found = self.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found

    def children(self, run: dg.DagsterRun) -> list[dg.DagsterRun]:
        """The direct re-executions of a run, oldest first."""
        return [other for other in self.instance.get_runs(ascending=True) if other.parent_run_id == run.run_id]

    def only_child(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """The one re-execution of a run."""
        (child,) = self.children(run)
        return child

    def lose(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """Let the run's machine vanish after its worker started; return the run as the recovery closed it."""
        self.start(run)
        self.tick_until(lambda: self.now(run).is_finished)
        return self.now(run)

    def fail(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """Log that a run has failed, as its worker does last."""
        event = dg.DagsterEvent(event_type_value=dg.DagsterEventType.PIPELINE_FAILURE.value, job_name=run.job_name)
        self.instance.report_dagster_event(event, run.run_id)
        return self.now(run)

    def age(self, run: dg.DagsterRun, seconds: float) -> None:
        """Let a run have ended so much earlier."""
        ended = RunsTable.c.end_time
        older = sa.update(RunsTable).where(RunsTable.c.run_id == run.run_id).values({ended: ended - seconds})
        storage: Any = self.instance.run_storage
        with storage.connect() as connection:
            connection.execute(older)

    def tick_until(self, done: Callable[[], Any], seconds: float = 200.0) -> None:
        """Let the sensors look until something is so."""
        self.wait(lambda: self.tick() and done(), seconds)

    def wait(self, done: Callable[[], Any], seconds: float = 200.0) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "the awaited state did not come"
            time.sleep(0.1)

    # ---- our records

    def final(self, run: dg.DagsterRun) -> Verdict | None:
        """The last word of the recovery on a run."""
        return self.records.get(f"decisions/{run.root_run_id or run.run_id}/{run.run_id}.final.json", Verdict)

    def fence(self, run: dg.DagsterRun) -> Fence | None:
        """The fence of a run."""
        return read_fence(self.records, run.run_id)

    def end_all(self) -> None:
        """End whatever a test left, so that the next one meets a quiet instance."""
        for run in self.instance.get_runs(dg.RunsFilter(statuses=[QUEUED, STARTING, STARTED])):
            self.instance.report_run_canceled(run)


@contextmanager
def stand(folder: Path, settings: str = "") -> Iterator[Standing]:
    """Write a code location and an instance into a folder, and load both."""
    (folder / "home").mkdir()
    (folder / "home" / "dagster.yaml").write_text(SETTINGS + settings)
    shutil.copyfile(LOCATION, folder / "pipeline.py")
    # The code server opens the instance too, and thus needs the launcher.
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with mock.patch.dict(os.environ, PYTHONPATH=path), dg.DagsterInstance.from_config(str(folder / "home")) as instance:
        target = PythonFileTarget(
            python_file=str(folder / "pipeline.py"),
            attribute=None,
            working_directory=str(folder),
            location_name="here",
        )
        with create_test_daemon_workspace_context(target, instance) as context:
            yield Standing(folder, instance, context)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"standing_{path.parent.name}".replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
