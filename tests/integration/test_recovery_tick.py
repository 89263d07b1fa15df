"""Single ticks of the recovery sensor on an instance whose runs ended, or stopped, in every way."""

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.code_pointer import FileCodePointer
from dagster._core.events import DagsterEvent, StepSuccessData
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_resilient import RecoveryPolicy, ResilientIOManager, ResilientResource, resilient_executor
from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import StoreUnavailableError
from dagster_resilient.state.fences import claim_attempt, fence_run, read_fence
from dagster_resilient.state.records import Verdict
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.task import Attempt, this_process
from dagster_resilient.tick import RecoveryTick
from dagster_resilient.values import store_value

QUEUE = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}}
ORIGIN = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(python_file=__file__), "here")
LETTERS = dg.StaticPartitionsDefinition(list("abcdef"))
RANGE = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "f"}
AT_ONCE = RecoveryPolicy(first_wait=0.0)
FAILURE, STARTED, QUEUED = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.QUEUED


@dg.asset(partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run(), code_version="1")
def base(resilient: ResilientResource) -> None:
    """A range."""


@dg.asset(deps=[base], code_version="1")
def middle() -> int:
    """One value."""
    return 1


@dg.asset(deps=[middle])
def effect() -> None:
    """No value: done when its step succeeded."""


def repository(url: str) -> dg.RepositoryDefinition:
    """Return the definitions on a store."""
    resilient = ResilientResource(url=url, heartbeat_seconds=1, ttl_seconds=5)
    return dg.Definitions(
        assets=[base, middle, effect],
        jobs=[dg.define_asset_job("everything"), dg.define_asset_job("foreign", executor_def=dg.in_process_executor)],
        executor=resilient_executor,
        resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
    ).get_repository_def()


class World:
    """An instance whose queue nobody empties, a store, and runs as their workers left them."""

    def __init__(self, instance: dg.DagsterInstance, url: str) -> None:
        self.instance, self.url, self.store = instance, url, open_store(url)
        self.repository, self.cursor = repository(url), None
        self.records = ObjectRecords(self.store)

    def a_run(self, status: dg.DagsterRunStatus = FAILURE, job: str = "everything", **fields: Any) -> dg.DagsterRun:
        """Store a run as if a code server had executed it."""
        code = RepositoryPythonOrigin(sys.executable, FileCodePointer(__file__, "repository"))
        fields = {"tags": RANGE, "job_code_origin": JobPythonOrigin(job, code)} | fields
        return self.instance.add_run(dg.DagsterRun(job_name=job, run_id=str(uuid.uuid4()), status=status, **fields))

    def commit(self, run: dg.DagsterRun, asset: str, *partitions: str | None, series: str | None = None) -> None:
        """Commit values as a step of the run does."""
        root = run.root_run_id or run.run_id
        claim = claim_attempt(self.records, root=root, run_id=run.run_id, series=series or root)
        owner = this_process(claim, heartbeat=None, interval=1, ttl=5)
        for partition in partitions:
            attempt = Attempt(self.store, claim, owner, None, self.records)
            fingerprint = None if asset == "effect" else "code:1"
            store_value(attempt.durable((asset,), partition, fingerprint), 1)

    def succeed(self, run: dg.DagsterRun, step: str) -> None:
        """Log the end of a step."""
        success = DagsterEvent(
            event_type_value=dg.DagsterEventType.STEP_SUCCESS.value,
            job_name=run.job_name,
            step_key=step,
            event_specific_data=StepSuccessData(duration_ms=1.0),
        )
        self.instance.report_dagster_event(success, run.run_id)

    def tick(self, policy: RecoveryPolicy = AT_ONCE) -> str:
        """Let the sensor look once, and keep its cursor."""
        context = dg.SensorEvaluationContext(
            instance_ref=None,
            instance=self.instance,
            repository_def=self.repository,
            repository_name=self.repository.name,
            sensor_name="recovery",
            code_location_origin=ORIGIN,
            cursor=self.cursor,
        )
        resource = ResilientResource(url=self.url, heartbeat_seconds=1, ttl_seconds=5)
        words = RecoveryTick(context, resource, policy).run()
        self.cursor = context.cursor
        return words

    def children(self, run: dg.DagsterRun) -> list[dg.DagsterRun]:
        """The re-executions of a run."""
        return [other for other in self.instance.get_runs() if other.parent_run_id == run.run_id]

    def verdict(self, run: dg.DagsterRun) -> Verdict | None:
        """The recorded decision about a run."""
        prefix = f"decisions/{run.root_run_id or run.run_id}/{run.run_id}"
        final: Verdict | None = self.records.get(f"{prefix}.final.json", Verdict)
        return final or self.records.get(f"{prefix}.launch.json", Verdict)

    def end(self, run: dg.DagsterRun, kind: dg.DagsterEventType = dg.DagsterEventType.RUN_FAILURE) -> None:
        """End a queued run."""
        compat.report_run_failed(self.instance, run, "again")


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    """A fresh instance and store."""
    with dg.instance_for_test(overrides=QUEUE) as instance:
        yield World(instance, str(tmp_path / "store"))


