"""Manifests: what is read is what was written, checked byte by byte, or an error."""

from __future__ import annotations

import json
import math
import uuid
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_resilient.errors import (
    ConfigurationError,
    IntegrityError,
    SchemaVersionError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage import manifest as manifests
from dagster_resilient.storage.manifest import (
    SCHEMA_VERSION,
    Manifest,
    Record,
    StoredObject,
    get_object,
    named_manifest,
    objects_present,
    put_object,
    read_manifest,
    write_manifest,
    write_objects,
)
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.testing import Fault, FaultStore

PARTS = {"part-0": [b"abc", bytearray(b"def")], "part-1": [], "weights": [memoryview(np.arange(4, dtype="f4"))]}


def write(store: ObjectStore, prefix: str, parts: Any, meta: Any = None) -> StoredObject:
    """Write objects and their manifest."""
    return write_manifest(store, prefix, write_objects(store, prefix, "test/1", parts, meta or {}))


@pytest.fixture
def memory() -> ObjectStore:
    """An empty store."""
    return open_store(f"memory://{uuid.uuid4().hex}")


def test_a_value_comes_back_through_its_manifest(store: ObjectStore) -> None:
    """Objects, sizes, codec and meta are what was given; the name of the manifest is all that is needed."""
    named = write(store, "v/1", PARTS, {"shape": [2, 2], "none": None})
    manifest = read_manifest(store, named)
    assert (manifest.codec, manifest.meta) == ("test/1", {"shape": [2, 2], "none": None})
    loaded = {role: get_object(store, stored) for role, stored in manifest.objects.items()}
    assert loaded == {"part-0": b"abcdef", "part-1": b"", "weights": np.arange(4, dtype="f4").tobytes()}
    assert manifest.size == 22
    assert objects_present(store, named)


def test_the_manifest_is_written_last(memory: ObjectStore) -> None:
    """Each object is written and its size asked back before the manifest that lists it."""
    store = FaultStore(memory)
    write(store, "v/1", PARTS)
    keys = [operation.key for operation in store.operations]
    assert keys[-2:] == ["v/1/manifest.json"] * 2
    assert [operation.verb for operation in store.operations] == ["put", "head"] * 4


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("kind", ["fail", "torn", "lose_reply", "no_space"])
def test_a_write_that_breaks_off_names_nothing(memory: ObjectStore, number: int, kind: Any) -> None:
    """Whichever operation fails: the writer gets an error, and the version before loads as it was."""
    before = write(memory, "v/1", PARTS)
    with pytest.raises(OSError, match="Could not"):
        write(FaultStore(memory, {number: Fault(kind)}), "v/2", PARTS)
    assert get_object(memory, read_manifest(memory, before).objects["part-0"]) == b"abcdef"


@pytest.mark.parametrize(
    "damage",
    [b"abcdeF", b"abcde", b"abcdefg", b"", None],
    ids=["one bit", "one byte less", "one byte more", "empty", "gone"],
)
@pytest.mark.parametrize("what", ["object", "manifest"])
def test_damage_is_an_error_that_names_the_object(memory: ObjectStore, damage: bytes | None, what: str) -> None:
    """Nothing that differs by a single bit is ever returned; absent is damage too."""
    named = write(memory, "v/1", {"part-0": [b"abcdef"]})
    stored = read_manifest(memory, named).objects["part-0"]
    broken = stored if what == "object" else named
    if damage is None:
        memory.delete([broken.key])
    else:
        memory.put(broken.key, damage)
    with pytest.raises(IntegrityError, match=f"{memory.url}/{broken.key}"):
        get_object(memory, broken)


def test_presence_is_judged_by_names_and_sizes(memory: ObjectStore) -> None:
    """A missing or shortened object means "not present"; so does a missing or damaged manifest."""
    for n, key in enumerate(["part-0", "manifest.json"]):
        named = write(memory, f"v/{n}", PARTS)
        memory.put(f"v/{n}/{key}", b"abc")
        assert not objects_present(memory, named)
        memory.delete([f"v/{n}/{key}"])
        assert not objects_present(memory, named)


@pytest.mark.parametrize("error", [StoreUnavailableError, StoragePermissionError])
def test_a_store_that_does_not_answer_is_not_absence(memory: ObjectStore, error: type[Exception]) -> None:
    """Present or not: that is not answered by guessing, the error reaches the caller."""
    named = write(memory, "v/1", PARTS)

    def plan(number: int, operation: Any) -> None:
        raise error("no answer")

    for read in (objects_present, read_manifest):
        with pytest.raises(error):
            read(FaultStore(memory, plan), named)


def test_a_store_that_kept_less_than_was_written_is_found_out(memory: ObjectStore) -> None:
    """A write is believed only when the store shows the size that was written."""

    class Losing(FaultStore):
        def put(self, key: str, buffers: Any) -> None:
            super().put(key, b"".join(buffers)[:-1])

    with pytest.raises(IntegrityError, match=r"5 bytes after a write of 6"):
        put_object(Losing(memory), "a", [b"abc", b"def"])


@pytest.mark.parametrize("size", [1, 1000])
def test_a_store_that_kept_other_bytes_than_were_written_is_found_out(
    memory: ObjectStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """One bit flipped on the way is found by reading back, also in a large object; nothing names the object yet."""
    monkeypatch.setattr(manifests, "_BLOCK", 64)
    store = FaultStore(memory, {0: Fault("corrupt_write")})
    store.checks_bodies = False
    with pytest.raises(IntegrityError, match=rf"{memory.url}/a has other bytes .*Try again"):
        put_object(store, "a", bytes(size))
    assert put_object(store, "a", bytes(size)) == put_object(memory, "a", bytes(size))


def test_only_a_store_that_does_not_check_is_read_back(memory: ObjectStore) -> None:
    """Reading back costs as much as writing; who refuses a damaged body need not prove it."""
    for checks, verbs in ((True, ["put", "head"]), (False, ["put", "head", "get_ranges"])):
        store = FaultStore(memory)
        store.checks_bodies = checks
        put_object(store, "a", b"abc")
        assert [operation.verb for operation in store.operations] == verbs


def test_an_empty_object_needs_no_reading_back(memory: ObjectStore) -> None:
    """Its size says everything."""
    store = FaultStore(memory)
    store.checks_bodies = False
    assert put_object(store, "a", []).size == 0
    assert store.count("get_ranges") == 0


def test_an_object_may_not_take_the_name_of_the_manifest(memory: ObjectStore) -> None:
    """It would be overwritten; nothing is written."""
    with pytest.raises(ConfigurationError, match="test/1"):
        write(memory, "v/1", {"manifest.json": [b"1"]})
    assert list(memory.list("")) == []


# ---- records


class Sample(Record):
    """A record with a number of each kind."""

    name: str
    number: float = 0.0
    optional: int | None = None


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(), st.none() | st.integers())
def test_a_record_comes_back_equal(name: str, number: float, optional: int | None) -> None:
    """All text, and all floats: NaN and infinities stay numbers."""
    record = Sample(name=name, number=number, optional=optional)
    again = Sample.from_bytes(record.to_bytes(), "x")
    assert again.model_dump_json() == record.model_dump_json()
    assert again.number == number or (math.isnan(number) and math.isnan(again.number))


def test_numbers_that_are_not_finite_stay_numbers_in_free_json() -> None:
    """Where any JSON is allowed, NaN does not come back as a text."""
    manifest = Manifest(codec="test/1", objects={}, meta={"loss": math.nan, "best": -math.inf, "step": 3})
    meta = Manifest.from_bytes(manifest.to_bytes(), "x").meta
    assert math.isnan(meta["loss"])
    assert (meta["best"], meta["step"]) == (-math.inf, 3)


def test_a_record_cannot_be_changed() -> None:
    """A record that was read is what is stored."""
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Sample(name="a").name = "b"  # type: ignore[misc]


def test_a_newer_record_is_refused_not_interpreted(memory: ObjectStore) -> None:
    """It names both versions and the remedy, even where the record has fields this version does not know."""
    newer = json.dumps({"schema_version": SCHEMA_VERSION + 1, "name": "a", "later": 1}).encode()
    with pytest.raises(SchemaVersionError, match=rf"memory://x/k .*version {SCHEMA_VERSION + 1}.*Upgrade"):
        Sample.from_bytes(newer, "memory://x/k")


def test_a_value_of_a_newer_version_is_not_called_absent(memory: ObjectStore) -> None:
    """Else it would be computed again, over what the newer version keeps."""
    raw = Manifest(schema_version=SCHEMA_VERSION + 1, codec="c", objects={}).to_bytes()
    named = put_object(memory, "v/1/manifest.json", raw)
    with pytest.raises(SchemaVersionError):
        objects_present(memory, named)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\x80\x04K\x01.",
        b'{"name": 1}',
        b'{"schema_version": 1}',
        b'{"schema_version": "one", "name": "a"}',
        b'{"schema_version": null, "name": "a"}',
        b'{"schema_version": 1, "name": "a", "unknown": 1}',
    ],
)
def test_what_is_no_such_record_is_an_integrity_error(raw: bytes) -> None:
    """Torn, foreign, of another kind, a pickle: the message names the object and the kind that was expected."""
    with pytest.raises(IntegrityError, match=r"memory://x/k is not a valid Sample"):
        Sample.from_bytes(raw, "memory://x/k")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [(b'{"name": "a', "Invalid JSON: EOF while parsing"), (b"[]", "object"), (b'{"name": 1}', "seal")],
)
def test_the_reason_is_one_sentence_of_ours(raw: bytes, reason: str) -> None:
    """One line with a full stop: no class of pydantic's, no link to its manual, nothing of what was stored."""
    with pytest.raises(
        IntegrityError, match=rf"^memory://x/k is not a valid Sample: [^\n]*{reason}[^\n]*(?<!\.)\.$"
    ) as caught:
        Sample.from_bytes(raw, "memory://x/k")
    assert not [
        word for word in ("pydantic", "http", "validation error", "type=", "input") if word in f"{caught.value}"[13:]
    ]


