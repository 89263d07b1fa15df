"""What the state layer stores: frozen records with a schema version, readable by people as JSON."""

from __future__ import annotations

import uuid
from typing import Literal

import pydantic

from dagster_resilient.storage.manifest import ManifestRef, Record, StoredObject


def _new_op() -> str:
    """A record without a unique id would equal another writer's, and a refused create would look like a lost reply."""
    return uuid.uuid4().hex


Kind = Literal["acquire", "checkpoint", "complete", "release", "value", "retire", "collect"]


class Owner(Record):
    """The process that holds a lease, with what others need to judge whether it lives.

    Attributes:
        process: Unique per process, also the name of its heartbeat.
        run_id: Dagster's run id, or an id of the script's own.
        root: The lineage: the root run of the run's group.
        attempt: The number of this try within the lineage; higher is newer.
        host: Host name, and `boot`, the kernel's boot id: a pid means something only under both.
        pid: Process id, with `started`, its start time in clock ticks: a recycled pid is another process.
        heartbeat: Key of the heartbeat object, or None where no other process could see it.
        interval: Seconds between heartbeats.
        ttl: Seconds without a heartbeat after which the owner counts as lost.
    """

    process: str
    run_id: str
    root: str
    attempt: int
    host: str
    boot: str
    pid: int
    started: int
    heartbeat: str | None = None
    interval: float = 10.0
    ttl: float = 45.0


class CheckpointRef(Record):
    """A committed checkpoint: the training step it holds, and its manifest."""

    step: int
    manifest: StoredObject


class ValueRef(Record):
    """A committed materialization.

    Attributes:
        manifest: The manifest that lists its objects, or the name of one.
        location: Prefix under which its objects were written.
        series: The chain of resuming runs that computed it; see `Claim`.
        run_id: The run that committed it.
        attempt: The try that committed it.
        fingerprint: What the value depended on, or None where nothing was declared.
    """

    manifest: ManifestRef
    location: str
    series: str
    run_id: str
    attempt: int
    fingerprint: str | None = None


class Entry(Record):
    """One entry of a task's log: the whole small state after one operation.

    Attributes:
        n: Its number; the highest is the head.
        op: Unique id of the operation that wrote it.
        parent_op: The `op` of entry n-1, None for the first entry.
        kind: What the operation was.
        run_id: The run that wrote the entry.
        asset: The asset key's parts, or the task's name as one part.
        partition_key: In clear, also where the storage key holds only a hash of it.
        generation: The fencing token: grows by one at each acquire.
        generation_starts: Numbers of the entries that began each generation; these are never trimmed.
        owner: The holder of the lease, None when it is free.
        attempts: Highest attempt seen of each lineage, the most recently seen last.
        series: The series that the checkpoints belong to.
        fingerprint: The fingerprint that the checkpoints were made under.
        checkpoints: Retained checkpoints, oldest first.
        training_done: Whether the training session of `series` was left normally.
        value: The current materialization.
        committed_by: Series that have committed a value, the latest last.
        failures: How often an attempt of the series had to take over from another.
    """

    n: int
    op: str
    parent_op: str | None = None
    kind: Kind
    run_id: str = ""
    asset: tuple[str, ...]
    partition_key: str | None = None
    generation: int = 0
    generation_starts: tuple[int, ...] = ()
    owner: Owner | None = None
    attempts: dict[str, int] = pydantic.Field(default_factory=dict)
    series: str | None = None
    fingerprint: str | None = None
    checkpoints: tuple[CheckpointRef, ...] = ()
    training_done: bool = False
    value: ValueRef | None = None
    committed_by: tuple[str, ...] = ()
    failures: int = 0


class Fence(Record):
    """Forbids a run to commit anything more. Created once, never deleted.

    Attributes:
        run_id: The run that is fenced.
        reason: Why, in words for people.
        failure_class: The verdict that led to it, such as ``lost``, or ``superseded`` by a newer run of its group.
        by: Who wrote it: a sensor, or the run that supersedes this one.
    """

    run_id: str
    reason: str
    failure_class: str
    by: str
    op: str = pydantic.Field(default_factory=_new_op)


class Claim(Record):
    """One try of a lineage. Its number orders all tries of the run group by the time at which they began.

    Attributes:
        root: Root run of the group.
        attempt: Number of the claim.
        run_id: The run that made it.
        series: The run with which the chain of *resuming* runs began that this run continues. A run that was started
            afresh begins a series of its own. State is reused within one series only.
        previous_attempt_count: How often Dagster had tried the step before in this run.
        op: Unique id of this claim.
    """

    root: str
    attempt: int
    run_id: str
    series: str
    previous_attempt_count: int = 0
    op: str


class Member(Record):
    """One finished member of a set: an item of a loop, a map of a shuffle, a rollout of an iteration."""

    member: str
    attempt: int
    manifest: StoredObject | None = None
    payload: dict[str, str | int | float | bool | None] = pydantic.Field(default_factory=dict)
    op: str = pydantic.Field(default_factory=_new_op)


class Verdict(Record):
    """A decision of the recovery about one failed run, with its reason. Created once.

    Attributes:
        run_id: The run.
        action: ``relaunched``, ``adopted`` (nothing was missing), ``gave up``, ``left`` (a user cancelled) or
            ``failed`` (an error of the recovery itself, which is tried again).
        failure_class: What the failure was taken for.
        reason: In words for people, with what is redone and what is reused.
        attempt: Number of the attempt.
        child: The re-execution.
    """

    run_id: str
    action: Literal["relaunched", "adopted", "gave up", "left", "failed"]
    failure_class: str
    reason: str
    attempt: int = 0
    child: str | None = None
    op: str = pydantic.Field(default_factory=_new_op)
