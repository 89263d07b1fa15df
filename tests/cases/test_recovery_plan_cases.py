"""The cases of ``shared/cases/recovery.md`` about what is in a re-execution: I11 to I15, I21, I25."""

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from recovery_world import JOB, QUEUE, World, an_asset, ranged, selected

from dagster_resilient import dagster_compat as compat
from dagster_resilient.values import load_value

LETTERS = dg.StaticPartitionsDefinition(list("abcdef"))
A, B, C = an_asset("a"), an_asset("b", "a"), an_asset("c", "b")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A fresh instance and store, and three assets in a chain."""
    with dg.instance_for_test(overrides=QUEUE) as instance:
        yield World(instance, str(tmp_path / "store"), A, B, C)


# ---- I11: partitions that are no more


DAYS = dg.DailyPartitionsDefinition(start_date="2024-01-01", end_date="2024-02-01")
LATER_DAYS = dg.DailyPartitionsDefinition(start_date="2024-01-10", end_date="2024-02-01")
DYNAMIC = dg.DynamicPartitionsDefinition(name="names")


@pytest.mark.parametrize(
    ("before", "after", "partition"),
    [
        (LETTERS, dg.StaticPartitionsDefinition(list("acdef")), "b"),
        (DAYS, LATER_DAYS, "2024-01-05"),
        (DYNAMIC, DYNAMIC, "gone"),
        (LETTERS, DAYS, "b"),
    ],
)
def test_i11_a_partition_that_was_removed(world: World, before: Any, after: Any, partition: str) -> None:
    """I11: it is not requested, and the run's log says why, once."""
    world.instance.add_dynamic_partitions("names", ["gone", "stays"])
    world.deploy(an_asset("a", partitions=before))
    run = world.a_run(tags={"dagster/partition": partition})
    world.instance.delete_dynamic_partition("names", "gone")
    world.deploy(an_asset("a", partitions=after))
    for _ in range(3):
        world.tick()
    assert world.children(run) == []
    verdict = world.final(run)
    assert verdict is not None
    assert verdict.action == "gave up"
    assert f"a has no partition '{partition}'" in verdict.reason
    assert world.said(run, "Recovery") == 1


def test_i11_what_is_left_of_a_range(world: World) -> None:
    """I11: what still exists of it is requested, and nothing else."""
    world.deploy(an_asset("a", partitions=DAYS))
    run = world.a_run(tags=ranged("2024-01-05", "2024-01-12"))
    world.deploy(an_asset("a", partitions=LATER_DAYS))
    world.tick()
    child = world.only_child(run)
    assert (child.tags.items() & ranged("2024-01-10", "2024-01-12").items()) == ranged(
        "2024-01-10", "2024-01-12"
    ).items()


def test_i11_a_hole_in_a_range(world: World) -> None:
    """I11: b was removed out of a to c."""
    world.deploy(an_asset("a", partitions=LETTERS))
    run = world.a_run(tags=ranged("a", "c"))
    world.deploy(an_asset("a", partitions=dg.StaticPartitionsDefinition(list("acdef"))))
    world.tick()
    child = world.only_child(run)
    assert compat.partition_keys_of_run(world.repository, child, dg.AssetKey("a"), world.instance) == ["a", "c"]


# ---- I12, I13, I15, I21, I25: what is in the re-execution


def test_i12_what_is_good_is_not_computed_again(world: World) -> None:
    """I12: A is good, B failed, C did not run."""
    run = world.a_run()
    world.commit(run, "a")
    world.tick()
    assert selected(world.only_child(run)) == {"b", "c"}


def test_i13_a_range_of_which_two_are_stored(world: World) -> None:
    """I13: p1 and p2 of p1 to p5 are stored, with their events; exactly p3 to p5 are requested."""
    keys = [f"p{n}" for n in range(1, 6)]
    world.deploy(an_asset("a", partitions=dg.StaticPartitionsDefinition(keys)))
    run = world.a_run(tags=ranged("p1", "p5"))
    world.commit(run, "a", "p1", "p2")
    for key in ("p1", "p2", "p3"):  # that of p3 was logged, its value never stored
        world.instance.report_runless_asset_event(dg.AssetMaterialization("a", partition=key))
    world.tick()
    child = world.only_child(run)
    assert compat.partition_keys_of_run(world.repository, child, dg.AssetKey("a"), world.instance) == keys[2:]


def a_backfill(world: World, status: BulkActionStatus) -> str:
    """A backfill of the instance."""
    backfill = PartitionBackfill(
        backfill_id=uuid.uuid4().hex[:8],
        status=status,
        from_failure=False,
        tags={},
        backfill_timestamp=datetime.now(UTC).timestamp(),
        asset_selection=[dg.AssetKey("a")],
    )
    world.instance.add_backfill(backfill)
    return backfill.backfill_id


def test_i15_nothing_of_the_run_is_lost(world: World) -> None:
    """I15: config, tags, selection, partition, backfill and priority are kept; what belongs to the one run is not."""

    class Rate(dg.Config):
        lr: float = 1.0

    @dg.asset(name="a", partitions_def=LETTERS, code_version="1")
    def configured(config: Rate) -> int:
        return 1

    world.deploy(configured, *(an_asset(name, partitions=LETTERS) for name in ("b", "c", "d")))
    config = {"ops": {"a": {"config": {"lr": 0.1}}}}
    mine = {"team": "x", "dagster/priority": "5", "dagster/concurrency_key": "gpu", "dagster/partition": "c"}
    mine["dagster/backfill"] = a_backfill(world, BulkActionStatus.REQUESTED)
    system = {"dagster/run_key": "k", "dagster/retry_number": "2", "dagster/will_retry": "false", ".dagster/grpc": "x"}
    run = world.a_run(
        tags=mine | system, run_config=config, asset_selection=frozenset({dg.AssetKey("a"), dg.AssetKey("b")})
    )
    world.tick()
    child = world.only_child(run)
    assert (child.run_config, selected(child)) == (config, {"a", "b"})
    assert (child.tags.items() & mine.items()) == mine.items()
    assert system.keys() & child.tags.keys() == set()
    assert (child.parent_run_id, child.root_run_id) == (run.run_id, run.run_id)


def test_i21_outputs_of_the_run_before_the_one_before(world: World) -> None:
    """I21: the first run makes A, the second B, and dies; the third makes C alone, and finds A."""
    first = world.a_run()
    world.commit(first, "a")
    world.tick()
    second = world.only_child(first)
    world.commit(second, "b")
    world.fail(second)
    world.tick()
    assert selected(world.only_child(second)) == {"c"}
    assert load_value(world.store, ("a",), None) == 1


def test_i25_a_failure_before_the_first_step(world: World) -> None:
    """I25: no event of any step: the whole original selection is requested."""
    chosen = frozenset({dg.AssetKey("a"), dg.AssetKey("c")})
    run = world.a_run(asset_selection=chosen)
    whole = world.a_run()
    world.tick()
    assert selected(world.only_child(run)) == {"a", "c"}
    assert selected(world.only_child(whole)) == {"a", "b", "c"}


def test_i25_a_job_of_ops(world: World) -> None:
    """I25: has no assets to select; it runs whole."""

    @dg.op
    def only() -> None: ...

    @dg.job(name="ops", executor_def=world.repository.get_job(JOB).executor_def)
    def ops() -> None:
        only()

    world.deploy(A, job=ops)
    run = world.a_run(job="ops")
    world.tick()
    child = world.only_child(run)
    assert (child.op_selection, child.asset_selection, child.step_keys_to_execute) == (None, None, None)
