"""Leases, on every kind of records: who owns a task, and what a former owner can still do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from durable import manifest, steps, with_dead_owner

from dagster_resilient.errors import (
    FencedError,
    OwnershipError,
    TaskHeldError,
)
from dagster_resilient.state.owner import Verdict, local_verdict
from dagster_resilient.state.task import DurableTask

MakeTask = Callable[..., DurableTask]


def test_acquire_commit_complete(make: MakeTask) -> None:
    """The whole life of a training task: each operation is one entry, and the head tells the state."""
    task = make()
    assert task.acquire().generation == task.generation == 1
    for step in (100, 200, 300):
        task.commit_checkpoint(step, manifest(str(step)), keep=2)
    assert [checkpoint.step for checkpoint in task.checkpoints] == steps(task) == [200, 300]
    task.complete()
    head = task.head()
    assert head is not None
    assert (head.n, head.kind, head.owner, head.training_done) == (5, "complete", None, True)
    assert [found.kind for found in task.log.history()] == ["acquire", *["checkpoint"] * 3, "complete"]


def test_a_commit_names_the_checkpoints_that_dropped_out(make: MakeTask) -> None:
    """Exactly those that nothing refers to any more: their objects may go. Saving a step again replaces it."""
    task = make()
    task.acquire()
    assert task.commit_checkpoint(1, manifest("1"), keep=2) == ()
    assert task.commit_checkpoint(2, manifest("2"), keep=2) == ()
    assert [old.step for old in task.commit_checkpoint(3, manifest("3"), keep=2)] == [1]
    assert [old.manifest for old in task.commit_checkpoint(3, manifest("3 again"), keep=2)] == [manifest("3")]
    assert [old.step for old in task.commit_checkpoint(4, manifest("4"), keep=0)] == [2, 3]


def test_commits_need_the_lease(make: MakeTask) -> None:
    """Before acquire and after release nothing leased is written."""
    task = make()
    with pytest.raises(OwnershipError, match="acquire"):
        task.commit_checkpoint(1, manifest("1"), keep=1)
    task.acquire()
    task.release()
    with pytest.raises(OwnershipError, match="acquire"):
        task.complete()
    task.release()
    assert [found.kind for found in task.log.history()] == ["acquire", "release"]


def test_a_released_task_is_resumed_from_its_checkpoints(make: MakeTask) -> None:
    """The next try of the series, under the same fingerprint, begins a new generation with all that was retained."""
    first = make(fingerprint="f")
    first.acquire()
    first.commit_checkpoint(7, manifest("7"), keep=3)
    first.release()
    second = make(run="run-2", attempt=2, fingerprint="f")
    taken = second.acquire()
    assert (taken.generation, taken.failures) == (2, 0)
    assert [checkpoint.step for checkpoint in second.checkpoints] == [7]


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"series": "other"}])
def test_other_inputs_or_a_fresh_start_begin_from_nothing(make: MakeTask, change: dict[str, str]) -> None:
    """State is reused within one series and under one fingerprint only."""
    first = make(fingerprint="f")
    first.acquire()
    first.commit_checkpoint(7, manifest("7"), keep=3)
    first.complete()
    second = make(run="run-2", attempt=2, **{"fingerprint": "f", **change})
    taken = second.acquire()
    assert (taken.checkpoints, taken.training_done, taken.failures, taken.generation) == ((), False, 0, 2)


def test_a_live_owner_of_another_lineage_keeps_its_task(make: MakeTask) -> None:
    """The error names the owner's run, try, process and host; nothing was written."""
    task = make(root="first", run="run-1")
    task.acquire()
    with pytest.raises(TaskHeldError, match=rf"try 1 of run run-1 \(process {task.owner.pid} on {task.owner.host}\)"):
        make(root="second", run="run-2").acquire()
    assert len(task.log.numbers()) == 1
    task.commit_checkpoint(1, manifest("1"), keep=1)


def test_a_dead_owner_loses_its_task_at_once(make: MakeTask) -> None:
    """The process table of its machine tells; a pid that was given to another process does not protect it."""
    dead = with_dead_owner(make(root="first"))
    dead.acquire()
    dead.commit_checkpoint(5, manifest("5"), keep=1)
    assert local_verdict(dead.owner) is Verdict.DEAD
    successor = make(root="second", series="first")
    taken = successor.acquire()
    assert (taken.generation, taken.failures) == (2, 1)
    assert [checkpoint.step for checkpoint in successor.checkpoints] == [5]


def test_a_higher_try_of_the_lineage_displaces_a_lower_one(make: MakeTask) -> None:
    """Even where the lower one lives: its commits are refused from then on, for ever, and are not visible."""
    zombie, successor = make(), make(run="run-2", attempt=2)
    zombie.acquire()
    zombie.commit_checkpoint(5, manifest("5"), keep=2)
    successor.acquire()
    successor.commit_checkpoint(8, manifest("8"), keep=2)
    for _ in range(2):
        with pytest.raises(OwnershipError):
            zombie.commit_checkpoint(6, manifest("6"), keep=2)
    with pytest.raises(FencedError, match=r"try 1 .* superseded by try 2"):
        zombie.commit_value(manifest("zombie"))
    with pytest.raises(FencedError, match=r"try 1 .* superseded by try 2"):
        make().acquire()
    assert steps(successor) == [5, 8]
    head = successor.head()
    assert head is not None
    assert head.value is None


def test_the_first_refusal_of_a_displaced_owner_says_fenced(make: MakeTask) -> None:
    """It names who took over, and tells to stop."""
    zombie = make()
    zombie.acquire()
    make(run="run-2", attempt=2).acquire()
    with pytest.raises(FencedError, match=r"run run-2 on .* took the task over \(generation 2, ours was 1\); stop"):
        zombie.commit_checkpoint(6, manifest("6"), keep=2)


def test_a_second_start_of_a_script_displaces_nobody(make: MakeTask) -> None:
    """Where a second start may be a mistake, a live lower try keeps the task."""
    make().acquire()
    with pytest.raises(TaskHeldError):
        make(attempt=2, displaces_live=False).acquire()


def test_acquire_can_wait_for_the_owner(make: MakeTask) -> None:
    """Until it releases, looking again and again; the wait ends with the time given."""
    holder, waiting = make(root="first"), make(root="second")
    holder.acquire()
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            holder.release()

    waiting.sleep = sleep
    assert waiting.acquire(wait=3600.0).generation == 2
    assert len(looks) == 3
    with pytest.raises(TaskHeldError):
        make(root="third", sleep=lambda _: None).acquire(wait=0.0)


def test_an_owner_may_acquire_its_own_task_again(make: MakeTask) -> None:
    """A process that left its session by an exception enters the next one as a new generation."""
    task = make()
    task.acquire()
    task.commit_checkpoint(1, manifest("1"), keep=1)
    assert task.acquire().generation == 2
    assert steps(task) == [1]


def test_of_racing_tries_one_owns_each_generation(make: MakeTask) -> None:
    """Lineages that acquire at the same time: no generation has two owners, and the holder is the last who got it."""
    tasks = [with_dead_owner(make(root=f"root-{n}", run=f"run-{n}")) for n in range(4)]
    together = threading.Barrier(4)

    def acquire(task: DurableTask) -> int:
        together.wait(timeout=30)
        return task.acquire().generation

    with ThreadPoolExecutor(4) as pool:
        generations = list(pool.map(acquire, tasks))
    assert sorted(generations) == [1, 2, 3, 4]
    head = tasks[0].head()
    assert head is not None
    assert head.owner is not None
    assert head.owner.run_id == f"run-{generations.index(4)}"
