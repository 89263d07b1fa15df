"""How recovery stands with what asks for runs: backfills of assets and jobs, automation, sensors, schedules, people."""

import datetime as dt
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.definitions.freshness import FreshnessState
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.utils import make_new_backfill_id
from standing import FAILURE, SUCCESS, Standing, stand

COMPLETED, FAILED, GOING_ON = (
    BulkActionStatus.COMPLETED_SUCCESS, BulkActionStatus.COMPLETED_FAILED, BulkActionStatus.REQUESTED,
)  # fmt: skip
BELOW = dg.AssetKey("each_below")


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """One instance with Dagster's defaults; each test has backfills of its own."""
    with stand(tmp_path_factory.mktemp("backfills")) as standing:
        yield standing


@pytest.fixture
def here(dagster: Standing) -> Iterator[Standing]:
    """The instance, left quiet at the end."""
    (dagster.folder / "computed").unlink(missing_ok=True)
    yield dagster
    dagster.end_all()


class Backfill:
    """A backfill, launched as the UI does."""

    def __init__(self, here: Standing, *assets: str, partitions: str = "ab", **tags: str) -> None:
        self.here, self.id = here, make_new_backfill_id()
        workspace = here.request()
        here.instance.add_backfill(
            PartitionBackfill.from_asset_partitions(
                backfill_id=self.id,
                asset_graph=workspace.asset_graph,
                partition_names=list(partitions),
                asset_selection=[dg.AssetKey(name) for name in assets],
                backfill_timestamp=time.time(),
                tags={"team": "b", **tags},
                dynamic_partitions_store=here.instance,
                all_partitions=False,
                title=None,
                description=None,
                run_config=None,
            )
        )

    @property
    def found(self) -> PartitionBackfill:
        """What the instance holds of it."""
        found = self.here.instance.get_backfill(self.id)
        assert found is not None
        return found

    @property
    def status(self) -> BulkActionStatus:
        """Where it stands."""
        return self.found.status

    def runs(self) -> list[dg.DagsterRun]:
        """Its runs, oldest first."""
        wanted = dg.RunsFilter(tags={"dagster/backfill": self.id})
        return list(self.here.instance.get_runs(wanted, ascending=True))

    def step(self) -> None:
        """Let the backfill daemon, the queue, the workers and the recovery do their part once."""
        self.here.backfill()
        self.here.work_all()
        self.here.tick()

    def run_out(self) -> BulkActionStatus:
        """Go on until it has ended, and look once more: nothing comes after its end."""
        for _ in range(12):
            self.step()
            if self.status is not GOING_ON:
                break
        self.step()
        return self.status


def test_a_backfill_goes_on_below_what_was_recovered(here: Standing) -> None:
    """One run for each partition: the one that failed is re-executed, and what lies below it runs thereafter."""
    here.fail_next("each", "a")
    backfill = Backfill(here, "each", "each_below")
    assert backfill.run_out() is COMPLETED
    assert sorted(here.computed()) == ["each[a]", "each[b]", "each_below[a]", "each_below[b]"]


def test_a_backfill_over_a_range_is_recovered_within_its_range(here: Standing) -> None:
    """One run for all partitions: the re-execution computes those that are missing, in the backfill's name."""
    here.fail_next("ranged", "c")
    backfill = Backfill(here, "ranged", "ranged_below", partitions="abcd")
    assert backfill.run_out() is COMPLETED
    first, again = backfill.runs()
    assert again.parent_run_id == first.run_id
    assert again.tags["team"] == "b"
    assert sorted(here.computed()) == sorted(f"{name}[{p}]" for name in ("ranged", "ranged_below") for p in "abcd")


def test_a_backfill_in_chunks_is_recovered_within_its_chunk(here: Standing) -> None:
    """Two partitions in each run."""
    here.fail_next("pairs", "d")
    backfill = Backfill(here, "pairs", partitions="abcd")
    assert backfill.run_out() is COMPLETED
    assert sorted(here.computed()) == [f"pairs[{p}]" for p in "abcd"]
    assert len(backfill.runs()) == 3


