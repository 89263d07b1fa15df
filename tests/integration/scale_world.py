"""An instance on PostgreSQL with thousands of runs, and a store with the heartbeats of ten thousand tasks.

Runs and their decisions are inserted as they would have come to stand there; nothing is executed. The heartbeats' times
follow a clock of the store that the test moves, so that a minute of watching takes no minute.
"""

import contextlib
import dataclasses
import random
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import sqlalchemy as sa
from dagster._core.code_pointer import FileCodePointer
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin
from dagster._core.storage.runs.schema import RunsTable, RunTagsTable
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._serdes import serialize_value

from dagster_resilient import RecoveryPolicy, ResilientIOManager, ResilientResource, resilient_executor
from dagster_resilient.launchers import OwnLocation, Relaunch
from dagster_resilient.recovery import Rests
from dagster_resilient.state.fences import claim_attempt, fence_run
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.records import Verdict
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore, open_store
from dagster_resilient.task import Attempt
from dagster_resilient.testing import FaultStore
from dagster_resilient.tick import RecoveryTick
from dagster_resilient.values import store_value

PAGE = 1000
# Whoever waits does so for longer than any test.
PATIENT = RecoveryPolicy(first_wait=1e6, longest_wait=1e6)
JOB = "everything"
QUEUE = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}}
FAILURE, STARTED, SUCCESS = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.SUCCESS
START_TAG, END_TAG = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
_ORIGIN = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(python_file=__file__), "here")
_READS = {"get", "get_ranges", "head"}


@dataclass(frozen=True)
class Scale:
    """How many runs there are of each kind, all of the last day.

    Attributes:
        live: Runs in progress; each has a worker that beats.
        tasks: Steps in progress, spread over the live runs; each beats.
        finished: Runs that succeeded. The re-executions of `replaced` are among them.
        replaced: Failed runs whose re-execution has succeeded.
        given_up: Failed runs that recovery has given up after an attempt; with new code or data it would try again.
        settled: Failed runs with another last word: a user cancelled them, or all was done.
        waiting: Failed runs that wait for their backoff.
        partitions: Partitions of each asset.
        length: Partitions of each run.
    """

    live: int = 500
    tasks: int = 10_000
    finished: int = 4_000
    replaced: int = 400
    given_up: int = 60
    settled: int = 20
    waiting: int = 20
    partitions: int = 100_000
    length: int = 20

    @property
    def runs(self) -> int:
        """All runs."""
        return self.live + self.finished + self.replaced + self.given_up + self.settled + self.waiting


FULL = Scale()
SMALL = Scale(live=50, tasks=1_000, finished=390, replaced=40, given_up=12, settled=4, waiting=4)


