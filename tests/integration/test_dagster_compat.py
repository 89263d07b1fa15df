"""What the private calls into Dagster find out, against real definitions and a real instance."""

import uuid
from collections.abc import Iterator

import dagster as dg
import pytest
from compat_definitions import JOB, MONTHS, REPOSITORY, TablesIOManager, a_run, key

from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.recovery.brief import PartitionList

MONTHS_OF_RUN = PartitionList.of(MONTHS)
CELLS_OF_RUN = PartitionList.of([f"{month}|{size}" for month in MONTHS for size in ("small", "big")], ("month", "size"))


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """An empty instance on disk."""
    with dg.instance_for_test() as found:
        yield found


# --- definitions


def test_the_executor_of_definitions_covers_jobs_and_the_implicit_job_but_not_a_job_with_its_own() -> None:
    """Whether a run has our worker heartbeat depends on which executor really runs its job."""
    names = {job: compat.job_executor_name(REPOSITORY, job) for job in (JOB, "__ASSET_JOB", "plain_ops")}
    assert set(names.values()) == {"ours"}
    assert compat.job_executor_name(REPOSITORY, "own_executor") == "in_process"


def test_an_unknown_job_is_refused_by_name() -> None:
    """A run of another code location cannot be planned here, and the message says so."""
    with pytest.raises(ConfigurationError, match="no job 'nowhere'"):
        compat.job_executor_name(REPOSITORY, "nowhere")


def test_run_assets_are_those_of_the_job_upstream_first() -> None:
    """Without a selection, a run computes what its job selects."""
    found = compat.run_asset_keys(REPOSITORY, a_run())
    assert set(found) == {key(name) for name in ("raw", "features", "trained", "left", "right")}
    assert found.index(key("raw")) < found.index(key("features")) < found.index(key("trained"))


def test_run_assets_are_cut_to_the_selection() -> None:
    """A run from the UI selects assets, a re-execution from failure selects steps, the command line selects ops."""
    by_assets = a_run("__ASSET_JOB", asset_selection=frozenset({key("raw"), key("trained")}))
    assert compat.run_asset_keys(REPOSITORY, by_assets) == [key("raw"), key("trained")]
    by_steps = a_run(step_keys_to_execute=["features", "pair"])
    assert set(compat.run_asset_keys(REPOSITORY, by_steps)) == {key("features"), key("left"), key("right")}
    by_ops = a_run(op_selection=["features"], resolved_op_selection=frozenset({"features"}))
    assert compat.run_asset_keys(REPOSITORY, by_ops) == [key("features")]


def test_a_job_of_ops_has_no_assets() -> None:
    """Such a run is re-executed whole."""
    assert compat.run_asset_keys(REPOSITORY, a_run("plain_ops")) == []


def test_steps_behind_assets() -> None:
    """A multi-asset has one step for all, a graph asset's value comes from its last op, others have their own."""
    assert compat.step_key_of(REPOSITORY, JOB, key("features")) == "features"
    assert (
        compat.step_key_of(REPOSITORY, JOB, key("left")) == compat.step_key_of(REPOSITORY, JOB, key("right")) == "pair"
    )
    assert compat.step_key_of(REPOSITORY, "__ASSET_JOB", key("chained")) == "chained.plus"
    assert compat.step_key_of(REPOSITORY, JOB, key("cells")) is None


def test_only_a_multi_asset_that_cannot_be_subset_runs_together() -> None:
    """Selecting one half of it alone is an error in Dagster."""
    assert compat.assets_of_step(REPOSITORY, key("left")) == {key("left"), key("right")}
    assert compat.assets_of_step(REPOSITORY, key("raw")) == {key("raw")}


def test_upstream_keys_are_the_direct_ones() -> None:
    """By argument or by deps."""
    assert compat.upstream_keys(REPOSITORY, key("trained")) == {key("features")}
    assert compat.upstream_keys(REPOSITORY, key("features")) == {key("raw")}
    assert compat.upstream_keys(REPOSITORY, key("raw")) == set()


def test_which_assets_hand_over_a_value() -> None:
    """`-> None` and specs hand nothing to the IO manager; a MaterializeResult may carry a value."""
    names = ("raw", "features", "trained", "reported", "left", "cells", "chained")
    nothing = {name for name in names if compat.output_is_nothing(REPOSITORY, key(name))}
    assert nothing == {"trained", "left", "cells"}


