"""The folded index of an asset, on every kind of records: it saves reads, and is never believed against the logs."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dagster_resilient.errors import StoragePermissionError, StoreUnavailableError
from dagster_resilient.state import index as index_module
from dagster_resilient.state.index import FoldedIndex, Head, heads
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import CheckpointRef, Entry, ValueRef
from dagster_resilient.state.store import ObjectRecords, RecordStore
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Manifest, StoredObject
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore, open_store
from dagster_resilient.testing import Fault, FaultStore, Operation

ASSET = ("team", "flights")
INDEX, LOGS = keys.index_key(ASSET), f"{keys.asset_prefix(ASSET)}log/"
LONG = "x" * 300
PARTS = ["a", "a/b", "B", LONG, "ü", "", "2024-01-01"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index serves from two partitions on, and is folded after two reads."""
    monkeypatch.setattr(index_module, "FEW", 1)
    monkeypatch.setattr(index_module, "_MOVED", 1)
    monkeypatch.setattr(index_module, "_warned", set())


@pytest.fixture
def beside(records: RecordStore) -> ObjectStore:
    """Where the data is, and the index: the store of the records, or one beside the database."""
    return records._store if isinstance(records, ObjectRecords) else open_store(f"memory://{uuid.uuid4().hex}")


def value(mark: str) -> ValueRef:
    """A materialization with an inline manifest."""
    stored = StoredObject(key=f"data/{mark}", size=1, blake3=mark)
    manifest = Manifest(codec="document/1", objects={"document.json": stored}, meta={"limit": float("inf")})
    return ValueRef(manifest=manifest, location=f"data/{mark}", series="s", run_id="r", attempt=1)


def write(records: RecordStore, part: str | None, n: int, mark: str = "", **more: Any) -> Entry:
    """Write an entry of a partition's log as a run leaves it."""
    fields = {"kind": "value", "run_id": "run", "series": "s", "value": value(mark or str(n)), "committed_by": ("s",)}
    entry = Entry(**(fields | {"n": n, "op": f"{mark}{n}", "asset": ASSET, "partition_key": part} | more))
    assert log_of(records, part).append(entry)
    return entry


def log_of(records: RecordStore, part: str | None) -> NumberedLog:
    """The log of a partition."""
    return NumberedLog(records, keys.task_prefix(ASSET, part, "log"))


def write_all(records: RecordStore, n: int = 1, parts: list[str] = PARTS) -> None:
    """One entry in each log."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda part: write(records, part, n), parts))


class Watched:
    """Records that note which entries are read, and whose listing can be changed on its way."""

    def __init__(self, records: RecordStore) -> None:
        self._records, self.url = records, records.url
        self.read: list[str] = []
        self.lists: list[str] = []
        self.changed: Callable[[list[ObjectInfo]], list[ObjectInfo]] = lambda infos: infos
        self.changes_all = False
        self.before_get: Callable[[], None] = lambda: None

    def get(self, key: str, kind: type[Any]) -> Any:
        """Note it, and read."""
        self.read.append(key)
        self.before_get()
        return self._records.get(key, kind)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """List; as a rule the change is of the asset's listing alone, as if it had raced."""
        self.lists.append(prefix)
        found = self._records.list(prefix)
        return self.changed(found) if self.changes_all or prefix == LOGS else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)


@pytest.fixture
def watched(records: RecordStore) -> Watched:
    """The records, watched."""
    return Watched(records)


def numbers(found: dict[str, Head]) -> dict[str | None, int]:
    """The number of each head, by partition."""
    return {head.partition_key: head.n for head in found.values()}


def everything(found: dict[str, Head]) -> dict[str, Any]:
    """Heads without what depends on how they were found."""
    return {segment: head.model_dump(exclude={"listed"}) for segment, head in found.items()}


# ---- what it saves


def test_a_second_look_reads_no_entry(watched: Watched, beside: ObjectStore) -> None:
    """The first look reads each head and folds them; the second finds the same heads by one LIST."""
    write_all(watched)
    write(watched, "a", 2, kind="checkpoint", checkpoints=checkpoints(3, 7))
    first = heads(watched, beside, ASSET, PARTS)
    assert set(first) == {keys.partition_segment(part) for part in PARTS}
    assert first["a"].newest_step == 7
    watched.read, watched.lists = [], []
    assert heads(watched, beside, ASSET, PARTS) == first
    assert (watched.read, len(watched.lists)) == ([], 1)


