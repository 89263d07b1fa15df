"""What is kept, for people: which tasks a store holds, and what happened to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from typing import Any

from dagster_resilient.errors import ValueNotFoundError
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import Entry
from dagster_resilient.state.store import ObjectRecords, RecordStore, open_state
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore, open_store


@dataclass(frozen=True)
class TaskName:
    """An asset partition, or a script's task.

    Attributes:
        asset: Parts of the asset key.
        partition_key: The partition, None for an unpartitioned task.
    """

    asset: tuple[str, ...]
    partition_key: str | None

    def __str__(self) -> str:
        name = "/".join(self.asset)
        return name if self.partition_key is None else f"{name}[{self.partition_key}]"


@dataclass(frozen=True)
class HistoryLine:
    """One entry of a task's log.

    Attributes:
        n: Its number.
        at: When it was written, by the clock of the store or database.
        kind: What was done: ``acquire``, ``checkpoint``, ``complete``, ``release``, ``value``, ``retire``, ``collect``.
        run_id: The run that did it.
        generation: The fencing token after it.
        attempt: The number of the try within its lineage.
        text: All of it in words.
    """

    n: int
    at: datetime
    kind: str
    run_id: str
    generation: int
    attempt: int
    text: str

    def __str__(self) -> str:
        return f"{self.n:>5}  {self.at:%Y-%m-%d %H:%M:%S}  {self.text}"


def list_tasks(
    url: str | PathLike[str] | ObjectStore,
    *,
    storage_options: Mapping[str, Any] | None = None,
    state_url: str | None = None,
) -> list[TaskName]:
    """Return the tasks that a store holds, in order of their names.

    The listing gives the names back. Only where a long name was shortened to a hash is the log asked for it.

    Args:
        url: The store; see `open_store`.
        storage_options: See `open_store`.
        state_url: The database that keeps the state, where there is one.
    """
    records = _records(url, storage_options, state_url)
    segments = {(named[0], named[2]) for info in records.list("tasks/") if (named := _log_key(info.key)) is not None}
    names = [_name(records, asset, partition) for asset, partition in sorted(segments)]
    return sorted((name for name in names if name), key=lambda name: (name.asset, name.partition_key or ""))


def task_history(
    url: str | PathLike[str] | ObjectStore,
    asset: str | Sequence[str],
    partition: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    state_url: str | None = None,
) -> list[HistoryLine]:
    """Return what happened to a task, oldest first, as far as its log was not trimmed. Print the lines.

    Args:
        url: The store; see `open_store`.
        asset: The asset key, as ``"a/b"`` or as its parts; or the name of a script's task.
        partition: The partition key.
        storage_options: See `open_store`.
        state_url: The database that keeps the state, where there is one.

    Raises:
        ValueNotFoundError: There is no such task.
    """
    records = _records(url, storage_options, state_url)
    path = tuple(asset.split("/")) if isinstance(asset, str) else tuple(asset)
    log = NumberedLog(records, keys.task_prefix(path, partition, "log"))
    times = log.numbers()
    entries = [entry for n in sorted(times) if (entry := log.get(n)) is not None]
    if not entries:
        raise ValueNotFoundError(f"{TaskName(path, partition)} has no history at {records.url}: it was never begun.")
    return [_line(entry, times[entry.n]) for entry in entries]


def _records(
    url: str | PathLike[str] | ObjectStore, options: Mapping[str, Any] | None, state_url: str | None
) -> RecordStore:
    store = url if isinstance(url, ObjectStore) else open_store(url, options)
    return open_state(state_url, store) or ObjectRecords(store)


def _log_key(key: str) -> tuple[str, str, str, str] | None:
    named = keys.decode_task_key(key)
    return named if named is not None and named[1] == "log" else None


def _name(records: RecordStore, asset: str, partition: str) -> TaskName | None:
    path, (known, key) = keys.decode_asset_segment(asset), keys.decode_partition_segment(partition)
    if path is not None and known:
        return TaskName(path, key)
    head = NumberedLog(records, f"tasks/{asset}/log/{partition}").head()
    return None if head is None else TaskName(head.asset, head.partition_key)


def _line(entry: Entry, at: datetime) -> HistoryLine:
    attempt = list(entry.attempts.values())[-1] if entry.attempts else 0
    who = f"run {entry.run_id}, try {attempt}, generation {entry.generation}"
    return HistoryLine(
        n=entry.n,
        at=at,
        kind=entry.kind,
        run_id=entry.run_id,
        generation=entry.generation,
        attempt=attempt,
        text=f"{_what(entry)} ({who})",
    )


def _what(entry: Entry) -> str:
    if entry.kind == "acquire" and entry.owner is not None:
        from_step = f", resumes after step {entry.checkpoints[-1].step}" if entry.checkpoints else ""
        return f"taken by process {entry.owner.pid} on {entry.owner.host}{from_step}"
    if entry.kind == "checkpoint" and entry.checkpoints:
        kept = ", ".join(str(checkpoint.step) for checkpoint in entry.checkpoints)
        return f"checkpoint of step {entry.checkpoints[-1].step}; retained: {kept}"
    if entry.kind == "value" and entry.value is not None:
        return f"value committed: {entry.value.location}"
    words = {"complete": "training complete", "release": "given back", "retire": "retired", "collect": "sealed by gc"}
    return words.get(entry.kind, entry.kind)
