"""Objects in parts, and what killed writers left of them: temporary files, and uploads that were never completed."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import servers
from scripted_server import Reply, Request, error, scripted

from dagster_resilient.errors import ConfigurationError, StorageError, StoragePermissionError, StoreUnavailableError
from dagster_resilient.storage import uploads
from dagster_resilient.storage.object_store import Leftover, ObjectStore, open_store

MIB = 1024 * 1024


def test_parts_grow_with_the_object() -> None:
    """Never more than 10,000, all of one size, none smaller than 8 MiB."""
    for size in (0, 1, 8 * MIB, 80_000 * MIB, 80_000 * MIB + 1, 5 * MIB * MIB):
        part = uploads.part_size(size)
        assert part >= 8 * MIB
        assert -(-size // part) <= 10_000
    assert uploads.part_size(80_000 * MIB) == 8 * MIB


def test_larger_parts_are_fewer_at_once() -> None:
    """What is under way stays bounded where parts are very large; what the caller wants is never exceeded."""
    assert uploads.concurrency(8 * MIB, 12) == 12
    assert uploads.concurrency(8 * MIB, 1) == 1
    assert uploads.concurrency(256 * MIB, 12) == 2
    assert uploads.concurrency(1024 * MIB, 12) == 1


def test_a_large_buffer_is_cut_without_a_copy() -> None:
    """Pieces are views of the caller's memory, no larger than a part, in order."""
    buffer = bytearray(range(10))
    pieces = list(uploads.pieces([memoryview(buffer), memoryview(b"xy")], 4))
    assert [bytes(piece) for piece in pieces] == [b"\0\1\2\3", b"\4\5\6\7", b"\x08\x09", b"xy"]
    buffer[0] = 9
    assert pieces[0][0] == 9


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_parts_than_allowed_are_under_way(concurrency: int) -> None:
    """One large buffer goes as parts by so many connections at once, and no more."""
    lock, state = threading.Lock(), {"now": 0, "most": 0}
    full = threading.Event()

    def answer(request: Request) -> Reply:
        if request.method == "POST":
            return Reply(200, b"<R><UploadId>u</UploadId><ETag>e</ETag></R>")
        with lock:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
            if state["now"] == concurrency:
                full.set()
        full.wait(timeout=10)
        with lock:
            state["now"] -= 1
        return Reply(200, b"", {"ETag": '"e"'})

    with scripted(answer) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "s", "max_concurrency": concurrency}
        open_store("s3://bucket/root", options).put("a", bytes(6 * 8 * MIB))
    assert state["most"] == concurrency
    assert len([seen for seen in server.requests if seen.method == "PUT"]) == 6