def test_a_changed_record_is_refused() -> None:
    """One flipped bit in a value is found by the seal, where the JSON would still be valid."""
    raw = Sample(name="a", number=1.0).to_bytes()
    for changed in (raw.replace(b"1.0", b"3.0"), raw.replace(b'"a"', b'"b"'), b"{" + raw.split(b",", 1)[1]):
        with pytest.raises(IntegrityError, match=r"memory://x/k is not a valid Sample.*seal"):
            Sample.from_bytes(changed, "memory://x/k")


def test_a_small_manifest_stands_in_the_entry_and_a_large_one_is_named(memory: ObjectStore) -> None:
    """Both are read the same way; only the large one costs an object."""
    for size in (10, 10_000):
        prefix = f"v/{size}"
        manifest = write_objects(memory, prefix, "test/1", PARTS, {"text": "x" * size})
        named = named_manifest(memory, prefix, manifest)
        assert read_manifest(memory, named) == manifest
        assert objects_present(memory, named)
        names = {info.key.rsplit("/", 1)[1] for info in memory.list(prefix + "/")}
        assert names == {*PARTS} | ({"manifest.json"} if size > 4096 else set())


def test_a_stored_object_is_what_a_log_entry_names() -> None:
    """Key, size and digest, no more: everything else stands in the manifest."""
    assert set(StoredObject.model_fields) == {"schema_version", "key", "size", "blake3"}