@pytest.fixture(params=["one by one", "by listing"])
def look(request, monkeypatch) -> None:
    """The partitions count as few, or as so many that they are looked at through the folded index."""
    if request.param == "by listing":
        monkeypatch.setattr("dagster_resilient.state.index.FEW", 0)
        monkeypatch.setattr("dagster_resilient.values.FEW", 0)
        monkeypatch.setattr("dagster_resilient.state.index._MOVED", 0)


def selected(run: dg.DagsterRun) -> set[str]:
    """Names of the selected assets."""
    return {key.to_user_string() for key in run.asset_selection or ()}


@pytest.mark.usefixtures("look")
def test_exactly_what_is_missing_is_re_executed(world):
    """Two of six partitions are committed: the re-execution covers the other four, and what lies below."""
    run = world.a_run()
    world.commit(run, "base", "a", "b")
    assert "1 re-executed" in world.tick()
    (child,) = world.children(run)
    assert selected(child) == {"base", "middle", "effect"}
    tags = child.tags
    assert (tags["dagster/asset_partition_range_start"], tags["dagster/asset_partition_range_end"]) == ("c", "f")
    assert (child.status, child.root_run_id) == (QUEUED, run.run_id)


def test_what_is_done_is_not_selected(world):
    """All partitions are committed: only the assets after them run, and no partition tag is left over."""
    run = world.a_run()
    world.commit(run, "base", *"abcdef")
    world.succeed(run, "base")
    world.tick()
    (child,) = world.children(run)
    assert selected(child) == {"middle", "effect"}
    assert not any(compat.is_partition_tag(tag) for tag in child.tags)


def test_what_stands_behind_a_loop_is_not_forgotten(world):
    """All partitions are committed and the step failed: it runs once more over the last of them, which it skips."""
    run = world.a_run()
    world.commit(run, "base", *"abcdef")
    world.tick()
    (child,) = world.children(run)
    assert selected(child) == {"base", "middle", "effect"}
    assert child.tags["dagster/partition"] == "f"
    assert "committed, but its step did not end" in world.verdict(run).reason


def test_ticks_that_look_again_launch_nothing_more(world):
    """The sensor sees the same failed run at each tick; it is re-executed once, also without the cursor."""
    run = world.a_run()
    for _ in range(3):
        world.tick()
        world.cursor = None
    assert len(world.children(run)) == 1


def test_a_committed_but_unrecorded_value_is_adopted(world):
    """A run that died between its commit and Dagster's event is not repeated for it; the event is made up for."""
    run = world.a_run()
    world.commit(run, "base", *"abcdef")
    world.tick()
    assert world.instance.get_materialized_partitions(dg.AssetKey("base")) == set("abcdef")


@pytest.mark.usefixtures("look")
def test_a_recorded_but_absent_object_is_missing(world):
    """A value whose object was deleted is computed again."""
    run = world.a_run()
    world.commit(run, "base", *"abcdef")
    gone = [info.key for info in world.store.list("tasks/base/data/c/")]
    world.store.delete(gone)
    world.tick()
    (child,) = world.children(run)
    assert child.tags["dagster/partition"] == "c"


@pytest.mark.usefixtures("look")
def test_a_run_that_did_everything_is_not_repeated(world):
    """Nothing is missing: the decision says so, and no run is launched."""
    run = world.a_run(asset_selection=frozenset({dg.AssetKey("middle")}), tags={})
    world.commit(run, "middle", None)
    assert "1 adopted" in world.tick()
    assert world.children(run) == []
    assert world.verdict(run).action == "adopted"