def checkpoints(*steps: int) -> tuple[CheckpointRef, ...]:
    """Checkpoints after these steps."""
    manifest = StoredObject(key="data/x/manifest.json", size=1, blake3="x")
    return tuple(CheckpointRef(step=step, manifest=manifest) for step in steps)


def test_only_what_moved_is_read(watched: Watched, beside: ObjectStore) -> None:
    """A partition with a newer entry, and one that is new, are read; the others are not."""
    write_all(watched)
    heads(watched, beside, ASSET, PARTS)
    write(watched, LONG, 2)
    write(watched, "new", 1)
    watched.read = []
    found = heads(watched, beside, ASSET, [*PARTS, "new"])
    assert sorted(watched.read) == sorted([log_of(watched, LONG).key(2), log_of(watched, "new").key(1)])
    assert numbers(found) == {**dict.fromkeys(PARTS, 1), LONG: 2, "new": 1}


def test_few_changes_are_not_folded(watched: Watched, beside: ObjectStore) -> None:
    """One read is cheaper than to write the index; the same read again is, too."""
    write_all(watched)
    heads(watched, beside, ASSET, PARTS)
    folded = beside.get(INDEX)
    write(watched, "a", 2)
    for _ in range(2):
        watched.read = []
        heads(watched, beside, ASSET, PARTS)
        assert watched.read == [log_of(watched, "a").key(2)]
    assert beside.get(INDEX) == folded


def test_what_the_index_says_is_what_the_logs_say(records: RecordStore, beside: ObjectStore) -> None:
    """Folded or read, by one listing or one by one: every field is the same."""
    write_all(records)
    write(records, "a", 2, kind="checkpoint", checkpoints=checkpoints(3), value=None, committed_by=("s", "t"))
    read = heads(records, beside, ASSET, PARTS)
    folded = heads(records, beside, ASSET, PARTS)
    alone = {segment: head for part in PARTS for segment, head in heads(records, beside, ASSET, [part]).items()}
    assert everything(read) == everything(folded) == everything(alone)
    assert everything(heads(records, beside, ASSET)) == everything(read)


def test_few_partitions_pay_for_no_listing_of_all(watched: Watched, beside: ObjectStore) -> None:
    """A run over one partition of many lists that one's log, and reads no index."""
    write_all(watched)
    heads(watched, beside, ASSET, PARTS)
    counting, watched.lists = FaultStore(beside), []
    assert numbers(heads(watched, counting, ASSET, ["a"])) == {"a": 1}
    assert watched.lists == [f"{keys.task_prefix(ASSET, 'a', 'log')}/"]
    assert INDEX not in [operation.key for operation in counting.operations]


def test_what_is_not_wanted_is_not_read(watched: Watched, beside: ObjectStore) -> None:
    """Nor forgotten, where the index has it."""
    write_all(watched)
    heads(watched, beside, ASSET, PARTS)
    write_all(watched, 2)
    watched.read = []
    assert numbers(heads(watched, beside, ASSET, ["a", "B"])) == {"a": 2, "B": 2}
    assert len(watched.read) == 2
    assert folded_numbers(beside) == {**dict.fromkeys(PARTS, 1), "a": 2, "B": 2}


def folded_numbers(store: ObjectStore) -> dict[str | None, int]:
    """What the index in the store knows."""
    return numbers(index_module._Index(store, ASSET).load())


@pytest.mark.parametrize("absent", [1, 3], ids=["few", "many"])
def test_a_partition_that_was_never_begun_is_left_out(records: RecordStore, beside: ObjectStore, absent: int) -> None:
    """Whether absence is proven one by one or by a second listing; unpartitioned is not the empty key."""
    write_all(records)
    never = [None, "c", "d"][:absent]
    assert None not in numbers(heads(records, beside, ASSET, [*PARTS, *never]))
    assert numbers(heads(records, beside, ASSET, [*PARTS, *never])) == dict.fromkeys(PARTS, 1)
    assert heads(records, beside, ("other",), PARTS) == {}


@pytest.mark.parametrize("lost", [1, 3], ids=["few", "many"])
def test_a_listing_that_lacks_a_log_makes_no_partition_new(watched: Watched, beside: ObjectStore, lost: int) -> None:
    """Raced by deletes, a listing can come back without a log, known or unknown to the index: it is found anyway."""
    write_all(watched)
    raced: Iterator[int] = iter([lost])

    def lacking(infos: list[ObjectInfo]) -> list[ObjectInfo]:
        return infos[next(raced, 0) :]

    watched.changed = lacking
    assert numbers(heads(watched, beside, ASSET, PARTS)) == dict.fromkeys(PARTS, 1)
    assert set(folded_numbers(beside)) == set(PARTS)
    watched.changed = lambda infos: infos[lost:]
    assert numbers(heads(watched, beside, ASSET, PARTS)) == dict.fromkeys(PARTS, 1)


