"""`plan_run`: what a re-execution of a run would compute, and why. What it says, a tick then does."""

import json
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

from dagster_resilient import RecoveryPolicy, ResilientIOManager, ResilientResource, plan_run, resilient_executor
from dagster_resilient import dagster_compat as compat
from dagster_resilient.briefs import LiveBriefs, store_brief
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.planning import RunPlan
from dagster_resilient.recovery.brief import PartitionList, RunBrief
from dagster_resilient.state.fences import claim_attempt, read_fence
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.task import Attempt
from dagster_resilient.tick import RecoveryTick
from dagster_resilient.values import store_value

QUEUE = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}}
ORIGIN = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(python_file=__file__), "here")
FAILURE = dg.DagsterRunStatus.FAILURE
LETTERS = dg.StaticPartitionsDefinition(list("abcdef"))
CELLS = dg.MultiPartitionsDefinition(
    {"month": dg.StaticPartitionsDefinition(["1", "2", "3"]), "size": dg.StaticPartitionsDefinition(["s", "m", "l"])}
)
RANGE = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "f"}
BOX = {"dagster/asset_partition_range_start": "1|s", "dagster/asset_partition_range_end": "3|l"}
AT_ONCE = RecoveryPolicy(first_wait=0.0)


def definitions(url: str, version: str = "1") -> dg.RepositoryDefinition:
    """Return the definitions of the day."""

    @dg.asset
    def source() -> int:
        return 1

    @dg.asset(
        partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run(), code_version=version, deps=[source]
    )
    def letters() -> dict[str, int]:
        return {}

    @dg.asset(deps=[letters], code_version="1")
    def total() -> int:
        return 1

    @dg.multi_asset(specs=[dg.AssetSpec("left", code_version="1"), dg.AssetSpec("right", code_version="1")])
    def pair() -> tuple[int, int]:
        return 1, 2

    @dg.asset(partitions_def=CELLS, backfill_policy=dg.BackfillPolicy.single_run(), code_version="1")
    def cells() -> dict[str, int]:
        return {}

    @dg.asset_check(asset=total)
    def total_is_positive() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    @dg.asset(code_version="1", check_specs=[dg.AssetCheckSpec("inside", asset="checked")])
    def checked() -> Iterator[Any]:
        yield dg.Output(1)

    @dg.asset(
        code_version="1",
        check_specs=[dg.AssetCheckSpec("gate", asset="gated", blocking=True)],
        partitions_def=LETTERS,
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def gated() -> Iterator[Any]:
        yield dg.Output({})

    @dg.asset(deps=[gated], code_version="1", partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run())
    def below() -> dict[str, int]:
        return {}

    resilient = ResilientResource(url=url)
    return dg.Definitions(
        assets=[source, letters, total, pair, cells, checked, gated, below],
        asset_checks=[total_is_positive],
        jobs=[
            dg.define_asset_job("alphabet", selection=["letters", "total"]),
            dg.define_asset_job("pairs", selection=["left", "right"]),
            dg.define_asset_job("grid", selection=["cells"]),
            dg.define_asset_job("inner", selection=["checked"]),
            dg.define_asset_job("behind", selection=["gated", "below"]),
        ],
        executor=resilient_executor,
        resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
    ).get_repository_def()


class World:
    """An instance, a store, and runs as their workers left them."""

    def __init__(self, instance: dg.DagsterInstance, url: str) -> None:
        self.instance, self.url = instance, url
        self.store = open_store(url)
        self.records = ObjectRecords(self.store)
        self.resource = ResilientResource(url=url)
        self.repository = definitions(url)

    def a_run(self, job: str = "alphabet", **fields: Any) -> dg.DagsterRun:
        """Store a failed run, whose worker has stored what it is to compute."""
        code = RepositoryPythonOrigin(sys.executable, FileCodePointer(__file__, "definitions"))
        fields = {"tags": RANGE, "job_code_origin": JobPythonOrigin(job, code)} | fields
        run = self.instance.add_run(dg.DagsterRun(job_name=job, run_id=str(uuid.uuid4()), status=FAILURE, **fields))
        store_brief(self.records, run, self.instance, lambda: LiveBriefs(self.repository, self.instance)(run))
        return run

    def commit(self, run: dg.DagsterRun, asset: str, *partitions: str | None) -> None:
        """Commit values as a step of the run does."""
        claim = claim_attempt(self.records, root=run.run_id, run_id=run.run_id, series=run.run_id)
        attempt = Attempt(self.store, claim, this_process(claim, heartbeat=None, interval=1, ttl=5), None, self.records)
        for partition in partitions or (None,):
            store_value(attempt.durable((asset,), partition, "code:1"), 1)

    def succeed(self, run: dg.DagsterRun, step: str) -> None:
        """Log the end of a step."""
        kind, data = dg.DagsterEventType.STEP_SUCCESS, StepSuccessData(duration_ms=1.0)
        event = DagsterEvent(kind.value, run.job_name, step_key=step, event_specific_data=data)
        self.instance.report_dagster_event(event, run.run_id)

    def plan(self, run: dg.DagsterRun) -> RunPlan:
        """Plan with the code, and without it: the plans are the same."""
        found = plan_run(run.run_id, self.instance, self.resource, self.repository)
        assert plan_run(run.run_id, self.instance, self.resource) == found
        return found

    def tick(self) -> list[dg.DagsterRun]:
        """Let the sensor look once; return what it launched."""
        before = {run.run_id for run in self.instance.get_runs()}
        context = dg.SensorEvaluationContext(
            instance_ref=None,
            instance=self.instance,
            repository_def=self.repository,
            repository_name=self.repository.name,
            sensor_name="recovery",
            code_location_origin=ORIGIN,
            cursor=None,
        )
        RecoveryTick(context, self.resource, AT_ONCE).run()
        return [run for run in self.instance.get_runs() if run.run_id not in before]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A fresh instance and store."""
    with dg.instance_for_test(overrides=QUEUE) as instance:
        yield World(instance, str(tmp_path / "store"))


def rows(found: RunPlan) -> set[tuple[str, str | None, str, str]]:
    """The rows of a plan."""
    return {(row.asset, row.partition, row.action, row.reason) for row in found.rows()}


def test_a_plan_gives_a_reason_for_each_partition(world: World) -> None:
    """What is redone and what is reused, by whom it was committed; and the work saved."""
    run = world.a_run()
    world.commit(run, "letters", "a", "b", "e")
    found = world.plan(run)
    by = f"committed by run {run.run_id}"
    assert rows(found) == {
        *(("letters", key, "reuse", by) for key in "abe"),
        *(("letters", key, "redo", "not committed") for key in "cdf"),
        ("total", None, "redo", "not committed"),
    }
    assert (found.partitions_saved, found.is_empty) == (3, False)
    assert found.tags == {"dagster/asset_partition_range_start": "c", "dagster/asset_partition_range_end": "f"}


def test_a_dry_run_changes_nothing(world: World) -> None:
    """No fence, no decision, no event, no run."""
    run = world.a_run()
    world.commit(run, "letters", "a")
    keys_before = [info.key for info in world.store.list("")]
    logged = len(world.instance.all_logs(run.run_id))
    world.plan(run)
    assert [info.key for info in world.store.list("")] == keys_before
    assert read_fence(world.records, run.run_id) is None
    assert len(world.instance.all_logs(run.run_id)) == logged
    assert len(world.instance.get_runs()) == 1


def test_new_code_shows_in_a_plan_that_knows_it(world: World) -> None:
    """Without the code, the run is planned with that of its start."""
    run = world.a_run()
    world.commit(run, "letters", *"abc")
    new = definitions(world.url, version="2")
    found = plan_run(run.run_id, world.instance, world.resource, new)
    assert ("letters", "a", "redo", "code version was 1, is 2") in rows(found)
    assert plan_run(run.run_id, world.instance, world.resource).partitions_saved == 3


def test_newer_data_above_is_named(world: World) -> None:
    """What is reused was made from the older: people must be able to see it."""
    run = world.a_run()
    world.commit(run, "letters", *"abc")
    assert world.plan(run).newer_above == ()
    world.instance.report_runless_asset_event(dg.AssetMaterialization("source"))
    found = world.plan(run)
    assert found.newer_above == ("source",)
    assert "newer than at the run's start: source" in found.words()


def test_a_check_that_was_not_evaluated_is_evaluated_alone(world: World) -> None:
    """All assets are committed, and the machine vanished before the check: the check runs, and no asset."""
    run = world.a_run(asset_selection=frozenset({dg.AssetKey("total")}), tags={})
    world.commit(run, "total")
    found = world.plan(run)
    assert (found.missing, found.checks) == ({}, ((("total",), "total_is_positive"),))
    (child,) = world.tick()
    assert child.asset_selection == frozenset()
    assert child.asset_check_selection == {dg.AssetCheckKey(dg.AssetKey("total"), "total_is_positive")}


def test_an_evaluated_check_is_not_evaluated_again(world: World) -> None:
    """Nothing is left."""
    run = world.a_run(asset_selection=frozenset({dg.AssetKey("total")}), tags={})
    world.commit(run, "total")
    world.succeed(run, "total_total_is_positive")
    assert world.plan(run).is_empty
    assert world.tick() == []


def test_a_check_of_the_assets_own_step_is_left_out_by_name(world: World) -> None:
    """To evaluate it would be to compute the asset again; the decision says that it was not."""
    run = world.a_run("inner", tags={})
    world.commit(run, "checked")
    found = world.plan(run)
    assert (found.is_empty, found.unevaluated) == (True, ((("checked",), "inside"),))
    assert world.tick() == []
    logs = world.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    assert any("checked:inside" in (entry.dagster_event.message or "") for entry in logs if entry.dagster_event)


def test_a_blocking_check_of_the_assets_own_step_is_not_passed_by(world: World) -> None:
    """The value is committed, and the check refused it, or never saw it: what is below must not be computed from it."""
    run = world.a_run("behind")
    world.commit(run, "gated", *"abcdef")
    found = world.plan(run)
    assert ("gated", "a", "redo", "committed, but its step did not pass the blocking check gate") in rows(found)
    assert found.missing == {("gated",): tuple("abcdef"), ("below",): tuple("abcdef")}
    (child,) = world.tick()
    assert child.asset_selection == {dg.AssetKey("gated"), dg.AssetKey("below")}


def test_a_blocking_check_that_was_passed_is_not_evaluated_again(world: World) -> None:
    """Its step ended with success: only what is below is left."""
    run = world.a_run("behind")
    world.commit(run, "gated", *"abcdef")
    world.succeed(run, "gated")
    assert set(world.plan(run).missing) == {("below",)}


def test_assets_of_one_step_stay_together(world: World) -> None:
    """Also where only one of them is missing."""
    run = world.a_run("pairs", tags={})
    world.commit(run, "left")
    found = world.plan(run)
    assert ("left", None, "redo", "in one step with right") in rows(found)
    (child,) = world.tick()
    assert child.asset_selection == {dg.AssetKey("left"), dg.AssetKey("right")}


def test_a_range_of_multi_partitions_is_a_box(world: World) -> None:
    """The smallest one around what is missing."""
    run = world.a_run("grid", tags=BOX)
    world.commit(run, "cells", *(f"1|{size}" for size in "sml"), "2|s", "3|s")
    found = world.plan(run)
    assert found.tags == {"dagster/asset_partition_range_start": "2|m", "dagster/asset_partition_range_end": "3|l"}
    (child,) = world.tick()
    targeted = compat.partition_keys_of_run(world.repository, child, dg.AssetKey("cells"), world.instance)
    assert targeted == ["2|m", "2|l", "3|m", "3|l"]


def test_one_multi_partition_has_a_tag_for_each_dimension(world: World) -> None:
    """As a run that Dagster launches has."""
    run = world.a_run("grid", tags=BOX)
    done = [f"{month}|{size}" for month in "123" for size in "sml" if (month, size) != ("2", "m")]
    world.commit(run, "cells", *done)
    assert world.plan(run).tags == {
        "dagster/partition": "2|m", "dagster/partition/month": "2", "dagster/partition/size": "m",
    }  # fmt: skip


def test_a_run_that_never_began_is_planned_by_its_parents_brief(world: World) -> None:
    """Cut down to what the run selects: its assets and its partitions."""
    parent = world.a_run()
    run = dg.DagsterRun(
        job_name="alphabet",
        run_id=str(uuid.uuid4()),
        status=FAILURE,
        parent_run_id=parent.run_id,
        root_run_id=parent.run_id,
        asset_selection=frozenset({dg.AssetKey("letters")}),
        tags={"dagster/partition": "c", "resilient/recovery_of": parent.run_id},
    )
    world.instance.add_run(run)
    found = plan_run(run.run_id, world.instance, world.resource)
    assert dict(found.missing) == {("letters",): ("c",)}


def test_an_unknown_run_and_one_without_a_brief_are_refused(world: World) -> None:
    """By name, and with what to do."""
    with pytest.raises(ConfigurationError, match="knows no run nowhere"):
        plan_run("nowhere", world.instance, world.resource)
    run = world.instance.add_run(dg.DagsterRun(job_name="alphabet", run_id=str(uuid.uuid4()), status=FAILURE))
    with pytest.raises(ConfigurationError, match="Give `definitions`"):
        plan_run(run.run_id, world.instance, world.resource)


def test_a_brief_stays_small(world: World) -> None:
    """100,000 partition keys are packed; a few are readable."""
    many = PartitionList.of([f"2024-{n:06d}" for n in range(100_000)])
    brief = RunBrief(run_id="r", job_name="j", partitions=(many, PartitionList.of(["a", "b"])))
    raw = brief.to_bytes()
    assert len(raw) < 500_000
    assert RunBrief.from_bytes(raw, "here") == brief
    assert len(many.all) == 100_000
    assert b'"keys":["a","b"]' in raw


def test_a_worker_stores_its_brief_once(world: World) -> None:
    """A worker that was started anew for the same run leaves the first: it says what was known when the run began."""
    run = world.a_run()
    first = world.store.get(keys.brief_key(run.run_id))
    world.instance.report_runless_asset_event(dg.AssetMaterialization("source"))
    store_brief(world.records, run, world.instance, lambda: LiveBriefs(world.repository, world.instance)(run))
    assert bytes(world.store.get(keys.brief_key(run.run_id))) == bytes(first)
    assert json.loads(bytes(first))["run_id"] == run.run_id
    assert world.instance.get_run_by_id(run.run_id).tags["resilient/managed"] == "true"  # type: ignore[union-attr]


def test_a_brief_that_cannot_be_made_does_not_stop_a_run(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Recovery can do without; it is told once."""
    run = world.a_run()

    def refuse() -> RunBrief:
        raise ConfigurationError("no such partition")

    store_brief(world.records, run, world.instance, refuse)
    assert "no such partition" in caplog.text
