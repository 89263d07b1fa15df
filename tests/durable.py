"""Tries of a task for tests of the state layer, without a host."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from dagster_resilient.state.owner import this_process
from dagster_resilient.state.records import Claim
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.manifest import StoredObject
from dagster_resilient.storage.object_store import ObjectStore


def manifest(name: str) -> StoredObject:
    """A manifest's name, as a writer hands it in. The state layer does not look inside."""
    return StoredObject(key=f"data/{name}", size=1, blake3=name)


def make_task(
    store: ObjectStore,
    *,
    root: str = "root",
    run: str = "run",
    attempt: int = 1,
    series: str | None = None,
    **more: Any,
) -> DurableTask:
    """One try of a lineage, in this process."""
    claim = Claim(root=root, attempt=attempt, run_id=run, series=series or root, op=uuid.uuid4().hex)
    owner = this_process(claim, heartbeat=None, interval=10.0, ttl=45.0)
    return DurableTask(store, ("a",), None, claim, owner, now=lambda: datetime.now(UTC), **more)


def with_dead_owner(task: DurableTask) -> DurableTask:
    """The same try, by a process of this machine that has ended: its pid now belongs to another one."""
    task.owner = task.owner.model_copy(update={"started": task.owner.started + 1})
    return task


def steps(task: DurableTask) -> list[int]:
    """The training steps of the checkpoints in the head."""
    head = task.head()
    return [] if head is None else [checkpoint.step for checkpoint in head.checkpoints]
