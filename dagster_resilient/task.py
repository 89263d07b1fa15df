"""The task as users see it: training sessions and partition loops over the durable state, and `open_task` for scripts.

Knows no host: `ResilientResource` makes the same `Task` inside a Dagster step.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Protocol, Self, TypeVar

from dagster_resilient.checkpoint import TrainingSession
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.state.attempt import DEFAULT_TTL, Attempt, begin_attempt, heartbeat_interval
from dagster_resilient.state.hangs import expecting
from dagster_resilient.state.index import heads
from dagster_resilient.state.notice import Notice, listening
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.records import ValueRef
from dagster_resilient.state.store import open_state
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.storage.retry import DEFAULT_PATIENCE, OUTAGE_PATIENCE, hasty
from dagster_resilient.values import StoredValue, load_value, present_values, store_value, task_name

__all__ = [
    "DEFAULT_TTL",
    "AssetName",
    "Attempt",
    "CommitHooks",
    "HasPath",
    "Part",
    "Task",
    "asset_path",
    "begin_attempt",
    "heartbeat_interval",
    "load",
    "open_task",
    "this_process",
]

T = TypeVar("T")


class HasPath(Protocol):
    """Dagster's AssetKey, as far as it concerns us."""

    @property
    def path(self) -> Sequence[str]:
        """The parts of the key."""


AssetName = str | Sequence[str] | HasPath


def asset_path(asset: AssetName) -> tuple[str, ...]:
    """Return the parts of an asset key given as ``"a/b"``, as a sequence of parts, or as Dagster's AssetKey."""
    if isinstance(asset, str):
        return tuple(asset.split("/"))
    path = getattr(asset, "path", asset)
    if not isinstance(path, Sequence) or not path or not all(isinstance(part, str) for part in path):
        raise ConfigurationError(f"{asset!r} names no asset or task; give 'a/b', a sequence of texts, or an AssetKey.")
    return tuple(path)


class CommitHooks:
    """What the host wants to know of a partition loop. This one wants nothing."""

    def committed(self, partition_key: str, stored: StoredValue) -> None:
        """Called after a partition was committed."""

    def reused(self, partition_key: str, value: ValueRef) -> None:
        """Called for a partition that an earlier try of this series had committed."""


@dataclass
class Part:
    """One partition of a loop.

    Attributes:
        key: The partition key.
    """

    key: str
    _task: Task
    _saved: bool = False

    def load(self, asset: AssetName, expected: type[T] | None = None) -> T:
        """Load the same partition of another asset; see `Task.load`."""
        return self._task.load(asset, expected, partition=self.key)

    def save(self, value: Any) -> StoredValue:
        """Commit the partition's value. When this returns, no loss of the process undoes it."""
        stored = store_value(self._task.durable(self.key), value)
        self._saved = True
        self._task.hooks.committed(self.key, stored)
        return stored

    def training(self, **options: Any) -> TrainingSession:
        """Begin or resume this partition's training; see `Task.training`."""
        return TrainingSession(self._task.trained(self.key), **options)

    @property
    def saved(self) -> bool:
        """Whether `save` was called."""
        return self._saved


