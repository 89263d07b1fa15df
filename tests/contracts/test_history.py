"""What people see of a store: its tasks, and the history of one."""

from __future__ import annotations

import itertools

import pytest
from durable import make_task, manifest

from dagster_resilient import list_tasks, retire_task, task_history
from dagster_resilient.errors import ValueNotFoundError
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.object_store import ObjectStore

TASKS = [
    (("a",), None),
    (("a", "b"), None),
    (("a",), "2026-01-01"),
    (("a",), "x/y|z"),
    (("long", "k" * 300), "漢" * 300),
    (("long", "k" * 300), "漢" * 299 + "字"),
    (("A",), ""),
    (("a+b",), ".."),
]


def a_task(store: ObjectStore, asset: tuple[str, ...], partition: str | None) -> DurableTask:
    """A try of any task."""
    task = make_task(store)
    return DurableTask(store, asset, partition, task.claim, task.owner, now=task.now)


def test_a_listing_gives_back_assets_and_partitions(store: ObjectStore) -> None:
    """Each task under the very names that it was written under, also where a key holds only a hash of them."""
    for asset, partition in TASKS:
        a_task(store, asset, partition).commit_value(manifest("1"))
    assert [(name.asset, name.partition_key) for name in list_tasks(store)] == sorted(
        TASKS, key=lambda name: (name[0], name[1] or "")
    )


def test_a_history_can_be_read(store: ObjectStore) -> None:
    """Who did what, in words, oldest first."""
    task = make_task(store, run="run-1")
    task.acquire()
    task.commit_checkpoint(100, manifest("c1"), keep=2)
    task.commit_checkpoint(200, manifest("c2"), keep=2)
    task.complete()
    task.commit_value(manifest("v"))
    retire_task(store, "a")
    lines = task_history(store, "a")
    assert [line.kind for line in lines] == ["acquire", "checkpoint", "checkpoint", "complete", "value", "retire"]
    assert [line.n for line in lines] == [1, 2, 3, 4, 5, 6]
    assert "checkpoint of step 200; retained: 100, 200 (run run-1, try 1, generation 1)" in str(lines[2])
    assert all(before.at <= after.at for before, after in itertools.pairwise(lines))


def test_a_task_that_never_was_has_no_history(store: ObjectStore) -> None:
    """The error names it."""
    with pytest.raises(ValueNotFoundError, match=r"never\[2026\] has no history"):
        task_history(store, "never", "2026")