def test_values_of_an_unrelated_run_do_not_count(world):
    """A new run was asked to compute: what others committed before is no reason to skip it."""
    world.commit(world.a_run(dg.DagsterRunStatus.SUCCESS), "base", *"abcdef")
    run = world.a_run()
    world.tick()
    (child,) = world.children(run)
    assert "base" in selected(child)


def test_another_code_version_invalidates(world, monkeypatch):
    """What was committed under another declared code version is computed again."""
    run = world.a_run()
    world.commit(run, "base", *"abcdef")
    changed = dg.asset(name="base", partitions_def=LETTERS, code_version="2")(lambda: None)
    resources = {"io_manager": ResilientIOManager(resilient=ResilientResource(url=world.url))}
    world.repository = dg.Definitions(
        assets=[changed, middle, effect], jobs=[dg.define_asset_job("everything")], executor=resilient_executor,
        resources=resources,
    ).get_repository_def()  # fmt: skip
    world.tick()
    (child,) = world.children(run)
    assert "base" in selected(child)


def test_attempts_end_with_a_visible_giving_up(world):
    """A run that always fails is tried a finite number of times; then the decision is recorded once."""
    policy = RecoveryPolicy(max_attempts={"crashed": 2}, first_wait=0.0)
    run = latest = world.a_run()
    for _ in range(10):
        world.tick(policy)
        for child in world.children(latest):
            world.end(child)
            latest = child
    assert len(world.instance.get_runs()) == 3
    verdict = world.verdict(latest)
    assert verdict.action == "gave up"
    assert "2 of 2 attempts" in verdict.reason
    events = world.instance.all_logs(latest.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    assert sum("gave up" in (entry.dagster_event.message or "") for entry in events) == 1
    assert run.run_id != latest.run_id


def test_a_cancelled_run_stays_cancelled(world):
    """A user's cancel is respected, also where the run then ended as a failure."""
    cancelled = world.a_run(dg.DagsterRunStatus.CANCELED)
    failed = world.a_run(STARTED)
    world.instance.report_run_canceling(failed)
    compat.report_run_failed(world.instance, world.instance.get_run_by_id(failed.run_id), "ended")
    world.tick()
    assert world.children(cancelled) == world.children(failed) == []
    assert world.verdict(failed).failure_class == "cancelled"


def test_dagsters_own_retries_have_the_first_word(world):
    """While Dagster says that it retries the run, we stand back."""
    waiting = world.a_run(tags={"dagster/will_retry": "true"})
    retried = world.a_run(tags={"dagster/auto_retry_run_id": "x"})
    world.tick()
    assert world.children(waiting) == world.children(retried) == []


def test_runs_of_other_executors_are_left_alone(world):
    """Without our executor nobody knows whether the run's worker lives."""
    run = world.a_run(job="foreign")
    assert world.tick() == "Nothing to recover."
    assert world.children(run) == []


def test_a_lost_run_is_fenced_closed_and_re_executed(world, monkeypatch):
    """STARTED, and its worker silent: fence, FAILURE with the reason, re-execution; judged by the store's clock."""
    run = world.a_run(STARTED)
    world.commit(run, "base", "a")
    now = [1_000.0]
    monkeypatch.setattr("dagster_resilient.tick.store_now", lambda *_: _At(now[0]))
    monkeypatch.setattr("dagster_resilient.tick.list_beats", lambda _: [_Beat(run.run_id, 1_000.0)])
    for seconds in (0, 2, 4):
        now[0] = 1_000.0 + seconds
        assert "lost" not in world.tick()
    now[0] = 1_006.0
    words = world.tick()
    assert "1 lost runs closed" in words
    assert "1 re-executed" in words
    assert world.instance.get_run_by_id(run.run_id).status is FAILURE
    assert "no heartbeat" in read_fence(world.records, run.run_id).reason
    assert world.verdict(run).failure_class == "lost"


def test_a_store_that_does_not_answer_convicts_nobody(world, monkeypatch):
    """A failed probe ends the tick, and the watch begins anew."""
    run = world.a_run(STARTED)
    now = [1_000.0]
    monkeypatch.setattr("dagster_resilient.tick.list_beats", lambda _: [_Beat(run.run_id, 1_000.0)])
    monkeypatch.setattr("dagster_resilient.tick.store_now", lambda *_: _At(now[0]))
    world.tick()
    with monkeypatch.context() as outage:
        outage.setattr("dagster_resilient.tick.store_now", _refuse)
        now[0] = 1_100.0
        assert "nothing is judged" in world.tick()
    for seconds in (101, 103, 104):
        now[0] = 1_000.0 + seconds
        world.tick()
    assert world.instance.get_run_by_id(run.run_id).status is STARTED


def test_a_store_that_answers_slowly_ages_no_heartbeat(world, monkeypatch):
    """Time passes between the listing of a heartbeat and its answer: a worker that beat 1 s before it is well."""
    run = world.a_run(STARTED)
    now = [1_000.0]

    def listed_slowly(_):
        beat = _Beat(run.run_id, now[0] - 1.0)
        now[0] += 6.0
        return [beat]

    monkeypatch.setattr("dagster_resilient.tick.store_now", lambda *_: _At(now[0]))
    monkeypatch.setattr("dagster_resilient.tick.list_beats", listed_slowly)
    for _ in range(4):
        assert "lost" not in world.tick()
    assert world.instance.get_run_by_id(run.run_id).status is STARTED


def test_a_store_that_vanished_is_not_made_anew(world, tmp_path):
    """Also by a sensor that was started since: it writes nothing, judges nothing, and goes on when it is back."""
    run = world.a_run()
    world.commit(run, "base", "a")
    world.tick()
    store = Path(world.url)
    store.rename(tmp_path / "elsewhere")
    assert "does not answer" in world.tick()
    assert not store.exists()
    store.mkdir()
    assert "holds nothing now" in world.tick()
    assert list(store.iterdir()) == []
    store.rmdir()
    (tmp_path / "elsewhere").rename(store)
    assert "does not answer" not in world.tick()


def test_earlier_runs_are_fenced_before_the_plan(world):
    """An orphan of a failed run may still write: it is refused before what it left is read."""
    run = world.a_run()
    world.tick()
    assert read_fence(world.records, run.run_id).failure_class == "superseded"


def test_one_bad_run_does_not_stop_the_others(world, monkeypatch):
    """An error in the recovery of one run is logged, and the next run is recovered."""
    bad, good = world.a_run(), world.a_run()
    real = compat.cancelled_by_user
    monkeypatch.setattr(compat, "cancelled_by_user", lambda i, run: 1 / 0 if run.run_id == bad.run_id else real(i, run))
    words = world.tick()
    assert "1 skipped on an error" in words
    world.tick()
    events = world.instance.all_logs(bad.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    assert sum((entry.dagster_event.message or "").startswith("Recovery: failed") for entry in events) == 1
    assert len(world.children(good)) == 1


def test_a_run_that_cannot_be_re_executed_is_given_up(world):
    """A run without a code origin can never be launched again: say so once, and do not try for a day."""
    run = world.a_run(job_code_origin=None)
    assert "1 given up" in world.tick()
    assert world.tick() == "Nothing to recover."
    assert "cannot be re-executed" in world.verdict(run).reason


def test_tags_and_config_are_kept_and_bookkeeping_is_not(world):
    """The re-execution keeps what a user set, and nothing that belongs to the one run."""
    tags = RANGE | {"team": "x", "dagster/priority": "5", "dagster/run_key": "k", "resilient/resume": "true"}
    config = {"execution": {"config": {"max_concurrent": 1}}}
    run = world.a_run(tags=tags, run_config=config)
    world.tick()
    (child,) = world.children(run)
    assert (child.tags["team"], child.tags["dagster/priority"]) == ("x", "5")
    assert "dagster/run_key" not in child.tags
    assert child.run_config == config
    assert child.tags["resilient/recovery_of"] == run.run_id
    assert all(len(value) < 255 for value in child.tags.values())


def test_a_fence_written_by_hand_is_respected(world):
    """A run that was fenced as lost before the sensor died is closed like any other."""
    run = world.a_run(STARTED)
    fence_run(world.records, run.run_id, reason="Lost: before.", failure_class="lost", by="earlier tick")
    compat.report_run_failed(world.instance, run, "closed by hand")
    world.tick()
    assert world.verdict(run).failure_class == "lost"


class _At:
    """A time by the store's clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def timestamp(self) -> float:
        """Seconds."""
        return self._seconds


class _Beat:
    """A worker's heartbeat in a listing."""

    role = "worker"

    def __init__(self, run_id: str, seconds: float) -> None:
        self.run_id, self.last_modified = run_id, _At(seconds)


def _refuse(*_: Any) -> None:
    raise StoreUnavailableError("down")