def test_a_lost_run_of_a_backfill_is_recovered(here: Standing) -> None:
    """Its machine vanished: the backfill waits while the run counts as live, and ends well."""
    backfill = Backfill(here, "each", "each_below", partitions="a")
    here.backfill()
    here.queue()
    lost = here.lose(backfill.runs()[0])
    assert backfill.run_out() is COMPLETED
    assert here.only_child(lost).status is SUCCESS
    assert here.computed() == ["each[a]", "each_below[a]"]


def test_a_backfill_that_ended_over_a_failure_goes_on_with_its_recovery(here: Standing) -> None:
    """The daemon looks before recovery does, and closes the backfill; the re-execution opens it again."""
    here.fail_next("each", "a")
    backfill = Backfill(here, "each", "each_below", partitions="a")
    here.backfill()
    here.work_all()
    here.backfill(2)
    here.tick()
    assert backfill.run_out() is COMPLETED
    assert here.computed() == ["each[a]", "each_below[a]"]


def test_an_adopted_partition_counts_in_its_backfill(here: Standing) -> None:
    """Committed just before its run was lost: recovery tells Dagster, in the run's name, and the backfill goes on."""
    backfill = Backfill(here, "each", "each_below", partitions="a")
    here.backfill()
    here.queue()
    run = backfill.runs()[0]
    here.start(run)
    here.commit(run, "each", "a")
    here.lose(run)
    assert backfill.run_out() is COMPLETED
    assert here.computed() == ["each_below[a]"]


def test_a_cancelled_backfill_is_left_alone(here: Standing) -> None:
    """Neither its runs that were cancelled with it, nor those that had failed before, are re-executed."""
    here.fail_next("each", "a")
    backfill = Backfill(here, "each", "each_below")
    here.backfill()
    here.queue()
    failed, waiting = backfill.runs()
    here.work(failed)
    here.instance.update_backfill(backfill.found._replace(status=BulkActionStatus.CANCELING))
    here.backfill()
    here.tick()
    assert here.children(failed) == here.children(waiting) == []
    verdict = here.final(failed)
    assert verdict is not None
    assert verdict.failure_class == "cancelled"


def test_a_backfill_that_was_launched_again_is_left_alone(here: Standing) -> None:
    """It ended as failed, and a user launched it anew: what is missing is computed there, and not twice."""
    here.fail_next("each", "a")
    backfill = Backfill(here, "each", partitions="a")
    here.backfill()
    (failed,) = here.work_all()
    here.backfill(2)
    assert backfill.status is FAILED
    again = Backfill(here, "each", partitions="a", **{"dagster/parent_backfill_id": backfill.id})
    assert again.run_out() is COMPLETED
    assert here.children(failed) == []
    verdict = here.final(failed)
    assert verdict is not None
    assert again.id in verdict.reason


def test_a_backfill_whose_run_gave_up_ends_as_failed(here: Standing) -> None:
    """Attempts are finite; then the backfill ends, with what lies below left undone."""
    here.fail_next("each", "a", times=3)
    backfill = Backfill(here, "each", "each_below", partitions="a")
    assert backfill.run_out() is FAILED
    assert len(backfill.runs()) == 3
    assert here.computed() == []


def test_a_job_backfill_is_recovered(here: Standing) -> None:
    """A job without assets: the failed partition runs again with its own configuration, and the others once."""
    here.fail_next("an_op", "b")
    workspace = here.request()
    (location,) = workspace.code_locations
    (repository,) = location.get_repositories().values()
    partition_set = repository.get_partition_set("op_job_partition_set")
    backfill = Backfill.__new__(Backfill)
    backfill.here, backfill.id = here, make_new_backfill_id()
    here.instance.add_backfill(
        PartitionBackfill(
            backfill_id=backfill.id,
            status=GOING_ON,
            from_failure=False,
            tags={},
            backfill_timestamp=time.time(),
            partition_set_origin=partition_set.get_remote_origin(),
            partition_names=["a", "b"],
        )
    )
    backfill.run_out()
    assert here.computed() == ["an_op[a]", "an_op[b]"]
    assert [run.status for run in backfill.runs()] == [SUCCESS, FAILURE, SUCCESS]
    # Dagster counts the failed run whatever came after it, as it does for its own retries.
    assert backfill.status is FAILED


