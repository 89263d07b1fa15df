"""Steps that a resuming run leaves out since its series has done them, and assets that must not be dropped for good."""

import os
import uuid
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import StepMaterializationData
from left_out_group import ASSET_RESUME, LETTERS, RANGE, RESUME, Group, an_asset

from dagster_resilient import executor
from dagster_resilient.dagster_compat import skips
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.resources import resumes_parent


@pytest.fixture
def group() -> Iterator[Group]:
    """A fresh one, in memory."""
    with dg.instance_for_test() as instance:
        yield Group(instance, f"memory://{uuid.uuid4().hex}")


def test_what_the_series_committed_is_left_out_and_named(group: Group) -> None:
    """A button on the root run after its recovery: what the recovery did is not done again."""
    root = group.a_run()
    group.commit(root, "first")
    recovery = group.a_run("second", "third", parent=root, **{"resilient/recovery_of": root.run_id})
    group.commit(recovery, "second")
    found = group.left_out(group.a_run(parent=root, **RESUME))
    assert set(found) == {"first", "second"}
    assert found["second"] == f"second: committed by run {recovery.run_id}; not computed again."


def test_the_rest_of_the_plan_takes_the_outputs_as_there(group: Group) -> None:
    """Also where a step may start as soon as its inputs exist, which looks for them in this run's plan."""
    root = group.a_run()
    group.commit(root, "first")
    context, whole = group.worker(group.a_run(parent=root, **RESUME))
    rest = skips.without_steps(context, whole, executor._finished(context, whole, [group.resource]))
    assert rest.step_keys_to_execute == ["second", "third"]
    assert {(one.step_key, one.output_name) for one in rest.known_state.ready_outputs} == {("first", "result")}


def test_a_run_that_starts_afresh_leaves_nothing_out(group: Group) -> None:
    """All means all, also below a run that resumed."""
    root = group.a_run()
    group.commit(root, "first")
    assert group.left_out(group.a_run(parent=root)) == {}
    assert group.left_out(root) == {}


def test_a_worker_started_anew_leaves_out_what_its_run_committed(group: Group) -> None:
    """It died between the commit and the step's success."""
    root = group.a_run()
    group.commit(root, "first")
    assert set(group.left_out(root, resumed=True)) == {"first"}


def test_only_this_series_code_and_present_objects_count(group: Group) -> None:
    """The rules of the recovery sensor, here as well."""
    root = group.a_run()
    group.commit(root, "first", series="another")
    again = group.a_run(parent=root, **RESUME)
    assert group.left_out(again) == {}
    group.commit(root, "first", version="0")
    assert group.left_out(again) == {}
    group.commit(root, "first")
    assert set(group.left_out(again)) == {"first"}
    objects = [info.key for info in group.store.list("tasks/first/data/")]
    assert objects
    group.store.delete(objects)
    assert group.left_out(again) == {}


def test_what_lies_below_a_missing_asset_is_computed_again(group: Group) -> None:
    """Its value came from one that no longer stands."""
    root = group.a_run()
    group.commit(root, "second")
    assert group.left_out(group.a_run(parent=root, **RESUME)) == {}


def test_a_range_is_left_out_when_all_its_partitions_are_there(group: Group) -> None:
    """A returned dict is computed as a whole."""
    group.deploy(an_asset("letters", partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run()))
    root = group.a_run(**RANGE)
    group.commit(root, "letters", "a", "b", "c")
    again = group.a_run(parent=root, **RANGE, **RESUME)
    assert group.left_out(again) == {}
    group.commit(again, "letters", "d", series=root.run_id)
    (words,) = group.left_out(again).values()
    assert words == f"letters[a..d: 4]: committed by run {root.run_id} (3), run {again.run_id} (1); not computed again."


def test_one_partition_is_named(group: Group) -> None:
    """And another partition says nothing of it."""
    group.deploy(an_asset("letters", partitions_def=LETTERS))
    root = group.a_run(**{"dagster/partition": "b"})
    group.commit(root, "letters", "a")
    again = group.a_run(parent=root, **RESUME, **{"dagster/partition": "b"})
    assert group.left_out(again) == {}
    group.commit(root, "letters", "b")
    assert group.left_out(again)["letters"].startswith("letters[b]: committed by run")