class ScaleStore(FaultStore):
    """A store with a clock that is set, and a count of what it would be paid for: pages of 1,000 keys, and reads.

    Attributes:
        now: Time by the store's clock.
        beats: Keys of the heartbeats, with their run. They stand beside the objects: a store in memory looks through
            all its keys at each listing, which a real one does not.
        beat_at: Time of the last beat of runs that beat no more.
    """

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.now = datetime.now(UTC)
        self.beats: dict[str, str] = {}
        self.beat_at: dict[str, datetime] = {}
        self.pages = 0

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix."""
        found = [*super().list(prefix, start_after)]
        if prefix == keys.live_prefix():
            found += [ObjectInfo(key, 2, self.beat_at.get(run_id, self.now)) for key, run_id in self.beats.items()]
        self.pages += max(1, -(-len(found) // PAGE))
        return iter(found)

    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        return dataclasses.replace(super().head(key), last_modified=self.now)

    def reads(self) -> int:
        """How many reads there were."""
        return sum(operation.verb in _READS for operation in self.operations)


@dataclass
class Costs:
    """What one tick cost.

    Attributes:
        words: What the tick said.
        lists: Pages of listings.
        reads: Reads of the store.
        writes: Writes to the store.
        queries: Statements on the instance's database.
        connections: Connections opened to it.
        seconds: Of the whole tick.
        submitted: Seconds from the beginning of the tick until each re-execution stood in the queue.
        cursor: Bytes of the cursor that it left.
    """

    words: str = ""
    lists: int = 0
    reads: int = 0
    writes: int = 0
    queries: int = 0
    connections: int = 0
    seconds: float = 0.0
    submitted: list[float] = dataclasses.field(default_factory=list)
    cursor: int = 0


class Watched:
    """Launches, and notes when that was done."""

    def __init__(self, context: dg.SensorEvaluationContext, costs: Costs) -> None:
        self._launcher, self._costs, self._begun = OwnLocation(context), costs, time.perf_counter()

    def launch(self, wanted: Relaunch) -> bool:
        """Launch a re-execution."""
        new = self._launcher.launch(wanted)
        self._costs.submitted.append(time.perf_counter() - self._begun)
        return new


class ScaleWorld:
    """All of it, and the sensor.

    Attributes:
        live: The runs in progress that nothing has happened to.
        waiting: Failed runs that wait for their backoff.
        given_up: Failed runs that new code or new data would arm again.
        settled: Failed runs with another last word.
        cursor: What the last tick left with Dagster.
        rests: What the last tick left in its process.
    """

    def __init__(self, instance: dg.DagsterInstance, scale: Scale) -> None:
        self.instance, self.scale = instance, scale
        self.store = ScaleStore(open_store(f"memory://{uuid.uuid4().hex}"))
        self.records = ObjectRecords(self.store)
        self.resource: Any = ResilientResource(url=self.store.url)
        vars(self.resource)["store"] = self.store
        self.cursor: str | None = None
        self.rests = Rests()
        self._random = random.Random(scale.runs)
        self.repository = _definitions(self.resource, scale.partitions)
        self._inputs = self._learn_inputs()
        self._insert_runs()
        self._beat()

    # ---- what stands there

    def _learn_inputs(self) -> str:
        """What recovery calls the code and the data that are there: let it launch once, and look."""
        one = self._run(FAILURE)
        self._insert([one], timedelta(0))
        self.tick()
        (child,) = self.children([one])
        self.instance.delete_run(child.run_id)
        self.instance.delete_run(one.run_id)
        return child.tags["resilient/inputs"]

    def _insert_runs(self) -> None:
        scale = self.scale
        self.settled: list[dg.DagsterRun] = []
        self.add_history(scale.finished - scale.replaced, scale.replaced, scale.settled)
        roots = [self._run(FAILURE) for _ in range(scale.given_up)]
        self.given_up = [self._run(FAILURE, parent=run) for run in roots]
        self.waiting = [self._run(FAILURE) for _ in range(scale.waiting)]
        self.live = [self._run(STARTED) for _ in range(scale.live)]
        self._insert([*roots, *self.given_up], timedelta(hours=20))
        self._insert([*self.waiting, *self.live], timedelta(0))
        for run in self.given_up:
            self._decide(run, "gave up", "user_error")
        for run in self.waiting:
            fence_run(self.records, run.run_id, reason="Hung: a test.", failure_class="hung", by="test")

    def add_history(self, finished: int, replaced: int, settled: int) -> None:
        """Add runs of the last day with which nobody has to do any more; see `Scale`."""
        failed = [self._run(FAILURE) for _ in range(replaced)]
        children = [self._run(SUCCESS, parent=run) for run in failed]
        more = [self._run(FAILURE) for _ in range(settled)]
        runs = [*failed, *children, *(self._run(SUCCESS) for _ in range(finished)), *more]
        self._random.shuffle(runs)
        self._insert(runs, timedelta(hours=20))
        for run in more:
            self.settle(run)
        self.settled += more

    def settle(self, run: dg.DagsterRun) -> None:
        """Record the last word on a run."""
        self._decide(run, "left", "cancelled")

    def _run(self, status: dg.DagsterRunStatus, parent: dg.DagsterRun | None = None) -> dg.DagsterRun:
        """A run over a few neighbouring partitions, as a code server would have launched it."""
        first = self._random.randrange(self.scale.partitions - self.scale.length)
        tags = {START_TAG: _name(first), END_TAG: _name(first + self.scale.length - 1), "team": "flights"}
        lineage: dict[str, Any] = {}
        if parent is not None:
            lineage = {"parent_run_id": parent.run_id, "root_run_id": parent.run_id}
            tags |= {"dagster/parent_run_id": parent.run_id, "dagster/root_run_id": parent.run_id}
            tags |= {"resilient/recovery_of": parent.run_id, "resilient/attempt": "1", "resilient/inputs": self._inputs}
        return dg.DagsterRun(
            job_name=JOB, run_id=str(uuid.uuid4()), status=status, tags=tags, job_code_origin=_code(), **lineage
        )

    def _insert(self, runs: list[dg.DagsterRun], ago: timedelta) -> None:
        """Insert them at once, spread evenly from so long ago until now."""
        step = ago / max(len(runs), 1)
        begin = datetime.now(UTC).replace(tzinfo=None) - ago
        with self.instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
            connection.execute(RunsTable.insert(), [_row(run, begin + n * step) for n, run in enumerate(runs)])
            connection.execute(
                RunTagsTable.insert(),
                [
                    {"run_id": run.run_id, "key": k, "value": v}
                    for run in runs
                    for k, v in run.tags_for_storage().items()
                ],
            )

    def _decide(self, run: dg.DagsterRun, action: Any, failure: str) -> None:
        root = run.root_run_id or run.run_id
        self.records.create(
            keys.verdict_key(root, run.run_id, "final"),
            Verdict(run_id=run.run_id, action=action, failure_class=failure, reason="A test."),
        )

    def _beat(self) -> None:
        steps = [self.live[n % len(self.live)].run_id for n in range(self.scale.tasks)]
        beating = [("worker", run.run_id) for run in self.live] + [("step", run_id) for run_id in steps]
        self.store.beats = {keys.live_key(run_id, role, uuid.uuid4().hex): run_id for role, run_id in beating}

    def commit(self, run: dg.DagsterRun, count: int) -> None:
        """Commit the first partitions of a run, as its step does."""
        claim = claim_attempt(self.records, root=run.run_id, run_id=run.run_id, series=run.run_id)
        attempt = Attempt(self.store, claim, this_process(claim, heartbeat=None, interval=1, ttl=5), None, self.records)
        first = int(run.tags[START_TAG].removeprefix("p"))
        for n in range(first, first + count):
            store_value(attempt.durable(("legs",), _name(n), "code:1"), 1)

    # ---- what happens

    def take(self, count: int) -> list[dg.DagsterRun]:
        """So many live runs that nothing has happened to yet."""
        taken, self.live = self.live[:count], self.live[count:]
        return taken

    def lose(self, runs: Iterable[dg.DagsterRun]) -> None:
        """Let the machines of some runs vanish."""
        self.store.beat_at |= {run.run_id: self.store.now for run in runs}

    def tick(self, policy: RecoveryPolicy = PATIENT, later: float = 10.0, **options: Any) -> Costs:
        """Let the sensor look once, so many seconds after the last time; return what that cost."""
        self.store.now += timedelta(seconds=later)
        self.store.operations.clear()
        self.store.pages = 0
        context = dg.SensorEvaluationContext(
            instance_ref=None,
            instance=self.instance,
            repository_def=self.repository,
            repository_name=self.repository.name,
            sensor_name="recovery",
            code_location_origin=_ORIGIN,
            cursor=self.cursor,
        )
        with counted_queries() as costs:
            begun, launcher = time.perf_counter(), Watched(context, costs)
            tick = RecoveryTick(context, self.resource, policy, launcher=launcher, rests=self.rests, **options)
            costs.words = tick.run()
            costs.seconds = time.perf_counter() - begun
        self.cursor = context.cursor
        costs.lists, costs.reads = self.store.pages, self.store.reads()
        costs.writes = sum(self.store.count(verb) for verb in ("put", "create", "replace"))
        costs.cursor = len(self.cursor or "")
        return costs

    def children(self, runs: Iterable[dg.DagsterRun]) -> list[dg.DagsterRun]:
        """The re-executions of some runs."""
        return [*self.instance.get_runs(dg.RunsFilter(tags={"dagster/parent_run_id": [run.run_id for run in runs]}))]


@contextlib.contextmanager
def scale_world(url: str, scale: Scale) -> Iterator[ScaleWorld]:
    """Build it all in an empty schema of a PostgreSQL."""
    storage = {"postgres": {"postgres_url": url.replace("postgresql://", "postgresql+psycopg2://")}}
    with dg.instance_for_test(overrides={"storage": storage, **QUEUE}) as instance:
        yield ScaleWorld(instance, scale)


@contextlib.contextmanager
def counted_queries() -> Iterator[Costs]:
    """Count statements and new connections of all engines inside the block."""
    costs = Costs()

    def statement(*_: Any) -> None:
        costs.queries += 1

    def connection(*_: Any) -> None:
        costs.connections += 1

    sa.event.listen(sa.Engine, "before_cursor_execute", statement)
    sa.event.listen(sa.Pool, "connect", connection)
    try:
        yield costs
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", statement)
        sa.event.remove(sa.Pool, "connect", connection)


def _definitions(resource: ResilientResource, partitions: int) -> dg.RepositoryDefinition:
    """Two assets in a row, of very many partitions, below one that other runs compute."""
    many = dg.StaticPartitionsDefinition([_name(n) for n in range(partitions)])

    @dg.asset(partitions_def=many, code_version="1")
    def flights() -> int:
        return 1

    @dg.asset(partitions_def=many, deps=[flights], code_version="1")
    def legs() -> int:
        return 1

    @dg.asset(partitions_def=many, deps=[legs], code_version="1")
    def delays() -> int:
        return 1

    return dg.Definitions(
        assets=[flights, legs, delays],
        jobs=[dg.define_asset_job(JOB, selection=["legs", "delays"])],
        executor=resilient_executor,
        resources={"resilient": resource, "io_manager": ResilientIOManager(resilient=resource)},
    ).get_repository_def()


def _name(n: int) -> str:
    return f"p{n:06d}"


def _code() -> JobPythonOrigin:
    return JobPythonOrigin(JOB, RepositoryPythonOrigin(sys.executable, FileCodePointer(__file__, "repository")))


def _row(run: dg.DagsterRun, when: datetime) -> dict[str, Any]:
    ended = None if run.status is STARTED else when.replace(tzinfo=UTC).timestamp()
    return {
        "run_id": run.run_id,
        "pipeline_name": run.job_name,
        "status": run.status.value,
        "run_body": serialize_value(run),
        "create_timestamp": when,
        "update_timestamp": when,
        "start_time": when.replace(tzinfo=UTC).timestamp(),
        "end_time": ended,
    }
