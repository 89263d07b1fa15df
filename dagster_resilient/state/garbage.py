"""Garbage: what no log refers to, and what no process can make a log refer to any more.

Age alone proves nothing: a writer that was stopped before its commit wakes after any grace. An unreferenced write is
garbage only where its writer can never commit it:

- a newer generation, or a newer try of its lineage, stands in the head that was read *after* the data was listed; or
- its run is fenced, and an entry was appended *after* the fence was there. A commit that looked for the fence before it
  existed meets that entry's number as taken, looks again, and is refused. (Without the entry it could still land.)

A run is fenced for this only where none of its processes has sent a heartbeat for the whole grace. What was referred to
until lately stays, since somebody may still be reading it. Objects whose names are not ours are never touched.
"""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from os import PathLike
from typing import Any, Literal

from dagster_resilient.errors import (
    ConfigurationError,
    IntegrityError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.state.beats import carries_heartbeats, list_beats, store_now
from dagster_resilient.state.fences import fence_run, read_fence
from dagster_resilient.state.hangs import list_hangs
from dagster_resilient.state.log import KEEP_FOR, NumberedLog
from dagster_resilient.state.records import Claim, Entry
from dagster_resilient.state.store import ObjectRecords, RecordStore, open_state, state_tag
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import ManifestRef, StoredObject, read_manifest
from dagster_resilient.storage.object_store import Leftover, ObjectInfo, ObjectStore, open_store
from dagster_resilient.storage.probe import PROBE_KEY

DEFAULT_GRACE = timedelta(days=1)
SHORTEST_GRACE = timedelta(hours=1)
COLLECTED = "collected"
_SEALS = 100
_WORKERS = 16
_READERS_GRACE = KEEP_FOR

Kind = Literal["write", "heartbeat", "probe", "leftover"]
Doubt = Literal[
    "young", "in use", "writer may live", "unknown name", "unreadable manifest", "unreadable log", "other state"
]


@dataclass(frozen=True)
class Garbage:
    """Something that can go.

    Attributes:
        kind: ``write`` (the objects of one value or checkpoint), ``heartbeat``, ``probe`` or ``leftover`` (a temporary
            file, an upload that was never completed).
        name: Key, or prefix of the keys.
        keys: The objects.
        size: Bytes.
        last_modified: By the store's clock.
        why: The proof, in words.
    """

    kind: Kind
    name: str
    keys: tuple[str, ...]
    size: int
    last_modified: datetime
    why: str


@dataclass
class GarbageReport:
    """What a collection found.

    Attributes:
        garbage: What can go, or went.
        kept: How many unreferenced writes and other candidates stay, by reason.
        dry_run: Whether nothing was changed.
    """

    garbage: list[Garbage] = field(default_factory=list)
    kept: dict[Doubt, int] = field(default_factory=lambda: defaultdict(int))
    dry_run: bool = True

    @property
    def size(self) -> int:
        """Bytes of all garbage."""
        return sum(one.size for one in self.garbage)

    @property
    def objects(self) -> int:
        """Number of objects of all garbage."""
        return sum(len(one.keys) or 1 for one in self.garbage)


def collect_garbage(
    url: str | PathLike[str] | ObjectStore,
    *,
    storage_options: Mapping[str, Any] | None = None,
    state_url: str | None = None,
    grace: timedelta = DEFAULT_GRACE,
    dry_run: bool = True,
) -> GarbageReport:
    """Find, and on demand delete, what nothing refers to and nobody can refer to any more.

    Safe beside live runs. Deleted are: objects of writes that were never committed, or whose value or checkpoint was
    replaced; heartbeats, and marks of hangs, of processes that died; temporary files and uploads that killed writers
    left. Never: logs, fences, tries, verdicts, the index, and whatever has a name that this library does not give.

    Args:
        url: The store; see `open_store`.
        storage_options: See `open_store`.
        state_url: The database that keeps the state, where there is one.
        grace: Nothing younger goes, by the store's clock. At least an hour.
        dry_run: Only tell what would go.

    Raises:
        ConfigurationError: The grace is too short, or the store cannot be opened.
        StorageError: The store refuses or does not answer. What was deleted until then is gone; run it again.
    """
    if not isinstance(grace, timedelta) or not isinstance(dry_run, bool):
        raise ConfigurationError(f"grace={grace!r}, dry_run={dry_run!r}: give a timedelta, and True or False.")
    store = url if isinstance(url, ObjectStore) else open_store(url, storage_options)
    return Collector(store, open_state(state_url, store), grace=grace, dry_run=dry_run).run()


class Collector:
    """One collection over one store.

    Args:
        store: Where data and heartbeats are.
        records: Where state is; by default in the store.
        grace: Nothing younger goes, by the store's clock. At least an hour.
        now: The store's clock.
        workers: Tasks that are judged at a time.
        dry_run: Whether only to tell. A dry run writes nothing but the probe that asks for the time; where a run would
            have to be fenced first, it says so.

    Raises:
        ConfigurationError: The grace is too short.
    """

    def __init__(
        self,
        store: ObjectStore,
        records: RecordStore | None = None,
        *,
        grace: timedelta = DEFAULT_GRACE,
        dry_run: bool = True,
        now: Callable[[], datetime] | None = None,
        workers: int = _WORKERS,
    ) -> None:
        if grace < SHORTEST_GRACE:
            raise ConfigurationError(f"A grace of {grace} is too short: readers and writers need {SHORTEST_GRACE}.")
        self._store = store
        self._records: RecordStore = records or ObjectRecords(store)
        self._grace = grace
        self._dry_run = dry_run
        self._workers = workers
        # The time before everything else is read: all ages come out too young rather than too old.
        self._now = now() if now else _time_of(store)
        self._state = state_tag(self._records)
        self._beating = self._beating_runs()
        self.report = GarbageReport(dry_run=dry_run)
        self._counting = threading.Lock()

    def run(self) -> GarbageReport:
        """Find, and unless it is a dry run delete, all garbage."""
        writes = self._writes()
        if self._workers > 1:
            with ThreadPoolExecutor(self._workers) as pool:
                list(pool.map(lambda task: self._collect_task(*task), writes.items()))
        else:
            for task in writes.items():
                self._collect_task(*task)
        self._take(self._old_heartbeats())
        self._take(self._old_probes())
        for leftover in self._store.leftovers():
            self._collect_leftover(leftover)
        return self.report

    def _old(self, last_modified: datetime) -> bool:
        return self._now - last_modified >= self._grace

    def _take(self, garbage: Iterable[Garbage]) -> None:
        found = list(garbage)
        if not self._dry_run:
            self._store.delete([key for one in found for key in one.keys])
        self.report.garbage.extend(found)

    def _keep(self, why: Doubt, count: int) -> None:
        if count:
            with self._counting:
                self.report.kept[why] += count

    # ---- writes

    def _writes(self) -> dict[tuple[str, str], dict[str, list[ObjectInfo]]]:
        """Return the writes of each task, by asset and partition segment and by the name of the write."""
        found: dict[tuple[str, str], dict[str, list[ObjectInfo]]] = {}
        for info in self._store.list("tasks/"):
            named = keys.decode_task_key(info.key)
            if named is not None and named[1] == "data":
                asset, _, partition, rest = named
                found.setdefault((asset, partition), {}).setdefault(rest.split("/", 1)[0], []).append(info)
        return found

    def _collect_task(self, task: tuple[str, str], writes: dict[str, list[ObjectInfo]]) -> None:
        """Judge the writes of one task. One damaged log keeps its own data, and nobody else's."""
        ours = {name: infos for name, infos in writes.items() if self._is_of_this_state(name)}
        self._keep("other state", len(writes) - len(ours))
        old = {name: infos for name, infos in ours.items() if all(self._old(info.last_modified) for info in infos)}
        self._keep("young", len(ours) - len(old))
        try:
            self._collect_old(task, old)
        except IntegrityError:
            self._keep("unreadable log", len(old))

    def _is_of_this_state(self, name: str) -> bool:
        """Writes whose state is kept elsewhere cannot be judged by this one's numbers."""
        parsed = keys.decode_write_name(name)
        return parsed is None or parsed[0] == self._state

    def _collect_old(self, task: tuple[str, str], old: dict[str, list[ObjectInfo]]) -> None:
        """Judge the old writes of one task. Its log is read after its data was listed, never before."""
        log = NumberedLog(self._records, f"tasks/{task[0]}/log/{task[1]}")
        head = log.head() if old else None
        if head is None:
            self._keep("writer may live", len(old))
            return
        prefix = f"tasks/{task[0]}/data/{task[1]}"
        certain, doubtful = self._sorted(prefix, old, self._referred(log, head), head)
        self._take(_garbage(prefix, name, old[name], "superseded by a newer try") for name in certain)
        fenced = [name for name in doubtful if self._is_fenced(name)]
        self._keep("writer may live", len(doubtful) - len(fenced))
        if fenced:
            self._collect_fenced(log, prefix, {name: old[name] for name in fenced})

    def _collect_fenced(self, log: NumberedLog, prefix: str, writes: dict[str, list[ObjectInfo]]) -> None:
        """Writes of fenced runs: from the entry behind the fence on, nothing of them can be committed."""
        head = log.head() if self._dry_run else _sealed(log)
        assert head is not None
        referred = self._referred(log, head)
        free = [name for name in writes if referred is not None and f"{prefix}/{name}" not in referred]
        self._keep("in use", len(writes) - len(free))
        why = "silent for the whole grace; its run would be fenced first" if self._dry_run else "its run is fenced"
        self._take(_garbage(prefix, name, writes[name], why) for name in free)

    def _sorted(
        self, prefix: str, writes: dict[str, list[ObjectInfo]], referred: set[str] | None, head: Entry
    ) -> tuple[list[str], list[str]]:
        """Return the names of writes that are superseded for certain, and of those that need a fence."""
        certain: list[str] = []
        doubtful: list[str] = []
        for name in writes:
            parsed = keys.decode_write_name(name)
            if parsed is None:
                self._keep("unknown name", 1)
            elif referred is None:
                self._keep("unreadable manifest", 1)
            elif f"{prefix}/{name}" in referred:
                self._keep("in use", 1)
            else:
                (certain if _superseded(head, *parsed[1:]) else doubtful).append(name)
        return certain, doubtful

    def _referred(self, log: NumberedLog, head: Entry) -> set[str] | None:
        """Return the prefixes of the writes that the head, or an entry superseded lately, refers to.

        None where a manifest cannot be read: then nothing of the task is judged.
        """
        times = log.numbers()
        lately = [n for n in times if n + 1 in times and self._now - times[n + 1] < _READERS_GRACE]
        entries = [head, *(entry for n in lately if (entry := log.get(n)) is not None)]
        manifests: list[ManifestRef] = [ref.manifest for entry in entries for ref in entry.checkpoints]
        manifests += [entry.value.manifest for entry in entries if entry.value is not None]
        prefixes = {entry.value.location for entry in entries if entry.value is not None}
        try:
            for manifest in manifests:
                prefixes |= {_write_prefix(key) for key in self._keys(manifest)}
        except IntegrityError:
            return None
        return prefixes

    def _keys(self, manifest: ManifestRef) -> Iterator[str]:
        if isinstance(manifest, StoredObject):
            yield manifest.key
        for stored in read_manifest(self._store, manifest).objects.values():
            yield stored.key

    # ---- fences

    def _is_fenced(self, name: str) -> bool:
        """Whether the run of a write is fenced. A run that has been silent for the whole grace is fenced for it."""
        parsed = keys.decode_write_name(name)
        assert parsed is not None
        claim = self._records.get(keys.claim_key(parsed[3], parsed[2]), Claim)
        if claim is None:
            return False
        if read_fence(self._records, claim.run_id) is not None:
            return True
        if self._beating is None or claim.run_id in self._beating:
            return False
        if not self._dry_run:
            reason = f"No process of it has sent a heartbeat for {self._grace}; its unused objects were collected."
            fence_run(self._records, claim.run_id, reason=reason, failure_class=COLLECTED, by="gc")
        return True

    def _beating_runs(self) -> set[str] | None:
        """Return the runs with a heartbeat younger than the grace; None where the store carries no heartbeats."""
        if not carries_heartbeats(self._store):
            return None
        return {beat.run_id for beat in list_beats(self._store) if not self._old(beat.last_modified)}

    # ---- the rest

    def _old_heartbeats(self) -> Iterator[Garbage]:
        """Those of processes that could not say goodbye. A live one writes its own anew at the next interval.

        So go marks of hangs: an observer would have acted on them long ago.
        """
        for beat in list_beats(self._store):
            if self._old(beat.last_modified):
                yield Garbage("heartbeat", beat.key, (beat.key,), 0, beat.last_modified, "silent for the whole grace")
        for hang in list_hangs(self._store):
            if self._old(hang.last_modified):
                yield Garbage("heartbeat", hang.key, (hang.key,), 0, hang.last_modified, "marked for the whole grace")

    def _old_probes(self) -> Iterator[Garbage]:
        for info in self._store.list("probes/"):
            if info.key != PROBE_KEY and self._old(info.last_modified):
                yield Garbage("probe", info.key, (info.key,), info.size, info.last_modified, "its asker is gone")

    def _collect_leftover(self, leftover: Leftover) -> None:
        if not self._old(leftover.last_modified):
            self._keep("young", 1)
            return
        if not self._dry_run:
            self._store.discard(leftover)
        why = "never completed, and no key names it"
        self.report.garbage.append(Garbage("leftover", leftover.name, (), leftover.size, leftover.last_modified, why))


def _time_of(store: ObjectStore) -> datetime:
    """Return the store's time. Where it is too full to be asked, the time of its newest object: not later than now."""
    try:
        return store_now(store, "gc")
    except (StoreUnavailableError, StoragePermissionError):
        raise
    except StorageError:
        times = [info.last_modified for info in store.list("")]
        if not times:
            raise
        return max(times)


def _superseded(head: Entry, generation: int, attempt: int, root: str) -> bool:
    """Whether the head proves that this try can commit nothing more in this log."""
    if 0 < generation < head.generation:
        return True
    return any(attempt < newest and keys.encode_segment(name) == root for name, newest in head.attempts.items())


def _sealed(log: NumberedLog) -> Entry:
    """Append an entry that changes nothing, so that whoever read the log before must read it again."""
    for _ in range(_SEALS):
        head = log.head()
        assert head is not None
        update = {"n": head.n + 1, "op": uuid.uuid4().hex, "parent_op": head.op, "kind": "collect", "run_id": "gc"}
        entry = head.model_copy(update=update)
        if log.append(entry) and log.stands(entry):
            return entry
    raise StoreUnavailableError(f"{log.key(0)}: {_SEALS} conflicting writes in a row; too many writers at once.")


def _garbage(prefix: str, name: str, infos: list[ObjectInfo], why: str) -> Garbage:
    newest = max(info.last_modified for info in infos)
    objects = tuple(info.key for info in infos)
    return Garbage("write", f"{prefix}/{name}", objects, sum(info.size for info in infos), newest, why)


def _write_prefix(key: str) -> str:
    """Return the prefix of the write that an object belongs to."""
    return "/".join(key.split("/")[:5])
