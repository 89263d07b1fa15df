"""Lost messages, outages and trims, on memory, a directory and a real S3 server; and what each operation costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from durable import make_task, manifest, steps

from dagster_resilient.errors import (
    FencedError,
    StoreUnavailableError,
)
from dagster_resilient.state import log as log_module
from dagster_resilient.state.log import KEEP_ENTRIES
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.storage.retry import RetryingStore
from dagster_resilient.testing import Fault, FaultStore

# ---- lost messages


LIFE: list[Callable[[DurableTask], Any]] = [
    lambda task: task.acquire(),
    lambda task: task.commit_checkpoint(1, manifest("1"), keep=2),
    lambda task: task.commit_checkpoint(2, manifest("2"), keep=2),
    lambda task: task.commit_value(manifest("value")),
    lambda task: task.complete(),
]


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_one_lost_message_anywhere_changes_nothing(store: ObjectStore, kind: Any) -> None:
    """Each message of a task's life is lost once: every operation succeeds and is exactly one entry."""
    operations = FaultStore(store)
    task = replace_asset(make_task(operations), "without faults")
    for act in LIFE:
        act(task)
    for number in range(len(operations.operations)):
        faulty = RetryingStore(FaultStore(store, {number: Fault(kind)}))
        task = replace_asset(make_task(faulty), f"fault {number}")
        for act in LIFE:
            act(task)
        assert [entry.kind for entry in task.log.history()] == ["acquire", *["checkpoint"] * 2, "value", "complete"]
        assert steps(task) == [1, 2]


def replace_asset(task: DurableTask, name: str) -> DurableTask:
    """The same try, of another task."""
    return replace(task, asset=(name,))


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_a_commit_that_raised_is_whole_or_absent(store: ObjectStore, kind: Any) -> None:
    """After an error at any message the log is sound: the next try goes on from the one state or the other."""
    counting = FaultStore(store)
    task = replace_asset(make_task(counting), "without faults")
    for act in LIFE:
        act(task)
    for number in range(len(counting.operations)):
        name = f"fault {number}"
        first = replace_asset(make_task(FaultStore(store, {number: Fault(kind)}), root=name), name)
        done = 0
        try:
            for act in LIFE:
                act(first)
                done += 1
        except StoreUnavailableError:
            pass
        second = replace_asset(make_task(store, root=name, run="run-2", attempt=2), name)
        resumed = [checkpoint.step for checkpoint in second.acquire().checkpoints]
        known = [[], [], [1], [1, 2], [1, 2], [1, 2]]
        assert resumed in (known[done], known[min(done + 1, 5)])
        history = second.log.history()
        assert [entry.n for entry in history] == list(range(1, len(history) + 1))
        assert all(after.parent_op == before.op for before, after in itertools.pairwise(history))


def test_an_outage_during_a_commit_is_unavailable_and_not_fenced(store: ObjectStore) -> None:
    """Only a fence or a newer owner that was *read* stops a writer. When the store is back, it goes on."""
    faulty = FaultStore(store)
    task = make_task(faulty)
    task.acquire()
    with faulty.outage(), pytest.raises(StoreUnavailableError):
        task.commit_checkpoint(1, manifest("1"), keep=1)
    task.commit_checkpoint(2, manifest("2"), keep=1)
    assert steps(task) == [2]


# ---- what it costs


def test_each_operation_costs_the_requests_that_were_promised(store: ObjectStore) -> None:
    """Acquire and the first commit: five for a new task, six behind a log, seven behind an owner; then one each."""
    counting = FaultStore(store)
    for attempt, (costs, ends) in enumerate([(5, False), (7, True), (6, True)], 1):
        task = make_task(counting, attempt=attempt)
        counting.operations.clear()
        task.acquire()
        task.commit_checkpoint(1, manifest("1"), keep=1)
        assert len(counting.operations) == costs
        counting.operations.clear()
        task.commit_checkpoint(2, manifest("2"), keep=1)
        assert [operation.verb for operation in counting.operations] == ["create"]
        if ends:
            task.release()


def test_a_log_stays_short(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long training run leaves no more entries than are kept, and its state is the same."""
    monkeypatch.setattr(log_module, "KEEP_FOR", timedelta(0))
    task = make_task(store)
    task.acquire()
    for step in range(1, 200):
        task.commit_checkpoint(step, manifest(str(step)), keep=2)
    assert len(task.log.numbers()) < KEEP_ENTRIES + 70
    assert steps(task) == [198, 199]


def test_a_zombie_that_slept_past_a_trim_is_refused(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the numbers behind its own were trimmed: the first entry of the next generation stays for ever."""
    monkeypatch.setattr(log_module, "KEEP_FOR", timedelta(0))
    zombie, successor = make_task(store), make_task(store, run="run-2", attempt=2)
    zombie.acquire()
    successor.acquire()
    for step in range(1, 150):
        successor.commit_checkpoint(step, manifest(str(step)), keep=1)
    assert 3 not in successor.log.numbers()
    with pytest.raises(FencedError):
        zombie.commit_checkpoint(1000, manifest("zombie"), keep=1)
    with pytest.raises(FencedError):
        make_task(store).commit_value(manifest("zombie"))
    assert steps(successor) == [149]
