"""Retire a task: give up its value and checkpoints on purpose, so that garbage collection may take their objects.

The log stays, and goes on counting: a log that began again at 1 would let a zombie of the old one in.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from os import PathLike
from typing import Any

from dagster_resilient.errors import StoreUnavailableError, TaskHeldError
from dagster_resilient.state.fences import read_fence
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.owner import Verdict, local_verdict
from dagster_resilient.state.records import Entry, Owner
from dagster_resilient.state.store import ObjectRecords, RecordStore, open_state
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore, open_store

_CONFLICTS = 100


def retire_task(
    url: str | PathLike[str] | ObjectStore,
    asset: tuple[str, ...] | list[str] | str,
    partition: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    state_url: str | None = None,
    force: bool = False,
) -> bool:
    """Give up the value and the checkpoints of a task: of a partition that was deleted, of an asset that is no more.

    Garbage collection takes their objects after its grace. The log stays, with a tombstone as its head.

    Args:
        url: The store; see `open_store`.
        asset: The asset key, as ``"a/b"`` or as its parts; or the name of a script's task.
        partition: The partition key.
        storage_options: See `open_store`.
        state_url: The database that keeps the state, where there is one.
        force: Also where an owner may be alive.

    Returns:
        Whether there was such a task.

    Raises:
        TaskHeldError: An owner that is not known to be dead holds the task.
    """
    store = url if isinstance(url, ObjectStore) else open_store(url, storage_options)
    path = tuple(asset.split("/")) if isinstance(asset, str) else tuple(asset)
    records = open_state(state_url, store) or ObjectRecords(store)
    return retire(records, path, partition, by=f"retire_task on {socket.gethostname()}", force=force) is not None


def retire(
    records: RecordStore, asset: tuple[str, ...], partition_key: str | None, *, by: str, force: bool = False
) -> Entry | None:
    """Append a tombstone: no value, no checkpoints, no owner, a new generation.

    A training that holds the task is refused at its next commit. A run that is just computing the value may still
    commit it afterwards: that is a new value.

    Args:
        records: Where the log is kept.
        asset: Parts of the asset key.
        partition_key: The partition, None for an unpartitioned asset.
        by: Who retires it, for the log.
        force: Also where an owner may be alive.

    Returns:
        The tombstone; None where the task was never begun.

    Raises:
        TaskHeldError: An owner that is not known to be dead holds the task.
    """
    log = NumberedLog(records, keys.task_prefix(asset, partition_key, "log"))
    for _ in range(_CONFLICTS):
        head = log.head()
        if head is None or _is_retired(head):
            return head
        if head.owner is not None and not force and not _known_dead(records, head.owner):
            raise TaskHeldError(
                f"{'/'.join(asset)} is held by run {head.owner.run_id} (process {head.owner.pid} on "
                f"{head.owner.host}). End it first, or retire with force."
            )
        entry = _tombstone(head, by)
        if log.append(entry) and log.stands(entry):
            log.trim(entry)
            return entry
    raise StoreUnavailableError(f"{records.url}: {_CONFLICTS} conflicting writes in a row on {'/'.join(asset)}.")


def _is_retired(head: Entry) -> bool:
    return head.kind == "retire"


def _known_dead(records: RecordStore, owner: Owner) -> bool:
    return local_verdict(owner) is Verdict.DEAD or read_fence(records, owner.run_id) is not None


def _tombstone(head: Entry, by: str) -> Entry:
    n = head.n + 1
    return Entry(
        n=n,
        op=uuid.uuid4().hex,
        parent_op=head.op,
        kind="retire",
        run_id=by,
        asset=head.asset,
        partition_key=head.partition_key,
        generation=head.generation + 1,
        generation_starts=(*head.generation_starts, n),
        attempts=head.attempts,
    )