def test_steps_with_checks_of_their_own_or_dynamic_outputs_run(group: Group) -> None:
    """Nothing tells whether a check was evaluated, or which keys a dynamic output had."""

    @dg.asset(check_specs=[dg.AssetCheckSpec("sound", asset="checked")], code_version="1")
    def checked() -> Any:
        yield dg.Output(1)
        yield dg.AssetCheckResult(passed=True)

    @dg.op(out=dg.DynamicOut(int))
    def many() -> Any:
        yield dg.DynamicOutput(1, mapping_key="one")

    @dg.op
    def same(x: int) -> int:
        return x

    @dg.op
    def added(xs: list[int]) -> int:
        return sum(xs)

    @dg.graph_asset(code_version="1")
    def fanned() -> int:
        return added(many().map(same).collect())

    group.deploy(checked, fanned)
    root = group.a_run()
    group.commit(root, "checked")
    group.commit(root, "fanned")
    group.succeed(root, "checked")
    assert group.left_out(group.a_run(parent=root, **RESUME)) == {}


def test_the_inner_ops_of_a_graph_are_left_out_with_its_asset(group: Group) -> None:
    """Else they would compute what nobody takes."""

    @dg.op
    def halved() -> int:
        return 1

    @dg.op
    def doubled(x: int) -> int:
        return 2 * x

    @dg.graph_asset(code_version="1")
    def whole() -> int:
        return doubled(halved())

    group.deploy(whole, an_asset("other", "whole"))
    root = group.a_run()
    group.commit(root, "whole")
    context, plan = group.worker(group.a_run(parent=root, **RESUME))
    left = skips.with_inner_steps(plan, executor._finished(context, plan, [group.resource]))
    assert left == {"whole.doubled", "whole.halved"}


def test_all_outputs_of_a_step_must_be_there(group: Group) -> None:
    """A multi-asset computes them together."""

    @dg.multi_asset(specs=[dg.AssetSpec("left", code_version="1"), dg.AssetSpec("right", code_version="1")])
    def both() -> tuple[int, int]:
        return 1, 2

    group.deploy(both)
    root = group.a_run()
    group.commit(root, "left")
    again = group.a_run(parent=root, **RESUME)
    assert group.left_out(again) == {}
    group.succeed(root, "both")
    group.commit(root, "right")
    (words,) = group.left_out(again).values()
    assert words.count("not computed again") == 2


def test_what_another_io_manager_stores_is_done_by_success(group: Group) -> None:
    """Of a step in any run of the series, the recovery's among them; a materialization alone says nothing."""

    @dg.asset(io_manager_key="files")
    def elsewhere() -> int:
        return 1

    group.deploy(elsewhere, files=dg.FilesystemIOManager(base_dir=os.devnull))
    root = group.a_run()
    recovery = group.a_run(parent=root, **{"resilient/recovery_of": root.run_id})
    data = StepMaterializationData(dg.AssetMaterialization("elsewhere"))
    group.log(root, dg.DagsterEventType.ASSET_MATERIALIZATION, "elsewhere", data)
    again = group.a_run(parent=root, **RESUME)
    assert group.left_out(again) == {}
    group.succeed(recovery, "elsewhere")
    assert recovery.run_id in group.left_out(again)["elsewhere"]


def test_a_loop_that_saved_all_runs_until_its_step_succeeds(group: Group) -> None:
    """There may be code behind the loop; the loop itself skips what is saved."""

    @dg.asset(partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run(), code_version="1")
    def looped() -> None: ...

    group.deploy(looped)
    root = group.a_run(**RANGE)
    group.commit(root, "looped", *"abcd")
    again = group.a_run(parent=root, **RANGE, **RESUME)
    assert group.left_out(again) == {}
    group.succeed(root, "looped")
    assert set(group.left_out(again)) == {"looped"}


def test_a_commit_that_dagster_never_heard_of_is_told(group: Group) -> None:
    """The step died between the two; a step that is left out logs nothing itself."""
    root = group.a_run()
    group.commit(root, "first")
    assert not group.instance.get_latest_materialization_event(dg.AssetKey("first"))
    group.left_out(group.a_run(parent=root, **RESUME))
    assert group.instance.get_latest_materialization_event(dg.AssetKey("first"))