def test_io_manager_is_recognised_by_its_class() -> None:
    """Subclasses count, others do not, and a plain function's manager has no class."""
    assert compat.io_manager_is(REPOSITORY, JOB, key("features"), TablesIOManager)
    assert compat.io_manager_is(REPOSITORY, "__ASSET_JOB", key("features"), dg.ConfigurableIOManager)
    assert not compat.io_manager_is(REPOSITORY, JOB, key("raw"), TablesIOManager)


# --- partitions


@pytest.mark.parametrize(
    ("asset", "tags", "expected"),
    [
        ("features", {"dagster/partition": "2024-02"}, ["2024-02"]),
        (
            "features",
            {"dagster/asset_partition_range_start": "2024-02", "dagster/asset_partition_range_end": "2024-04"},
            MONTHS[1:],
        ),
        ("raw", {"dagster/partition": "2024-02"}, [None]),
        ("features", {}, [None]),
        ("cells", {"dagster/partition": "2024-02|big"}, ["2024-02|big"]),
        (
            "cells",
            {
                "dagster/asset_partition_range_start": "2024-02|small",
                "dagster/asset_partition_range_end": "2024-03|big",
            },
            ["2024-02|small", "2024-02|big", "2024-03|small", "2024-03|big"],
        ),
    ],
)
def test_partitions_of_a_run(
    instance: dg.DagsterInstance, asset: str, tags: dict[str, str], expected: list[str]
) -> None:
    """In definition order; unpartitioned assets in a partitioned run have none."""
    assert compat.partition_keys_of_run(REPOSITORY, a_run(tags=tags), key(asset), instance) == expected


def test_dynamic_partitions_are_read_from_the_instance(instance: dg.DagsterInstance) -> None:
    """In the order in which they were added."""
    instance.add_dynamic_partitions("files", ["z", "a", "m"])
    tags = {"dagster/asset_partition_range_start": "z", "dagster/asset_partition_range_end": "a"}
    assert compat.partition_keys_of_run(REPOSITORY, a_run(tags=tags), key("files"), instance) == ["z", "a"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"raw": [None]}, {}),
        ({"raw": [None], "features": ["2024-03"]}, {"dagster/partition": "2024-03"}),
        (
            {"features": ["2024-04", "2024-02"]},
            {"dagster/asset_partition_range_start": "2024-02", "dagster/asset_partition_range_end": "2024-04"},
        ),
        (
            {"cells": ["2024-03|big"]},
            {"dagster/partition": "2024-03|big", "dagster/partition/month": "2024-03", "dagster/partition/size": "big"},
        ),
    ],
)
def test_tags_for_partitions(wanted: dict[str, list[str | None]], expected: dict[str, str]) -> None:
    """One key by name, several by the ends of their range."""
    keys = [partition for partitions in wanted.values() for partition in partitions]
    assert compat.partition_tags(keys, [MONTHS_OF_RUN, CELLS_OF_RUN]) == expected


def test_the_tags_of_a_partition_are_those_of_dagster() -> None:
    """Also of a multi-partition key, which has one for each dimension."""
    assert REPOSITORY.asset_graph.get(key("cells")).partitions_def.get_tags_for_partition_key("2024-03|big") == (
        compat.partition_tags(["2024-03|big"], [CELLS_OF_RUN])
    )


def test_the_range_of_multi_partitions_is_a_box_around_all(instance: dg.DagsterInstance) -> None:
    """The first and last key in order would span an empty range where a later month misses an earlier size."""
    wanted = ["2024-02|big", "2024-03|small"]
    tags = compat.partition_tags(wanted, [CELLS_OF_RUN])
    targeted = compat.partition_keys_of_run(REPOSITORY, a_run(tags=tags), key("cells"), instance)
    assert set(wanted) < set(targeted)
    assert len(targeted) == 4


def test_partitions_that_no_asset_holds_are_refused() -> None:
    """A removed partition is named, rather than dropped without a word."""
    with pytest.raises(ConfigurationError, match="1999-01"):
        compat.partition_tags(["1999-01", "2024-01"], [MONTHS_OF_RUN])