# ---- what contradicts it


def test_a_listing_older_than_the_index_is_not_believed(watched: Watched, beside: ObjectStore) -> None:
    """It lacks the newest entry of a log that the index has seen: the log itself is asked."""
    write_all(watched)
    write(watched, "a", 2)
    heads(watched, beside, ASSET, PARTS)
    watched.changed = lambda infos: [info for info in infos if info.key != log_of(watched, "a").key(2)]
    assert numbers(heads(watched, beside, ASSET, PARTS))["a"] == 2
    write(watched, "a", 3)
    watched.changed = lambda infos: [info for info in infos if info.key <= log_of(watched, "a").key(1)]
    assert numbers(heads(watched, beside, ASSET, ["a", "B"]))["a"] == 3


def test_a_store_that_lists_what_is_not_newest_is_found_out(store: ObjectStore) -> None:
    """One stale listing of the asset, by a store that keeps its listings in a cache: what the index has seen stands."""
    records = ObjectRecords(store)
    write_all(records)
    write(records, "a", 2)
    heads(records, store, ASSET, PARTS)

    def plan(_: int, operation: Operation) -> Fault | None:
        whole = operation == Operation("list", LOGS)
        return Fault("stale_list", lacks=3) if whole else None

    stale = FaultStore(store, plan)
    assert numbers(heads(ObjectRecords(stale), stale, ASSET, PARTS)) == {**dict.fromkeys(PARTS, 1), "a": 2}


def test_a_zombies_entry_behind_the_head_is_no_head(watched: Watched, beside: ObjectStore) -> None:
    """Where a number was trimmed a zombie creates it anew. Not even a listing that lacks the true head makes it one."""
    write_all(watched)
    write(watched, "a", 2)
    heads(watched, beside, ASSET, PARTS)
    for n in (3, 4):
        write(watched, "a", n)
    watched.delete([log_of(watched, "a").key(2)])
    write(watched, "a", 2, "zombie")
    assert heads(watched, beside, ASSET, PARTS)["a"].op == "4"
    newer = [log_of(watched, "a").key(n) for n in (3, 4)]
    watched.changed = lambda infos: [info for info in infos if info.key not in newer]
    assert heads(watched, beside, ASSET, PARTS)["a"].op == "4"


def test_a_head_that_is_trimmed_between_list_and_get_is_looked_for_again(watched: Watched, beside: ObjectStore) -> None:
    """A faster writer appends, and trims what was the head in the listing."""
    write_all(watched)
    heads(watched, beside, ASSET, PARTS)
    write(watched, "a", 2)

    def move_on() -> None:
        watched.before_get = lambda: None
        write(watched, "a", 3)
        watched.delete([log_of(watched, "a").key(2)])

    watched.before_get = move_on
    assert numbers(heads(watched, beside, ASSET, ["a", "B"])) == {"a": 3, "B": 1}


def test_a_log_that_was_deleted_and_begun_anew_is_read(watched: Watched, beside: ObjectStore) -> None:
    """It has the same number again, of another size. The index is folded anew: the error would cost at each look."""
    write_all(watched)
    heads(watched, beside, ASSET, PARTS)
    watched.delete([log_of(watched, "a").key(1)])
    assert set(numbers(heads(watched, beside, ASSET, PARTS))) == {*PARTS} - {"a"}
    assert "a" not in folded_numbers(beside)
    watched.delete([log_of(watched, "B").key(1)])
    write(watched, "B", 1, "anew")
    assert heads(watched, beside, ASSET, ["a", "B"])[keys.partition_segment("B")].op == "anew1"
    watched.read = []
    heads(watched, beside, ASSET, ["B", "ü"])
    assert watched.read == []