def test_code_that_no_longer_knows_the_runs_leaves_nothing_out(group: Group) -> None:
    """A partition that is gone: the run computes what it selected, or says itself why it cannot."""
    group.deploy(an_asset("letters", partitions_def=LETTERS))
    root = group.a_run(**{"dagster/partition": "a"})
    group.commit(root, "letters", "a")
    again = group.a_run(parent=root, **RESUME, **{"dagster/partition": "a"})
    group.deploy(an_asset("letters", partitions_def=dg.StaticPartitionsDefinition(["b"])))
    assert group.left_out(again) == {}


# --- from asset failure


@pytest.fixture
def half_done(group: Group) -> dg.DagsterRun:
    """A run over a range that died in the middle of it, with an asset below."""
    single = dg.BackfillPolicy.single_run()
    group.deploy(
        an_asset("letters", partitions_def=LETTERS, backfill_policy=single),
        an_asset("words", "letters", partitions_def=LETTERS, backfill_policy=single),
    )
    run = group.a_run(**RANGE)
    group.materialize(run, "letters", "a", "b")
    return run


def test_dagster_drops_a_range_that_is_half_done_unless_it_is_marked(group: Group, half_done: dg.DagsterRun) -> None:
    """One materialization in the run and the asset counts as done, whatever is missing of its range."""
    assert group.chosen_by_dagster(half_done) == {"words"}
    context, _ = group.worker(half_done)
    with pytest.raises(KeyError), executor.marked_where_unfinished(context):
        raise KeyError
    assert group.chosen_by_dagster(half_done) == {"letters", "words"}


def test_the_mark_is_logged_once_and_says_what_stands(group: Group, half_done: dg.DagsterRun) -> None:
    """A worker that is started anew ends as well."""
    for _ in range(2):
        assert skips.mark_unfinished(group.instance, half_done) == {dg.AssetKey("letters"): 2}
    (entry,) = group.instance.all_logs(half_done.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    assert "letters did not succeed" in str(entry.get_dagster_event().message)
    assert "(2)" in str(entry.get_dagster_event().message)


def test_a_run_whose_steps_succeeded_is_not_marked(group: Group, half_done: dg.DagsterRun) -> None:
    """Nor is an asset that has no materialization, which Dagster selects anyway."""
    group.succeed(half_done, "letters")
    assert skips.mark_unfinished(group.instance, half_done) == {}
    assert not group.instance.all_logs(half_done.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)


def test_a_run_from_which_an_unfinished_asset_was_dropped_is_refused(group: Group, half_done: dg.DagsterRun) -> None:
    """A killed worker marks nothing. The refusal does, so that the button works the next time."""
    dropped = group.a_run("words", parent=half_done, **RANGE, **ASSET_RESUME)
    with pytest.raises(ConfigurationError, match=f'left out letters.*{half_done.run_id} "from asset failure" once'):
        group.left_out(dropped)
    assert group.chosen_by_dagster(half_done) == {"letters", "words"}


def test_an_asset_that_the_series_has_finished_since_may_be_missing(group: Group, half_done: dg.DagsterRun) -> None:
    """A recovery did the rest of the range: what lies below has all it needs."""
    group.commit(half_done, "letters", "c", "d")
    assert group.left_out(group.a_run("words", parent=half_done, **RANGE, **ASSET_RESUME)) == {}


def test_an_asset_that_dagster_does_not_drop_is_left_to_the_run(group: Group, half_done: dg.DagsterRun) -> None:
    """The usual case: the run was marked, and everything is selected."""
    assert group.left_out(group.a_run(parent=half_done, **RANGE, **ASSET_RESUME)) == {}


def test_all_on_a_run_from_asset_failure_starts_afresh(group: Group, half_done: dg.DagsterRun) -> None:
    """Dagster copies a run's tags to its re-executions, and leaves out the tag of "from failure" alone."""
    context, _ = group.worker(group.a_run(parent=half_done, **RANGE, **ASSET_RESUME))
    with executor.marked_where_unfinished(context):
        pass
    resumed = group.instance.get_run_by_id(context.dagster_run.run_id)
    assert resumed is not None
    copied = {key: value for key, value in resumed.tags.items() if not key.endswith("_run_id")}
    assert resumes_parent(resumed)
    assert resumes_parent(group.a_run(parent=resumed, **copied | ASSET_RESUME))
    assert not resumes_parent(group.a_run(parent=resumed, **copied))
