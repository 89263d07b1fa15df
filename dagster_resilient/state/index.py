"""The folded index of an asset: the heads of its partitions' logs in one object, so that a plan need not read each.

A LIST shows the number of each head, not what it says. The index is a cache of what they say. It is derived, so it is
one object that is overwritten, and the last writer wins: a lost, old or damaged index costs reads, never truth. What is
true is decided at every use by a LIST of the logs:

- An entry is written once, so a number and the time and size that the store lists for it identify what was read under
  it. A folded head is used only if the LIST shows that very entry as the highest of its log *now*.
- A zombie can create an entry anew where one was trimmed, but only far behind the head, so it is no highest number. In
  a listing that lacks the newer entries it could be: it then has a number that the index knows with another time.
- A listing that races with deletes can lack entries, or a whole log. Where it shows less than the index knows, the one
  log is asked by `NumberedLog.head`, which looks again. Entry 1 is kept for ever: it proves that a log was begun, and
  its absence that it was not, whatever was listed.
- A log that was deleted by hand and begun anew counts from 1 again. Its entries have other times than the folded ones.

The index is read before the LIST. In the other order one that another plan folds in between would be newer than the
LIST, and look like a race in each partition that moved.
"""

from __future__ import annotations

import base64
import logging
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import pydantic

from dagster_resilient.errors import (
    IntegrityError,
    ObjectNotFoundError,
    SchemaVersionError,
    StorageError,
    StoragePermissionError,
)
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import Entry, Kind, ValueRef
from dagster_resilient.state.store import RecordStore
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Record
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore
from dagster_resilient.storage.retry import hasty

T = TypeVar("T")

# Up to so many partitions are read one by one: a run over three must not pay for a listing of ten thousand.
FEW = 50
# So many reads are borne before the index is folded anew, and so many absent logs are proven absent one by one.
_MOVED = 100
_READERS = 16
# Nobody waits long for a cache to be written.
_PATIENCE = 5.0
_ENTRY = re.compile(r"(\d{10})\.json")

_log = logging.getLogger(__name__)
_warned: set[str] = set()


class Head(Record):
    """What a plan needs of the newest entry of a log.

    Attributes:
        n: Its number.
        op: Unique id of the operation that wrote it.
        kind: What the operation was.
        run_id: The run that wrote it.
        partition_key: In clear, also where the segment holds only a hash of it.
        series: The series that the checkpoints belong to.
        newest_step: Training step of the newest checkpoint, None without one.
        value: The current materialization.
        committed_by: Series that have committed a value, the latest last.
        listed: Time and size of the entry, as the store listed them; empty where it was not found by a listing.
    """

    n: int
    op: str
    kind: Kind
    run_id: str = ""
    partition_key: str | None = None
    series: str | None = None
    newest_step: int | None = None
    value: ValueRef | None = None
    committed_by: tuple[str, ...] = ()
    listed: str = ""


class FoldedIndex(Record):
    """The heads of an asset's logs as they once were.

    Attributes:
        asset: Parts of the asset key.
        packed: The heads by partition segment: JSON, compressed by zlib, in base 64. 10,000 take some 1.5 MB.
    """

    asset: tuple[str, ...]
    packed: str


# The outermost form decides how infinity is written: without this one a manifest's would come back as null.
_HEADS = pydantic.TypeAdapter(dict[str, Head], config=pydantic.ConfigDict(ser_json_inf_nan="constants"))


class _Newest(NamedTuple):
    """The highest number that a listing shows of a log, with time and size of that entry."""

    n: int
    listed: str


def heads(
    records: RecordStore, store: ObjectStore, asset: tuple[str, ...], partitions: Iterable[str | None] | None = None
) -> dict[str, Head]:
    """Return the heads of the logs of an asset, by partition segment. A log that was never begun is left out.

    Many partitions cost one LIST of the asset's logs, the index, and a GET for each head that is not in it. Few are
    read one by one.

    Args:
        records: Where the logs are kept.
        store: Where the data is kept, and the index.
        asset: Parts of the asset key.
        partitions: The partitions that matter; None: all.

    Raises:
        StorageError: The store does not answer, or its listings contradict its entries.
        IntegrityError: An entry is damaged, or a newer version of the library wrote it.
    """
    wanted = None if partitions is None else {keys.partition_segment(key) for key in partitions}
    if wanted is not None and len(wanted) <= FEW:
        prefix = _logs_prefix(asset)
        return _present(wanted, lambda segment: _summary(NumberedLog(records, f"{prefix}{segment}").head()))
    return _Survey(records, store, asset).heads(wanted)


def _logs_prefix(asset: tuple[str, ...]) -> str:
    return f"{keys.asset_prefix(asset)}log/"


def _present(segments: Collection[str], read: Callable[[str], T | None]) -> dict[str, T]:
    """Read several at a time; leave out what is absent."""
    with ThreadPoolExecutor(min(_READERS, max(len(segments), 1))) as pool:
        found = zip(segments, pool.map(read, segments), strict=True)
        return {segment: one for segment, one in found if one is not None}


def _summary(entry: Entry | None, newest: _Newest | None = None) -> Head | None:
    if entry is None:
        return None
    return Head(
        n=entry.n,
        op=entry.op,
        kind=entry.kind,
        run_id=entry.run_id,
        partition_key=entry.partition_key,
        series=entry.series,
        newest_step=entry.checkpoints[-1].step if entry.checkpoints else None,
        value=entry.value,
        committed_by=entry.committed_by,
        listed=newest.listed if newest is not None and newest.n == entry.n else "",
    )


