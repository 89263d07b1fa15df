"""State in a database, data in a store: the same assets, sessions and scripts."""

from typing import Any

import dagster as dg
import psutil
import pytest

from dagster_resilient import (
    ResilientIOManager,
    ResilientResource,
    list_tasks,
    load,
    open_store,
    open_task,
    task_history,
)
from dagster_resilient.errors import ConfigurationError, FencedError, StorageError
from dagster_resilient.state.fences import fence_run
from dagster_resilient.state.records import Fence
from dagster_resilient.state.store import open_state
from dagster_resilient.testing import FaultStore

MONTHS = dg.StaticPartitionsDefinition(["jan", "feb", "mar"])


@pytest.fixture(params=["sqlite", "postgres"])
def state_url(request: pytest.FixtureRequest) -> str:
    """A database."""
    return str(request.getfixturevalue(f"{request.param}_url"))


def definitions(url: str, state_url: str, fail: list[str]) -> dg.Definitions:
    """A partition loop that fails at some partitions, and an asset below it."""

    @dg.asset(partitions_def=MONTHS, backfill_policy=dg.BackfillPolicy.single_run(), code_version="1")
    def predictions(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
        for part in resilient.task(context).partitions():
            if part.key in fail:
                raise RuntimeError(part.key)
            part.save({"month": part.key})

    @dg.asset(code_version="1")
    def report(predictions: dict[str, dict[str, str]]) -> list[str]:
        return [one["month"] for one in predictions.values()]

    resilient = ResilientResource(url=url, state_url=state_url)
    return dg.Definitions(
        [predictions, report],
        resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
    )


def test_a_range_is_committed_in_the_database(local_url: str, state_url: str) -> None:
    """The log is in the database alone; what was committed before an error stands, and a fan-in reads it all."""
    fail = ["feb"]
    defs = definitions(local_url, state_url, fail)
    job = defs.resolve_implicit_global_asset_job_def()
    tags = {"dagster/asset_partition_range_start": "jan", "dagster/asset_partition_range_end": "mar"}
    with dg.instance_for_test() as instance:
        first = job.execute_in_process(
            instance=instance, tags=tags, asset_selection=[dg.AssetKey("predictions")], raise_on_error=False
        )
        assert not first.success
        assert [str(name) for name in list_tasks(local_url, state_url=state_url)] == ["predictions[jan]"]
        fail.clear()
        again = job.execute_in_process(instance=instance, tags=tags, asset_selection=[dg.AssetKey("predictions")])
        assert again.success
        assert job.execute_in_process(instance=instance, asset_selection=[dg.AssetKey("report")]).success
    store = open_store(local_url)
    kinds = {info.key.split("/")[2] for info in store.list("tasks/")}
    assert kinds <= {"data", "index.json"}
    resource = ResilientResource(url=local_url, state_url=state_url)
    assert resource.load("report") == ["jan", "feb", "mar"]
    assert task_history(local_url, "predictions", "jan", state_url=state_url)[0].kind == "value"


def test_a_fence_reaches_the_sidecars_through_the_store(local_url: str, state_url: str) -> None:
    """The database decides; the copy in the store is what a sidecar can read."""
    task = open_task(local_url, "model", state_url=state_url)
    records, run = task.attempt.records, task.attempt.claim.run_id
    task.save(1)
    assert fence_run(records, run, reason="lost.", failure_class="lost", by="test")
    assert open_store(local_url).head(f"fences/{run}.json").size > 0
    with pytest.raises(FencedError, match=r"lost\."):
        task.save(2)
    assert task.load("model") == 1


def test_a_copy_that_cannot_be_written_does_not_hurt(
    local_url: str, state_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The store is down: the run is fenced, and the log says that its sidecars do not know."""
    store = FaultStore(open_store(local_url))
    records = open_state(state_url, store)
    assert records is not None
    with store.outage(), pytest.raises(StorageError):
        store.put("x", b"")
    with store.outage():
        assert fence_run(records, "run", reason="r", failure_class="lost", by="t")
    assert "its sidecars cannot be told" in caplog.text
    assert not fence_run(records, "run", reason="another", failure_class="superseded", by="t")
    # Told at the next occasion, with the reason that stands; so too where the first writer was killed in between.
    assert Fence.from_bytes(store.get("fences/run.json"), "x").reason == "r"


def test_a_password_is_not_shown(local_url: str) -> None:
    """Neither in reprs nor in errors."""
    secret = "canary-in-a-url"
    resource = ResilientResource(url=local_url, state_url=f"postgresql://user:{secret}@127.0.0.1:1/none")
    assert secret not in repr(resource)
    records = resource.records
    assert secret not in repr(records)
    with pytest.raises(StorageError) as error:
        records.with_patience(0.0).list("x/")  # type: ignore[attr-defined]
    assert secret not in str(error.value)


def test_a_task_that_is_closed_beats_no_more(local_url: str) -> None:
    """A service that opens many tasks ends each heartbeat; the task can be opened again."""
    store = open_store(local_url)
    for number in range(2):
        with open_task(local_url, "model") as task:
            task.save(number)
        assert list(store.list("live/")) == []


def test_tasks_that_nothing_refers_to_leave_no_process(local_url: str) -> None:
    """A loop that opens a task per item has one heartbeat at a time; a loader needs none, nor the right to write."""
    me = psutil.Process()
    before = len(me.children())
    for number in range(5):
        open_task(local_url, "scores", f"k{number}").save({"n": number})
    assert len(me.children()) == before
    assert [load(local_url, "scores", dict, f"k{number}")["n"] for number in range(5)] == [0, 1, 2, 3, 4]
    assert len(me.children()) == before


@pytest.mark.parametrize("name", [None, 5, (), ("a", 5)])
def test_a_name_that_is_none_is_refused(local_url: str, name: Any) -> None:
    """Before anything is written."""
    with pytest.raises(ConfigurationError, match="names no asset or task"):
        open_task(local_url, name)
    with pytest.raises(ConfigurationError, match="partition=5"):
        open_task(local_url, "a", 5)  # type: ignore[arg-type]


def test_the_extra_events_of_a_range_are_marked(local_url: str, sqlite_url: str) -> None:
    """Each partition has one event of its commit; the one more that Dagster logs at the end says that it is none."""
    job = definitions(local_url, sqlite_url, []).resolve_implicit_global_asset_job_def()
    tags = {"dagster/asset_partition_range_start": "jan", "dagster/asset_partition_range_end": "mar"}
    with dg.instance_for_test() as instance:
        done = job.execute_in_process(instance=instance, tags=tags, asset_selection=[dg.AssetKey("predictions")])
        entries = instance.all_logs(done.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    events = [entry.asset_materialization for entry in entries]
    marked = [event.partition for event in events if event and "resilient/reused" in event.metadata]
    commits = [event.partition for event in events if event and "resilient/checksum" in event.metadata]
    assert commits == ["jan", "feb", "mar"]
    assert sorted(str(key) for key in marked) == ["feb", "jan", "mar"]
    assert len(events) == 6