@dataclass
class Task:
    """One unit of durable work: an asset, or a named task of a script, with its partitions.

    Attributes:
        attempt: This try.
        asset: Parts of the asset key.
        partition_keys: The partitions that this run targets, in order of definition; empty for an unpartitioned task.
        fingerprint: What makes earlier state of the series reusable.
        hooks: What the host is told.
    """

    attempt: Attempt
    asset: tuple[str, ...]
    partition_keys: Sequence[str] = ()
    fingerprint: str | None = None
    hooks: CommitHooks = field(default_factory=CommitHooks)

    @property
    def store(self) -> ObjectStore:
        """Where state and data are kept."""
        return self.attempt.store

    def durable(self, partition_key: str | None) -> DurableTask:
        """Return the durable state of one partition."""
        return self.attempt.durable(self.asset, partition_key, self.fingerprint)

    def trained(self, partition_key: str | None) -> DurableTask:
        """Return the same for a training, which must not wait long for a store: it goes on and saves later."""
        return self.attempt.durable(self.asset, partition_key, self.fingerprint, patience=DEFAULT_PATIENCE)

    def training(self, **options: Any) -> TrainingSession:
        """Begin a training, or resume it from the newest valid checkpoint.

        Args:
            **options: ``model``, ``optimizer``, ``scheduler``, ``loader``, ``state``, ``save``, ``keep``,
                ``hung_after``; see `TrainingSession`.

        Raises:
            ConfigurationError: The run targets several partitions; train each in the loop over `partitions`.
        """
        return TrainingSession(self.trained(self._only_partition()), **options)

    def partitions(self, hung_after: float | None = None) -> Iterator[Part]:
        """Yield the partitions that this series has not committed yet, in order of definition.

        Commit each with `Part.save` before asking for the next. A partition counts as committed if this series
        committed it under the same fingerprint and its objects are present.

        Args:
            hung_after: Seconds for one partition, without any report, after which the loop counts as hung, and recovery
                ends it. None: ten times the longest of the last ones, at least 3,600, once three are known.

        Raises:
            ConfigurationError: The task is not partitioned, `hung_after` is no limit, or a partition was left without
                `save`.
            FencedError: A newer try has taken over.
            PreemptedError: The process was told to leave while a partition was in work. Every one that was saved is.
        """
        if not self.partition_keys:
            raise ConfigurationError(
                f"{self.name} is not partitioned in this run; partitions() has nothing to loop over."
            )
        with listening(self.attempt.notice()) as notice, expecting(self.attempt.sidecar, self.name, hung_after):
            yield from self._missing(self._committed(), notice)

    def _missing(self, committed: Mapping[str, ValueRef], notice: Notice) -> Iterator[Part]:
        for done, key in enumerate(self.partition_keys):
            durable = self.durable(key)
            durable.check_fenced()
            self._leave_if_told(notice, done)
            durable.report(partition=key, partitions_done=done, partitions_total=len(self.partition_keys))
            if key in committed:
                self.hooks.reused(key, committed[key])
                continue
            part = Part(key, self)
            yield part
            if not part.saved:
                raise ConfigurationError(
                    f"{task_name(self.asset, key)}: the loop went on without save(); save a value, or None."
                )
        self._leave_if_told(notice, len(self.partition_keys))

    def _leave_if_told(self, notice: Notice, done: int) -> None:
        """End between two partitions where the process was told to leave: the next one would be lost work."""
        if notice.told is not None:
            self.attempt.mark_preempted(self.name, notice.told)
            notice.leave(
                f"{self.name} was told to leave by {notice.told}. {done} of {len(self.partition_keys)} partitions are "
                "committed, and the next try goes on with the others."
            )

    def _committed(self) -> dict[str, ValueRef]:
        """Return what earlier tries of this series committed, and is there: all at once, at the start of the loop.

        What an orphan of the series commits later is computed again here: it is the one partition that it had in work.
        """
        store, records = self.store, hasty(self.attempt.records, OUTAGE_PATIENCE)
        found = heads(records, store, self.asset, self.partition_keys)
        series = self.attempt.claim.series
        values = {
            key: head.value
            for key in self.partition_keys
            if (head := found.get(keys.partition_segment(key))) is not None
            and head.value is not None
            and series in head.committed_by
            and head.value.fingerprint == self.fingerprint
        }
        return present_values(store, self.asset, values)

    def load(self, asset: AssetName, expected: type[T] | None = None, partition: str | None = None) -> T:
        """Load the current value of an asset partition, every byte verified; see `values.load_value`."""
        return load_value(self.store, asset_path(asset), partition, expected, self.attempt.records)

    def save(self, value: Any) -> StoredValue:
        """Commit the value of this task (a script's result; in Dagster, return it and let the IO manager do this)."""
        return store_value(self.durable(self._only_partition()), value)

    def close(self) -> None:
        """End this process's heartbeat for the task: in a service that opens many. A script's ends with its process.

        Inside Dagster the resource does it. A task that is still held stays so until its time to live is over.
        """
        if self.attempt.sidecar is not None:
            self.attempt.sidecar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self, **fields: Any) -> None:
        """Show iteration counters and metrics in the heartbeat. Never raises, never blocks."""
        self.durable(None).report(**fields)

    @property
    def name(self) -> str:
        """The asset key as messages name it."""
        return task_name(self.asset, None)

    def _only_partition(self) -> str | None:
        if len(self.partition_keys) > 1:
            raise ConfigurationError(
                f"{self.name}: this run targets {len(self.partition_keys)} partitions; loop over task.partitions() and "
                "use each part."
            )
        return self.partition_keys[0] if self.partition_keys else None