@pytest.mark.s3
def test_many_parts_under_a_smaller_limit(s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 10 parts, 100 MB still fit: the parts are larger."""
    monkeypatch.setattr(uploads, "PARTS", 10)
    body = bytes(range(250)) * 400_000
    s3_store.put("large", body)
    assert s3_store.head("large").size == 100_000_000
    assert s3_store.get_ranges("large", [(99_999_990, 100_000_000)]) == [body[-10:]]


# ---- leftovers on S3


@pytest.mark.s3
def test_an_unfinished_upload_is_seen_under_its_own_prefix_only(
    s3_url: str, s3_options: dict[str, Any], s3_server: servers.SeaweedServer
) -> None:
    """A sibling whose name begins alike, the folder above, and objects that are there do not get mixed up.

    Once discarded, its writer cannot complete it any more; to discard it again is no error.
    """
    store, sibling = open_store(s3_url, s3_options), open_store(f"{s3_url}-sibling", s3_options)
    client, bucket = servers.client(s3_server), servers.BUCKET
    key = f"{s3_url.removeprefix(f's3://{bucket}/')}/data/large"
    store.put("data/there", b"1")
    begun = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    where = {"Bucket": bucket, "Key": key, "UploadId": begun}
    part = client.upload_part(**where, PartNumber=1, Body=b"x" * 100)
    assert list(sibling.leftovers()) == []
    (leftover,) = store.leftovers()
    assert begun in leftover.name
    assert leftover.last_modified.tzinfo is not None
    with pytest.raises(ConfigurationError, match="outside"):
        sibling.discard(leftover)
    store.discard(leftover)
    store.discard(leftover)
    assert list(store.leftovers()) == []
    with pytest.raises(client.exceptions.ClientError, match="NoSuchUpload"):
        client.complete_multipart_upload(**where, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]})
    assert [info.key for info in store.list("")] == ["data/there"]


@pytest.mark.s3
def test_a_finished_put_leaves_nothing(s3_store: ObjectStore) -> None:
    """An upload in parts that was completed is an object and no leftover."""
    s3_store.put("a", bytes(20_000_000))
    assert list(s3_store.leftovers()) == []


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the store works without it."""
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    store = open_store("s3://bucket", {"key": "k", "secret": "s"})
    with pytest.raises(ConfigurationError, match=r"needs boto3: pip install 'dagster-resilient\[aws\]'"):
        list(store.leftovers())


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "AccessDenied", StoragePermissionError),
        (400, "ExpiredToken", StoragePermissionError),
        (503, "SlowDown", StoreUnavailableError),
        (404, "NoSuchBucket", StorageError),
    ],
)
def test_failures_of_boto3_are_ours(status: int, code: str, expected: type[Exception]) -> None:
    """The error names the store and the code; what may pass is told from what stays."""
    with scripted(lambda _: error(status, code)) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "s"}
        store = open_store("s3://bucket/root", options).with_patience(0.0)  # type: ignore[attr-defined]
        with pytest.raises(expected, match=rf"s3://bucket/root: {code}") as caught:
            list(store.leftovers())
    assert type(caught.value) is expected


@pytest.mark.parametrize("name", ["no json", "[]", '["key"]', "{}"])
def test_what_names_no_upload_is_refused(name: str) -> None:
    """A leftover of another kind of store is no upload."""
    store = open_store("s3://bucket", {"key": "k", "secret": "s"})
    with pytest.raises(ConfigurationError, match="names no unfinished upload"):
        store.discard(Leftover(name, 0, datetime.now(UTC)))


# ---- leftovers in a directory


def test_temporary_files_are_listed_with_size_and_time_and_removed(local_url: str) -> None:
    """Wherever they lie; objects are none. A writer whose file is gone fails, and what was there before stays."""
    store = open_store(local_url)
    root = Path(local_url.removeprefix("file://"))
    store.put("a/b", b"1")
    (root / "a" / "part#123").write_bytes(b"half")
    (root / "beat.json#99").write_bytes(b"")
    found = {leftover.name: leftover for leftover in store.leftovers()}
    assert sorted(found) == ["a/part#123", "beat.json#99"]
    assert found["a/part#123"].size == 4
    assert found["a/part#123"].last_modified == datetime.fromtimestamp((root / "a" / "part#123").stat().st_mtime, UTC)
    for leftover in found.values():
        store.discard(leftover)
        store.discard(leftover)
    assert list(store.leftovers()) == []
    assert store.get("a/b") == b"1"


def test_a_writer_whose_temporary_file_was_discarded_fails(local_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets an error that names the object; the previous version stays."""
    store = open_store(local_url)
    store.put("a", b"before")
    replace = Path.replace

    def discarded_first(temporary: Path, target: Path) -> Path:
        for leftover in store.leftovers():
            store.discard(leftover)
        return replace(temporary, target)

    monkeypatch.setattr(Path, "replace", discarded_first)
    with pytest.raises(StorageError, match=f"{store.url}/a"):
        store.put("a", b"after")
    assert store.get("a") == b"before"


@pytest.mark.parametrize("name", ["a", "a/b", "../part#1", "/etc/part#1", "a/../../part#1", "./part#1"])
def test_only_temporary_files_below_the_root_are_discarded(local_url: str, name: str) -> None:
    """An object, or a file elsewhere, is refused."""
    with pytest.raises(ConfigurationError, match="no temporary file"):
        open_store(local_url).discard(Leftover(name, 0, datetime.now(UTC)))