class _Survey:
    """One look at all logs of an asset."""

    def __init__(self, records: RecordStore, store: ObjectStore, asset: tuple[str, ...]) -> None:
        self._records, self._prefix = records, _logs_prefix(asset)
        self._index = _Index(store, asset)
        self._known = self._index.load()
        self._newest = self._list()

    def heads(self, wanted: Collection[str] | None) -> dict[str, Head]:
        """Return the heads of the wanted logs, and fold the index anew where many had to be read."""
        segments = self._newest.keys() | self._known.keys() if wanted is None else set(wanted)
        doubtful = self._settle_absent(segments - self._newest.keys())
        listed = segments & self._newest.keys()
        kept = {segment: self._known[segment] for segment in listed if self._is_current(segment)}
        moved = sorted((listed - kept.keys()) | doubtful)
        read = _present(moved, self._read)
        self._fold(moved, read)
        return kept | read

    def _list(self) -> dict[str, _Newest]:
        newest: dict[str, _Newest] = {}
        for info in self._records.list(self._prefix):
            named = keys.decode_task_key(info.key)
            match = _ENTRY.fullmatch(named[3]) if named is not None else None
            if named is None or match is None:
                continue
            n, before = int(match[1]), newest.get(named[2])
            if before is None or before.n < n:
                newest[named[2]] = _Newest(n, _listed(info))
        return newest

    def _settle_absent(self, absent: set[str]) -> set[str]:
        """Return those of the logs that were not listed which must be asked whether they were begun.

        All, if they are not many. Most of a large asset may never have been begun, and a request for each is what the
        index is to save: then a second listing, at another moment, must lack them too.
        """
        if len(absent) <= _MOVED:
            return absent
        for segment, newest in self._list().items():
            self._newest[segment] = max(newest, self._newest.get(segment, newest))
        return {segment for segment in absent - self._newest.keys() if segment in self._known}

    def _is_current(self, segment: str) -> bool:
        known = self._known.get(segment)
        return known is not None and (known.n, known.listed) == self._newest[segment]

    def _read(self, segment: str) -> Head | None:
        log = NumberedLog(self._records, self._prefix + segment)
        newest, known = self._newest.get(segment), self._known.get(segment)
        if newest is None:
            return _summary(log.head() if log.get(1) is not None else None)
        # The entry can be gone again: trimmed by a faster writer between LIST and GET.
        entry = log.get(newest.n) if known is None or known.n <= newest.n else None
        if entry is None or (known is not None and known.n == entry.n and known.op != entry.op):
            entry = log.head()
        return _summary(entry, newest)

    def _fold(self, moved: Collection[str], read: dict[str, Head]) -> None:
        """Write what is known now. Not at each change: each reader bears the few reads that a fold would save."""
        wrong = any(self._is_refuted(segment, read.get(segment)) for segment in moved)
        if wrong or len(read) > max(_MOVED, len(self._newest) // 100):
            gone = set(moved) - read.keys()
            still = {segment: head for segment, head in self._known.items() if segment not in gone}
            self._index.save(still | read)

    def _is_refuted(self, segment: str, read: Head | None) -> bool:
        """Whether the log does not continue what the index knows. That would cost more than a read, at each use."""
        known = self._known.get(segment)
        if known is None or (read is not None and read.n > known.n):
            return False
        return read is None or (read.n, read.op) != (known.n, known.op)


def _listed(info: ObjectInfo) -> str:
    """An ETag would say more, but not every listing has it."""
    return f"{info.last_modified.isoformat()} {info.size}"


class _Index:
    """The object that holds an asset's folded index."""

    def __init__(self, store: ObjectStore, asset: tuple[str, ...]) -> None:
        self._store, self._asset = store, asset
        self._key = keys.index_key(asset)
        self._is_newer = False

    def load(self) -> dict[str, Head]:
        """Return what was folded; nothing where that cannot be read."""
        where = f"{self._store.url}/{self._key}"
        try:
            return self._heads(FoldedIndex.from_bytes(self._store.get(self._key), where), where)
        except ObjectNotFoundError:
            return {}
        except (IntegrityError, StoragePermissionError) as error:
            # Of two versions of the library, each would undo the other's work at every use.
            self._is_newer = isinstance(error, SchemaVersionError)
            self._warn("is not used, and every log is read instead", error)
            return {}

    def _heads(self, index: FoldedIndex, where: str) -> dict[str, Head]:
        if index.asset != self._asset:
            raise IntegrityError(f"{where} is the index of another asset, {'/'.join(index.asset)}.")
        try:
            return _HEADS.validate_json(zlib.decompress(base64.b64decode(index.packed, validate=True)))
        except (ValueError, zlib.error) as error:
            raise IntegrityError(f"{where} is not a valid index: {error}") from error

    def save(self, known: Mapping[str, Head]) -> None:
        """Overwrite the index. A reader who may not write goes on without."""
        if self._is_newer:
            return
        index = FoldedIndex(asset=self._asset, packed=_packed(known))
        try:
            hasty(self._store, _PATIENCE).put(self._key, index.to_bytes())
        except StorageError as error:
            self._warn("cannot be written, so what has changed is read at each use", error)

    def _warn(self, what: str, error: Exception) -> None:
        """Once in a process: a plan comes by every half minute."""
        message = f"The index {self._store.url}/{self._key} {what}"
        if message not in _warned:
            _warned.add(message)
            _log.warning("%s: %s", message, error)


def _packed(known: Mapping[str, Head]) -> str:
    raw = _HEADS.dump_json(dict(sorted(known.items())), exclude_defaults=True)
    return base64.b64encode(zlib.compress(raw)).decode()
