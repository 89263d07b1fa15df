"""One task's durable state: acquire, commit, complete, fence.

Two kinds of writer share a task's log. A *leased* writer (a training session) acquires the task, which begins a new
generation, and then commits with one create per commit. A *lease-less* writer (a value from an IO manager, a partition
of a loop) reads the head, then its run's fence, then creates. The order matters: a fence that is written between the
two is either seen, or written before the head was read by the successor, which then adopts what it finds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from dagster_resilient.errors import FencedError, OwnershipError, StoreUnavailableError, TaskHeldError
from dagster_resilient.state.entries import acquisition, next_entry
from dagster_resilient.state.fences import read_fence
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.notice import Notice
from dagster_resilient.state.owner import OwnerWatch, Verdict, local_verdict
from dagster_resilient.state.records import CheckpointRef, Claim, Entry, Kind, Owner, ValueRef
from dagster_resilient.state.store import ObjectRecords, RecordStore, state_tag
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import ManifestRef, StoredObject
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.storage.retry import hasty

_SERIES_KEPT = 20
_TRIM_EVERY = 64
_CONFLICTS = 200
_COURTESY_SECONDS = 5.0
_OF_OTHERS = {"value", "collect"}  # entries that a process without the lease may write while it is held
# A leased commit needs no LIST behind it, unless so much time passed since its parent was read (machine asleep) that
# the entry after the parent may have been trimmed. Half of what `log.KEEP_FOR` grants.
_FRESH_SECONDS = 1800.0


@dataclass
class DurableTask:
    """The state of one (asset, partition) as one try of a lineage sees and changes it.

    Attributes:
        store: Where data objects go.
        asset: Parts of the asset key, or the name of a task outside Dagster.
        partition_key: The partition, None for an unpartitioned one.
        claim: This try: its lineage, its number, its run and series.
        owner: This process.
        fingerprint: What makes earlier state of the same series reusable; None where nothing was declared.
        now: The store's clock, for judging another owner's heartbeat.
        progress: Where `report` sends iteration counters; must neither raise nor block.
        fenced: Returns a reason once a fence of this run was read by the heartbeat process.
        watch: Has the heartbeat process look for generations newer than the one given, under a prefix of log entries.
        unwatch: Ends that. Called before the lease is given away: a successor is then no surprise.
        expect: Has the heartbeat process mark this one as hung where no report of a task comes for so many seconds, or,
            for None, for much longer than usual.
        relax: Ends that.
        displaces_live: Whether a higher attempt takes the lease from a lower one that may still live. True where a host
            decides that a try is superseded (Dagster's retries and re-executions), False for scripts, where a second
            start may be a mistake.
        records: Where the task's log is kept; by default beside the data.
        notice: Returns a listener for being told to leave.
        mark_preempted: Records that the run leaves: which task, by which signal. Must not raise.
    """

    store: ObjectStore
    asset: tuple[str, ...]
    partition_key: str | None
    claim: Claim
    owner: Owner
    now: Callable[[], datetime]
    fingerprint: str | None = None
    progress: Callable[[dict[str, Any]], None] = lambda _fields: None
    fenced: Callable[[], str | None] = lambda: None
    watch: Callable[[str, int, str], None] = lambda _prefix, _generation, _task: None
    unwatch: Callable[[str], None] = lambda _prefix: None
    expect: Callable[[str, float | None], None] = lambda _task, _limit: None
    relax: Callable[[str], None] = lambda _task: None
    displaces_live: bool = True
    records: RecordStore = field(default=cast("RecordStore", None))
    notice: Callable[[], Notice] = Notice
    mark_preempted: Callable[[str, str], None] = lambda _task, _signal: None
    sleep: Callable[[float], None] = time.sleep
    boottime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    _held: Entry | None = field(default=None, init=False)
    _read_at: float = field(default=0.0, init=False)
    _generation: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.records = self.records or ObjectRecords(self.store)
        self.prefix = keys.task_prefix(self.asset, self.partition_key, "log")
        self.log = NumberedLog(self.records, self.prefix)

    def __str__(self) -> str:
        name = "/".join(self.asset)
        return name if self.partition_key is None else f"{name}[{self.partition_key}]"

    # ---- reading

    def head(self) -> Entry | None:
        """Return the task's current state, None where it was never begun."""
        return self.log.head()

    def committed_value(self, head: Entry | None) -> ValueRef | None:
        """Return the value in `head` if this series has committed one under the same fingerprint, else None."""
        if head is None or head.value is None or self.claim.series not in head.committed_by:
            return None
        return head.value if head.value.fingerprint == self.fingerprint else None

    @property
    def checkpoints(self) -> tuple[CheckpointRef, ...]:
        """Retained checkpoints that this try may resume from, oldest first. Needs the lease."""
        return self._lease().checkpoints

    @property
    def generation(self) -> int:
        """The fencing token of the lease that this try holds."""
        return self._lease().generation

    def data_prefix(self) -> str:
        """Return a prefix that no other write uses, for the objects of one value or checkpoint."""
        claim, state = self.claim, state_tag(self.records)
        name = keys.write_name(self._generation or 0, claim.attempt, claim.root, state)
        return f"{keys.task_prefix(self.asset, self.partition_key, 'data')}/{name}"

    def check_fenced(self) -> None:
        """Raise `FencedError` if the heartbeat process has read a fence of this run. Costs no request."""
        reason = self.fenced()
        if reason is not None:
            # A takeover of this one task is told in whole words; a fence is of the run.
            said = reason if "took over" in reason else f"run {self.claim.run_id} is fenced: {reason}"
            raise FencedError(f"{self}: {said.rstrip('.')}. Its writes are refused; stop here.")

    def report(self, **fields: Any) -> None:
        """Send iteration counters and metrics with the next heartbeat. Never raises, never blocks."""
        self.progress({"task": str(self), **fields})

    def expect_progress(self, hung_after: float | None) -> None:
        """Have it noticed where no report comes for too long: for so many seconds, or much longer than usual."""
        self.expect(str(self), hung_after)

    def relax_progress(self) -> None:
        """Expect no more reports."""
        self.relax(str(self))

    def preempted(self, signal: str) -> None:
        """Record that this process leaves, since it was told to by a signal. Never raises."""
        self.mark_preempted(str(self), signal)

    # ---- leased writers

    def acquire(self, wait: float | None = None) -> Entry:
        """Take the lease: begin a new generation that starts from the retained checkpoints.

        A lower attempt of the same lineage, a fenced run and a dead process lose the task at once. Another lineage's
        owner is watched: it loses the task when its heartbeat has stopped.

        Args:
            wait: Seconds to wait for a live owner of another lineage; None: not at all, but as long as it takes to tell
                whether it lives.

        Raises:
            TaskHeldError: A live owner of another lineage, named in the message, holds the task.
            FencedError: A newer attempt of this lineage was here, or this run is fenced.
        """
        deadline = None if wait is None else time.monotonic() + wait
        for _ in range(_CONFLICTS):
            head = self._free_head(deadline)
            entry = self._next(head, "acquire", acquisition(head, self.claim, self.owner, self.fingerprint))
            sent_at = self.boottime()
            # The LIST after the create: without it two owners of one generation occur, where a zombie's create meets a
            # number that was trimmed.
            if self.log.append(entry) and self.log.stands(entry):
                self._hold(entry, sent_at)
                self.watch(f"{self.prefix}/", entry.generation, str(self))
                return entry
        raise self._too_many_conflicts()

    def commit_checkpoint(self, step: int, manifest: StoredObject, keep: int) -> tuple[CheckpointRef, ...]:
        """Commit a checkpoint in one create.

        Args:
            step: Training steps done.
            manifest: The written manifest.
            keep: How many checkpoints to retain, at least 1.

        Returns:
            The checkpoints that dropped out: nothing refers to their objects any more.

        Raises:
            FencedError: A newer generation owns the task. The checkpoint is not, and will never be, visible.
        """
        before = self._lease().checkpoints
        new = CheckpointRef(step=step, manifest=manifest)

        def change(head: Entry) -> dict[str, Any]:
            return {"checkpoints": (*(c for c in head.checkpoints if c.step != step), new)[-max(keep, 1) :]}

        after = self._commit("checkpoint", change, lambda head: new in head.checkpoints).checkpoints
        return tuple(old for old in before if old not in after)

    def complete(self) -> None:
        """Mark the training of this series as done and free the lease."""
        lease = self._lease()

        def holds(head: Entry) -> bool:
            # "Done" is a fact about the series. A successor that resumes carries ours on under its own generation.
            freed = head.owner is None or head.generation > lease.generation
            return head.training_done and freed and (head.series, head.fingerprint) == (lease.series, lease.fingerprint)

        self.unwatch(f"{self.prefix}/")
        self._commit("complete", lambda _: {"training_done": True, "owner": None}, holds)
        self._held = None

    def release(self) -> None:
        """Free the lease and leave the state as it is, for the next try.

        A courtesy: without it the lease ends by its time. So it does not wait for a store that is down.
        """
        if self._held is None:
            return
        self.unwatch(f"{self.prefix}/")
        patient, self.log = self.log, NumberedLog(hasty(self.records, _COURTESY_SECONDS), self.prefix)
        try:
            self._commit("release", lambda _: {"owner": None}, lambda head: head.owner is None)
        finally:
            self.log = patient
        self._held = None

    # ---- lease-less writers

    def commit_value(self, manifest: ManifestRef, location: str | None = None) -> Entry:
        """Commit a materialization, whether or not a lease was held before.

        Args:
            manifest: The manifest, or the name of one that is written.
            location: The `data_prefix` of its objects; None: where the named manifest lies.

        Raises:
            FencedError: This run is fenced, or a newer attempt or generation was here. The value is not visible.
        """
        value = ValueRef(
            manifest=manifest,
            location=location or (manifest.key.rpartition("/")[0] if isinstance(manifest, StoredObject) else ""),
            series=self.claim.series,
            run_id=self.claim.run_id,
            attempt=self.claim.attempt,
            fingerprint=self.fingerprint,
        )
        for _ in range(_CONFLICTS):
            head = self.log.head(prove_absence=False)
            if head is not None and head.value is not None and head.value.to_bytes() == value.to_bytes():
                # It landed, whatever an earlier reply said: to call that "fenced" would be false.
                return head
            self._admit(head)
            others = tuple(s for s in (head.committed_by if head else ()) if s != self.claim.series)
            committed_by = (*others, self.claim.series)[-_SERIES_KEPT:]
            entry = self._next(head, "value", {"value": value, "committed_by": committed_by})
            if self.log.append(entry) and self.log.stands(entry):
                self._trim_sometimes(entry)
                return entry
        raise self._too_many_conflicts()

    # ---- the rules

    def _admitted_head(self) -> Entry | None:
        head = self.log.head(prove_absence=False)
        self._admit(head)
        return head

    def _admit(self, head: Entry | None) -> None:
        """Check the fence *after* the head was read: the other order loses a value to a run fenced in between."""
        self._refuse_superseded(head)
        fence = read_fence(self.records, self.claim.run_id)
        if fence is not None:
            raise FencedError(
                f"{self}: run {self.claim.run_id} is fenced: {fence.reason} Its writes are refused; stop here."
            )

    def _refuse_superseded(self, head: Entry | None) -> None:
        """A lower attempt of a lineage never follows a higher one, also where another lineage came in between."""
        if head is None:
            return
        newest = head.attempts.get(self.claim.root, 0)
        if newest > self.claim.attempt:
            raise FencedError(
                f"{self}: try {self.claim.attempt} of run group {self.claim.root} was superseded by try {newest}; stop "
                "here."
            )
        if self._generation is not None and head.generation > self._generation:
            raise FencedError(f"{self}: generation {self._generation} was superseded by {head.generation}; stop here.")

    def _free_head(self, deadline: float | None) -> Entry | None:
        """Read the head until the task may be taken. Ends: a watched owner is seen to move, or counts as lost."""
        watch: OwnerWatch | None = None
        while True:
            head = self._admitted_head()
            holder = head.owner if head is not None else None
            if holder is None or holder.process == self.owner.process or self._may_displace(holder):
                return head
            if watch is None or watch.owner != holder:
                watch = OwnerWatch(self.store, holder, self.now)
            verdict = watch.look()
            if verdict is Verdict.DEAD:
                return head
            if verdict is Verdict.ALIVE and (deadline is None or time.monotonic() >= deadline):
                raise TaskHeldError(
                    f"{self} is held by try {holder.attempt} of run {holder.run_id} (process {holder.pid} on "
                    f"{holder.host}), which is alive. Wait for it, or end it."
                )
            self.sleep(max(0.05, holder.interval / 4))

    def _may_displace(self, holder: Owner) -> bool:
        same_lineage = holder.root == self.claim.root and holder.attempt < self.claim.attempt
        fenced = read_fence(self.records, holder.run_id) is not None
        return fenced or local_verdict(holder) is Verdict.DEAD or (same_lineage and self.displaces_live)

    def _commit(self, kind: Kind, change: Callable[[Entry], dict[str, Any]], holds: Callable[[Entry], bool]) -> Entry:
        parent = self._lease()
        for _ in range(_CONFLICTS):
            entry = self._next(parent, kind, change(parent))
            sent_at = self.boottime()
            if self._append(entry):
                self._hold(entry, sent_at)
                self._trim_sometimes(entry)
                return entry
            head = self.log.head()
            if head is not None and holds(head):
                # It landed, whatever the reply said, and the head carries it on: to call that "fenced" would be false.
                # Only an entry of our own is built upon. Behind one of others, the next commit conflicts and is judged.
                if self._is_my_lease(head, entry) and head.kind not in _OF_OTHERS:
                    self._hold(head, sent_at)
                return head
            parent = self._rebased(head, entry)
        raise self._too_many_conflicts()

    def _is_my_lease(self, head: Entry | None, mine: Entry) -> bool:
        return (
            head is not None
            and head.generation == mine.generation
            and (head.owner or self.owner).process == self.owner.process
        )

    def _rebased(self, head: Entry | None, mine: Entry) -> Entry:
        """Return the head to write behind: a value without a lease, or our own late entry, was there first."""
        if head is not None and self._is_my_lease(head, mine):
            # A value came in between. It may be our successor's, who needs no lease for it: then we are superseded.
            self._admit(head)
            return head
        self._held = None
        holder = head.owner if head else None
        by = f"run {holder.run_id} on {holder.host}" if holder else "a newer attempt"
        generation = head.generation if head else 0
        raise FencedError(
            f"{self}: {by} took the task over (generation {generation}, ours was {mine.generation}); stop here."
        )

    def _append(self, entry: Entry) -> bool:
        """Create an entry; True where it is known to be part of the history.

        Whatever else comes of it, the next create is looked at. One that we sent may have landed: unanswered, or
        refused by a stranger in its place. A successor built upon it, and it was trimmed: then its number is free
        again, and the first entry of the successor's generation, which is kept for ever, does not stand in the way.
        """
        read_at, self._read_at = self._read_at, -math.inf
        return self.log.append(entry) and (self.boottime() - read_at < _FRESH_SECONDS or self.log.stands(entry))

    def _next(self, head: Entry | None, kind: Kind, change: dict[str, Any]) -> Entry:
        return next_entry(head, kind, change, claim=self.claim, asset=self.asset, partition_key=self.partition_key)

    def _hold(self, entry: Entry, sent_at: float) -> None:
        """Keep what the next commit is built upon.

        Args:
            entry: The head, as far as we know.
            sent_at: A time at which no entry behind it existed yet: before the request that wrote or read it, not after
                the reply. A machine that sleeps in between must notice it.
        """
        self._held, self._generation, self._read_at = entry, entry.generation, sent_at

    def _lease(self) -> Entry:
        if self._held is None:
            raise OwnershipError(f"{self}: this process does not hold the task; acquire it first.")
        return self._held

    def _trim_sometimes(self, entry: Entry) -> None:
        if entry.n % _TRIM_EVERY == 0:
            self.log.trim(entry)

    def _too_many_conflicts(self) -> StoreUnavailableError:
        where = f"{self.records.url}/{self.prefix}"
        message = f"{self}: {_CONFLICTS} conflicting writes in a row under {where}; too many writers at once."
        return StoreUnavailableError(message, store=self.records.url, key=self.prefix)