def test_partition_tags_are_recognised() -> None:
    """A run over other partitions must not inherit one of them."""
    names = ["dagster/partition", "dagster/partition/month", "dagster/asset_partition_range_end", "dagster/priority"]
    assert [compat.is_partition_tag(name) for name in names] == [True, True, True, False]


# --- runs


def test_kept_tags_leave_behind_what_belongs_to_one_run(instance: dg.DagsterInstance) -> None:
    """Copying a run key would make a sensor skip its next request; copying a retry count would spend the budget."""
    kept = {"team": "a", "dagster/priority": "3", "dagster/concurrency_key": "gpu", "dagster/partition": "2024-01"}
    left = {
        "dagster/run_key": "k", "dagster/tick": "7", ".dagster/grpc_info": "{}", ".dagster/repository": "r",
        "dagster/retry_number": "1", "dagster/will_retry": "true", "dagster/auto_retry_run_id": "x",
        "dagster/failure_reason": "STEP_FAILURE", "dagster/is_resume_retry": "true", "dagster/backfill": "gone",
        "dagster/parent_run_id": "p", "dagster/root_run_id": "r", "dagster/is_asset_resume_retry": "true",
    }  # fmt: skip
    assert compat.kept_tags(a_run(tags=kept | left), instance) == kept


def test_a_run_group_is_its_root_and_re_executions_oldest_first(instance: dg.DagsterInstance) -> None:
    """From whichever run it is asked for."""
    ids = [str(uuid.uuid4()) for _ in range(3)]
    for number, run_id in enumerate(ids):
        lineage = {} if number == 0 else {"root_run_id": ids[0], "parent_run_id": ids[number - 1]}
        tags = {"dagster/root_run_id": ids[0]} if number else {}
        instance.add_run(a_run(run_id=run_id, tags=tags, **lineage))
    last = instance.get_run_by_id(ids[2])
    assert last is not None
    assert [run.run_id for run in compat.run_group(instance, last)] == ids


def test_a_cancel_is_known_even_where_the_run_then_failed(instance: dg.DagsterInstance) -> None:
    """What a user ended is never undone; a run that only failed may be."""
    asked = REPOSITORY.get_job("plain_ops").execute_in_process(instance=instance, raise_on_error=False)
    failed = REPOSITORY.get_job("plain_ops").execute_in_process(instance=instance, raise_on_error=False)
    run = instance.get_run_by_id(asked.run_id)
    assert run is not None
    instance.report_run_canceling(run)
    compat.report_run_failed(instance, run, "the worker died on the way")
    verdicts = [
        compat.cancelled_by_user(instance, found)
        for run_id in (asked.run_id, failed.run_id)
        if (found := instance.get_run_by_id(run_id))
    ]
    assert verdicts == [True, False]


def test_errors_of_a_run_name_the_classes_behind_them(instance: dg.DagsterInstance) -> None:
    """Classification needs the user's own exception, not Dagster's wrapper alone."""
    result = REPOSITORY.get_job("plain_ops").execute_in_process(instance=instance, raise_on_error=False)
    step_error, run_error = compat.failed_step_errors(instance, result.run_id)
    assert (step_error.step_key, run_error.step_key) == ("boom", None)
    assert step_error.classes == ("DagsterExecutionStepExecutionError", "ValueError")
    assert "ValueError" in compat.failure_error_names(instance, result.run_id)
    assert step_error.exit_code is None


def test_materialized_partitions_are_those_of_the_given_runs(instance: dg.DagsterInstance) -> None:
    """None stands for an unpartitioned asset."""
    job = REPOSITORY.get_job("__ASSET_JOB")
    chosen = [key("raw"), key("features")]
    runs = [
        job.execute_in_process(asset_selection=[key("raw")], instance=instance),
        job.execute_in_process(asset_selection=chosen, instance=instance, partition_key="2024-03"),
    ]
    ids = [run.run_id for run in runs]
    assert compat.materialized_partitions(instance, ids, key("features")) == {"2024-03"}
    assert compat.materialized_partitions(instance, ids[:1], key("features")) == set()
    assert compat.materialized_partitions(instance, ids, key("raw")) == {None}
    assert compat.successful_steps(instance, ids[1]) == {"raw", "features"}