def test_an_entry_with_another_time_is_read_and_recognised(watched: Watched, beside: ObjectStore) -> None:
    """A store that was copied has other times for the same entries: one read each, and no second look at the log."""
    write_all(watched)
    heads(watched, beside, ASSET, PARTS)
    watched.changed = lambda infos: [ObjectInfo(i.key, i.size, i.last_modified.replace(year=2001)) for i in infos]
    watched.read, watched.lists = [], []
    assert numbers(heads(watched, beside, ASSET, PARTS)) == dict.fromkeys(PARTS, 1)
    assert (len(watched.read), len(watched.lists)) == (len(PARTS), 1)
    watched.read = []
    heads(watched, beside, ASSET, PARTS)
    assert watched.read == []


def test_a_log_that_contradicts_its_listing_for_ever_is_an_error(watched: Watched, beside: ObjectStore) -> None:
    """Never a guess: entry 1 says that the log was begun, and no listing shows it."""
    write_all(watched)
    watched.changed = lambda infos: [info for info in infos if not info.key.startswith(f"{LOGS}a/")]
    watched.changes_all = True
    with pytest.raises(StoreUnavailableError, match="contradicts"):
        heads(watched, beside, ASSET, PARTS)


# ---- the index itself


def damaged(good: bytes) -> list[bytes]:
    """Indexes that are none."""
    whole = json.loads(good)
    foreign = FoldedIndex(asset=("other",), packed=whole["packed"]).to_bytes()
    rows = {"a": {"n": "many"}}
    wrong = FoldedIndex(asset=ASSET, packed=index_module._packed({}).replace("=", "")).to_bytes()
    flipped = good[:-40] + bytes([good[-40] ^ 1]) + good[-39:]
    return [b"", good[: len(good) // 2], flipped, foreign, wrong, json.dumps(rows).encode(), b"\xff\x00"]


@pytest.mark.parametrize("kind", range(7))
def test_a_damaged_index_costs_reads_and_one_warning(
    watched: Watched, beside: ObjectStore, caplog: pytest.LogCaptureFixture, kind: int
) -> None:
    """Torn, flipped, of another asset, or something else: each log is read, and the index is written anew."""
    write_all(watched)
    found = heads(watched, beside, ASSET, PARTS)
    bad = damaged(beside.get(INDEX))[kind]
    for _ in range(2):
        beside.put(INDEX, bad)
        assert heads(watched, beside, ASSET, PARTS) == found
    assert [INDEX in record.message for record in caplog.records] == [True]
    watched.read = []
    assert heads(watched, beside, ASSET, PARTS) == found
    assert watched.read == []


def test_an_index_of_a_newer_version_is_left_alone(
    watched: Watched, beside: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Two versions side by side would else undo each other's work at every plan."""
    write_all(watched)
    newer = FoldedIndex(asset=ASSET, packed="", schema_version=2).to_bytes()
    beside.put(INDEX, newer)
    for _ in range(2):
        assert numbers(heads(watched, beside, ASSET, PARTS)) == dict.fromkeys(PARTS, 1)
    assert beside.get(INDEX) == newer
    assert ["Upgrade" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_reader_without_the_right_to_the_index_reads_the_logs(
    watched: Watched, beside: ObjectStore, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    """A notebook with read access only gets its values, and one warning."""

    class Forbidding(FaultStore):
        def _run(self, verb_: str, key: str, *more: Any) -> Any:
            if (verb_, key) == (verb, INDEX):
                raise StoragePermissionError(f"No {verb} of {key}.")
            return super()._run(verb_, key, *more)

    write_all(watched)
    for _ in range(2):
        assert numbers(heads(watched, Forbidding(beside), ASSET, PARTS)) == dict.fromkeys(PARTS, 1)
    assert [f"No {verb}" in record.message for record in caplog.records] == [True]


def test_a_look_shows_what_stood_before_its_listing(store: ObjectStore) -> None:
    """A writer, and another plan that folds, come before the index is read, before the LIST, or before the GET."""
    records = ObjectRecords(store)
    write_all(records)
    heads(records, store, ASSET, PARTS)
    for moment, newest in enumerate([3, 5, 6]):
        n = 2 + 2 * moment
        write(records, "a", n)

        def plan(number: int, _: Operation, moment: int = moment, n: int = n) -> None:
            if number == moment:
                write_all(records, n + 1, ["a", "B", "ü"])
                heads(records, store, ASSET, PARTS)
                assert folded_numbers(store)["a"] == n + 1

        busy = FaultStore(store, plan)
        assert heads(ObjectRecords(busy), busy, ASSET, PARTS)["a"].n == newest
        assert busy.count("list") == 1, "an index that is newer than the listing looks like a race"
        assert folded_numbers(store)["a"] in {n, n + 1}
