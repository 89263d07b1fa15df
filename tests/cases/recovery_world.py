"""Single ticks of the recovery, on an instance whose runs stand as their workers left them."""

import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import dagster as dg
from dagster._core.code_pointer import FileCodePointer
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_resilient import RecoveryPolicy, ResilientIOManager, ResilientResource, resilient_executor
from dagster_resilient import dagster_compat as compat
from dagster_resilient.state.fences import claim_attempt
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.records import Verdict
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.task import Attempt
from dagster_resilient.tick import RecoveryTick
from dagster_resilient.values import store_value

T = TypeVar("T")
QUEUE = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}}
AT_ONCE = RecoveryPolicy(first_wait=0.0)
JOB = "everything"
FAILURE = dg.DagsterRunStatus.FAILURE


def eventually(look: Callable[[], T], seconds: float = 200.0) -> T:
    """Return the first true answer; fail where none comes in time."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.1)
    return found


def an_asset(name: str, *above: str, partitions: Any = None, version: str = "1", **options: Any) -> Any:
    """Return an asset that computes one number."""

    @dg.asset(  # type: ignore[untyped-decorator]
        name=name, deps=list(above), partitions_def=partitions, code_version=version, **options
    )
    def asset() -> int:
        return 1

    return asset


class World:
    """An instance whose queue nobody empties, a store, and the definitions of the day.

    Attributes:
        cursor: What the last tick left.
    """

    def __init__(self, instance: dg.DagsterInstance, url: str, *assets: Any) -> None:
        self.instance, self.url, self.store = instance, url, open_store(url)
        self.records = ObjectRecords(self.store)
        self.resource = ResilientResource(url=url, heartbeat_seconds=1, ttl_seconds=5)
        self.cursor: str | None = None
        self.deploy(*assets)

    def deploy(self, *assets: Any, job: dg.JobDefinition | None = None) -> None:
        """Put new code in the place of the old."""
        self.repository = dg.Definitions(
            assets=assets,
            jobs=[job or dg.define_asset_job(JOB)],
            executor=resilient_executor,
            resources={"resilient": self.resource, "io_manager": ResilientIOManager(resilient=self.resource)},
        ).get_repository_def()

    def a_run(self, status: dg.DagsterRunStatus = FAILURE, job: str = JOB, **fields: Any) -> dg.DagsterRun:
        """Store a run as if a code server had executed it."""
        code = RepositoryPythonOrigin(sys.executable, FileCodePointer(__file__, "repository"))
        fields = {"job_code_origin": JobPythonOrigin(job, code)} | fields
        return self.instance.add_run(dg.DagsterRun(job_name=job, run_id=str(uuid.uuid4()), status=status, **fields))

    def commit(self, run: dg.DagsterRun, asset: str, *partitions: str | None, series: str | None = None) -> None:
        """Commit values as a step of the run does."""
        root = run.root_run_id or run.run_id
        claim = claim_attempt(self.records, root=root, run_id=run.run_id, series=series or root)
        attempt = Attempt(self.store, claim, this_process(claim, heartbeat=None, interval=1, ttl=5), None, self.records)
        version = self.repository.assets_defs_by_key[dg.AssetKey(asset)].code_versions_by_key[dg.AssetKey(asset)]
        for partition in partitions or (None,):
            store_value(attempt.durable((asset,), partition, f"code:{version}"), 1)

    def tick(self, policy: RecoveryPolicy = AT_ONCE) -> str:
        """Let the sensor look once, and keep its cursor."""
        origin = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(python_file=__file__), "here")
        context = dg.SensorEvaluationContext(
            instance_ref=None,
            instance=self.instance,
            repository_def=self.repository,
            repository_name=self.repository.name,
            sensor_name="recovery",
            code_location_origin=origin,
            cursor=self.cursor,
        )
        words = RecoveryTick(context, self.resource, policy).run()
        self.cursor = context.cursor
        return words

    def children(self, run: dg.DagsterRun) -> list[dg.DagsterRun]:
        """The re-executions of a run."""
        return [other for other in self.instance.get_runs() if other.parent_run_id == run.run_id]

    def only_child(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """The one re-execution of a run."""
        (child,) = self.children(run)
        return child

    def fail(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """End a queued run with a failure."""
        compat.report_run_failed(self.instance, run, f"Execution of step {run.run_id} failed.")
        return self.now(run)

    def now(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """The run as it stands now."""
        found = self.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found

    def final(self, run: dg.DagsterRun) -> Verdict | None:
        """The last word on a run."""
        return self.records.get(f"decisions/{run.root_run_id or run.run_id}/{run.run_id}.final.json", Verdict)

    def said(self, run: dg.DagsterRun, words: str) -> int:
        """How often the run's own log says something."""
        events = self.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        return sum(words in (entry.dagster_event.message or "") for entry in events if entry.dagster_event)

    def until_it_always_fails(self, run: dg.DagsterRun, ticks: int, policy: RecoveryPolicy) -> dg.DagsterRun:
        """Let the sensor look so often, and each re-execution fail; return the last one."""
        for _ in range(ticks):
            self.tick(policy)
            for child in self.children(run):
                run = self.fail(child)
        return run


def selected(run: dg.DagsterRun) -> set[str]:
    """Names of the selected assets."""
    return {key.to_user_string() for key in run.asset_selection or ()}


def ranged(start: str, end: str) -> dict[str, str]:
    """Tags of a run over a range of partitions."""
    return {"dagster/asset_partition_range_start": start, "dagster/asset_partition_range_end": end}


class Ticking:
    """The module `time`, with a clock that goes on by a fixed time whenever somebody looks at it."""

    time = staticmethod(time.time)

    def __init__(self, seconds: float) -> None:
        self._times: Iterator[float] = itertools.count(0.0, seconds)

    def monotonic(self) -> float:
        """Seconds."""
        return next(self._times)


class At:
    """A time by the store's clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def timestamp(self) -> float:
        """Seconds."""
        return self._seconds