# ---- declarative automation, sensors


def test_automation_does_not_ask_for_what_is_re_executed(here: Standing) -> None:
    """The asset is missing, and a condition wants it: while its re-execution waits or runs, nobody asks again."""
    here.fail_next("automated")
    here.automate()
    (failed,) = here.work_all()
    here.tick()
    here.automate()
    here.queue()
    here.automate()
    child = here.only_child(failed)
    assert here.work(child).status is SUCCESS
    here.automate()
    asked = here.instance.get_runs(dg.RunsFilter(tags={"dagster/from_automation_condition": "true"}))
    assert {run.run_id for run in asked} == {failed.run_id, child.run_id}
    assert here.computed() == ["automated"]


def test_a_recovered_asset_is_fresh(here: Standing) -> None:
    """Freshness asks for materializations, and a re-execution's is one like any other."""
    here.fail_next("automated")
    failed = here.work(here.launch("__ASSET_JOB", "automated"))
    here.tick()
    here.work_all()
    assert here.only_child(failed).status is SUCCESS
    latest = here.instance.get_latest_materialization_event(dg.AssetKey("automated"))
    assert latest is not None
    assert latest.run_id == here.only_child(failed).run_id
    assert here.freshness("automated") is FreshnessState.PASS


def test_a_sensor_does_not_ask_for_what_is_re_executed(here: Standing) -> None:
    """Its run key stays with the run that it asked for: the same request brings nothing, also after a recovery."""
    here.fail_next("value")
    (here.folder / "ask").touch()
    here.tick("asking")
    (failed,) = here.work_all()
    here.tick("asking")
    here.tick("asking")
    (child,) = here.work_all()
    here.tick("asking")
    (here.folder / "ask").unlink()
    assert (child.parent_run_id, child.status) == (failed.run_id, SUCCESS)
    assert "dagster/run_key" not in child.tags
    assert here.computed() == ["value", "below"]


def test_a_schedule_does_not_ask_for_what_is_re_executed(here: Standing) -> None:
    """Its run is recovered with its partition, and stays the schedule's; the next day asks for the next run."""
    start = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    here.schedule(start)
    (here.folder / "daily").touch()
    here.fail_next("each_below", "b")
    here.schedule(start + day)
    (failed,) = here.work_all()
    here.tick()
    here.schedule(start + day)
    (child,) = here.work_all()
    here.schedule(start + 2 * day)
    (next_day,) = here.work_all()
    (here.folder / "daily").unlink()
    assert (child.parent_run_id, child.status, child.asset_selection) == (failed.run_id, SUCCESS, {BELOW})
    for kept in ("dagster/schedule_name", "dagster/partition", "day"):
        assert child.tags[kept] == failed.tags[kept]
    assert (next_day.parent_run_id, next_day.tags["day"] > child.tags["day"]) == (None, True)
    assert here.computed() == ["each[b]", "each_below[b]", "each[b]", "each_below[b]"]


def test_a_run_from_the_command_line_is_recovered(here: Standing) -> None:
    """`dagster job launch`, with neither webserver nor daemon in between."""
    here.fail_next("below")
    workspace = here.folder / "workspace.yaml"
    workspace.write_text("load_from: [{python_file: {relative_path: pipeline.py, location_name: here}}]")
    where = ("-w", str(workspace), "-l", "here", "-j", "values", "--tags", '{"team": "c"}')
    env = os.environ | {"DAGSTER_HOME": str(here.folder / "home")}
    command = (sys.executable, "-m", "dagster", "job", "launch", *where)
    subprocess.run(command, env=env, cwd=here.folder, check=True, capture_output=True, timeout=120)
    (failed,) = here.work_all()
    here.tick()
    (child,) = here.work_all()
    assert (child.parent_run_id, child.status, child.tags["team"]) == (failed.run_id, SUCCESS, "c")
    assert here.computed() == ["value", "below"]