def load(
    url: str | PathLike[str] | ObjectStore,
    asset: AssetName,
    expected: type[T] | None = None,
    partition: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    state_url: str | None = None,
) -> T:
    """Load the current value of an asset or task from anywhere, every byte verified. Writes nothing.

    Args:
        url: Where data and state are kept; see `open_store`.
        asset: The asset key, or the name of a script's task.
        expected: Type that the value must have; None: any.
        partition: The partition, if any.
        storage_options: See `open_store`.
        state_url: The database that keeps the state, where there is one.

    Raises:
        ValueNotFoundError: Nothing was committed.
        IntegrityError: Objects are missing or damaged.
        UnsupportedValueError: The value has another type than expected.
    """
    store = url if isinstance(url, ObjectStore) else open_store(url, storage_options)
    return load_value(store, asset_path(asset), partition, expected, open_state(state_url, store))


def open_task(
    url: str | PathLike[str] | ObjectStore,
    name: AssetName,
    partition: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    state_url: str | None = None,
    fingerprint: str | None = None,
    heartbeat_seconds: float | None = None,
    ttl_seconds: float = DEFAULT_TTL,
) -> Task:
    """Open a task outside Dagster: a plain script, a torchrun rank, an Airflow task.

    Every start of the script under the same name continues the same series: it resumes until the task is complete, and
    then finds it complete.

    Args:
        url: Where data and state are kept; see `open_store`.
        name: The task's name.
        partition: The partition, if the name alone does not identify the work.
        storage_options: See `open_store`.
        state_url: A database that keeps the state instead, where the store cannot decide who creates an object first:
            ``postgresql://...`` or ``sqlite:///path``.
        fingerprint: Change it, and earlier checkpoints are not reused.
        heartbeat_seconds: Seconds between heartbeats; None: in proportion to the TTL, 10 s for 45 s.
        ttl_seconds: Seconds without a heartbeat after which another start may take over.

    Raises:
        ConfigurationError: The URL or an option cannot work.
        StorageError: The store refuses or does not answer.
    """
    interval = heartbeat_interval(heartbeat_seconds, ttl_seconds)
    path = asset_path(name)
    if partition is not None and not isinstance(partition, str):
        raise ConfigurationError(
            f"partition={partition!r} of {task_name(path, None)} is no text; write {str(partition)!r}."
        )
    store = url if isinstance(url, ObjectStore) else open_store(url, storage_options)
    root = f"script:{keys.asset_segment(path)}/{keys.partition_segment(partition)}"
    attempt = begin_attempt(
        store,
        run_id=uuid.uuid4().hex,
        root=root,
        series=root,
        instance_id="script",
        interval=interval,
        ttl=ttl_seconds,
        displaces_live=False,
        records=open_state(state_url, store),
    )
    if attempt.sidecar is not None:
        # A service may open many: what nothing refers to any more needs no heartbeat.
        weakref.finalize(attempt, attempt.sidecar.close)
    return Task(attempt, path, () if partition is None else (partition,), fingerprint)
