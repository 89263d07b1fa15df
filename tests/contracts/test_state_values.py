"""Values without a lease, on every kind of records: fences and tries decide what lands."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from durable import make_task, manifest

from dagster_resilient.errors import (
    FencedError,
)
from dagster_resilient.state.fences import fence_run
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.testing import FaultStore, Operation

MakeTask = Callable[..., DurableTask]


def test_a_value_is_visible_when_it_is_committed(make: MakeTask) -> None:
    """The head names it, for its series and fingerprint only; the next value takes its place."""
    task = make(fingerprint="f")
    assert task.committed_value(task.head()) is None
    task.commit_value(manifest("1"))
    value = task.committed_value(task.head())
    assert value is not None
    assert (value.manifest, value.run_id, value.attempt) == (manifest("1"), "run", 1)
    assert make(fingerprint="g").committed_value(task.head()) is None
    assert make(root="other", fingerprint="f").committed_value(task.head()) is None
    task.commit_value(manifest("2"))
    head = task.head()
    assert head is not None
    assert head.value is not None
    assert (head.n, head.value.manifest, head.committed_by) == (2, manifest("2"), ("root",))


def test_a_fenced_run_commits_nothing(make: MakeTask) -> None:
    """Neither a value nor a lease; the message repeats the reason of the fence."""
    task = make()
    fence_run(task.records, "run", reason="No heartbeat for 60 s.", failure_class="lost", by="sensor")
    for call in (lambda: task.commit_value(manifest("1")), task.acquire):
        with pytest.raises(FencedError, match=r"run run is fenced: No heartbeat for 60 s\."):
            call()
    assert task.head() is None


def test_a_fence_that_the_sidecar_has_read_stops_the_task_without_a_request(store: ObjectStore) -> None:
    """`check_fenced` asks only the process beside it."""
    counting = FaultStore(store)
    make_task(counting).check_fenced()
    with pytest.raises(FencedError, match="taken for lost"):
        make_task(counting, fenced=lambda: "taken for lost").check_fenced()
    assert counting.operations == []


def test_a_fenced_owner_loses_its_task_at_once(make: MakeTask) -> None:
    """Alive or not: the verdict is final."""
    holder = make(root="first", run="run-1")
    holder.acquire()
    fence_run(holder.records, "run-1", reason="r", failure_class="hung", by="sensor")
    assert make(root="second", run="run-2").acquire().generation == 2


@pytest.mark.parametrize("moment", range(4))
def test_a_fence_and_a_successor_between_any_two_requests_of_a_zombie(store: ObjectStore, moment: int) -> None:
    """The zombie's value lands before its successor's first entry, which then carries it on, or never.

    A commit is LIST, GET of the head, GET of the fence, create. At each point between, the zombie sleeps while its run
    is fenced and its successor commits.
    """
    make_task(store, root="before", run="before").commit_value(manifest("before"))
    successor = make_task(store, run="run-2", attempt=2)

    def plan(number: int, operation: Operation) -> None:
        if number == moment:
            fence_run(successor.records, "run", reason="lost", failure_class="lost", by="sensor")
            successor.commit_value(manifest("successor"))

    zombie = make_task(FaultStore(store, plan), run="run")
    with pytest.raises(FencedError):
        zombie.commit_value(manifest("zombie"))
    head = successor.head()
    assert head is not None
    assert head.value is not None
    assert head.value.manifest == manifest("successor")
    assert len(successor.log.history()) == 2


def test_a_lower_try_never_follows_a_higher_one_also_with_another_lineage_between(make: MakeTask) -> None:
    """What the log remembers of a lineage outlives the entries of others."""
    make(run="run-2", attempt=2).commit_value(manifest("2"))
    make(root="unrelated", run="x").commit_value(manifest("x"))
    with pytest.raises(FencedError, match="superseded by try 2"):
        make(run="run-1", attempt=1).commit_value(manifest("1"))
    make(run="run-2", attempt=2).commit_value(manifest("2 again"))


def test_a_value_between_two_checkpoints_disturbs_nobody(make: MakeTask) -> None:
    """A writer without a lease and the lease's holder share a log: both commits stand, none loses the other's."""
    training = make()
    training.acquire()
    training.commit_checkpoint(1, manifest("1"), keep=5)
    make().commit_value(manifest("value"))
    training.commit_checkpoint(2, manifest("2"), keep=5)
    training.complete()
    head = training.head()
    assert head is not None
    assert head.value is not None
    assert (head.value.manifest, [checkpoint.step for checkpoint in head.checkpoints]) == (manifest("value"), [1, 2])


def test_many_writers_of_values_all_get_through(make: MakeTask) -> None:
    """Each conflict is one more look, and every value is an entry of its own."""
    tasks = [make(root=f"root-{n}", run=f"run-{n}") for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        entries = list(pool.map(lambda task: task.commit_value(manifest(task.claim.root)), tasks))
    assert sorted(entry.n for entry in entries) == [1, 2, 3, 4]
    head = tasks[0].head()
    assert head is not None
    assert sorted(head.committed_by) == [f"root-{n}" for n in range(4)]
