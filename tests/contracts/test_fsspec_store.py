"""Stores over fsspec: its traps, its errors, and what of it cannot hold a store. See test_object_store for the rest."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import servers
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage.fsspec_store import FsspecStore
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.storage.probe import require_create

RunPython = Callable[..., str]
CANARY = "canary-e7d1"


def names(store: ObjectStore, prefix: str = "") -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in store.list(prefix)]


class DiskFileSystem(LocalFileSystem):
    """One that is unknown and can rename, as an SMB share."""

    protocol = "disk"


class BlobFileSystem(MemoryFileSystem):
    """One that is unknown and uploads whole objects, as some object storage."""

    protocol = "blob"
    fault: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("blob://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        """Half of it, if so told."""
        body = super().cat_file(path, start, end, **options)
        return body[: len(body) // 2] if self.fault.get("short") else body

    def info(self, path: str, **options: Any) -> Any:
        """Without a time, if so told."""
        known = super().info(path, **options)
        return {name: known[name] for name in known if name != "created" or not self.fault.get("timeless")}

    def modified(self, path: str) -> Any:
        """It has no other way to tell."""
        raise NotImplementedError

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        """Fail, if so told."""
        if "listing" in self.fault:
            raise self.fault["listing"]
        return super().ls(path, detail, **options)


class StreamFileSystem(MemoryFileSystem):
    """One that can only write into a file that others see."""

    protocol = "stream"
    pipe_file = fsspec.AbstractFileSystem.pipe_file
    mv = fsspec.AbstractFileSystem.mv


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Let fsspec know them."""
    for one in (DiskFileSystem, BlobFileSystem, StreamFileSystem):
        fsspec.register_implementation(one.protocol, one, clobber=True)
    yield
    BlobFileSystem.fault.clear()


def bare(store: ObjectStore) -> FsspecStore:
    """The store inside the retries."""
    inner: FsspecStore = store._inner  # type: ignore[attr-defined]
    return inner


@pytest.fixture
def blob() -> FsspecStore:
    """A place in that object storage, without retries."""
    return bare(open_store(f"blob://{uuid.uuid4().hex}"))


@pytest.fixture
def disk(tmp_path: Path) -> ObjectStore:
    """A place on that share."""
    return open_store(f"disk://{tmp_path}/store")


# ---- other filesystems


@pytest.mark.parametrize("kind", ["disk", "blob"])
def test_another_filesystem_holds_data(kind: str, request: pytest.FixtureRequest) -> None:
    """Writes, reads, listings and deletes work with what fsspec says of any filesystem."""
    store = request.getfixturevalue(kind)
    store.put("a/b", [b"12", b"34"])
    store.put("a/b", b"0123")
    store.put("c", b"")
    assert (names(store), names(store, "a/")) == (["a/b", "c"], ["a/b"])
    assert (store.get("a/b"), store.get_ranges("a/b", [(1, 3), (0, 0)]), store.head("c").size) == (
        b"0123",
        [b"12", b""],
        0,
    )
    store.delete(["a/b", "a", "absent"])
    assert names(store) == ["c"]
    with pytest.raises(ObjectNotFoundError):
        store.get("a")


@pytest.mark.parametrize("kind", ["disk", "blob"])
def test_no_state_where_create_is_not_decided(kind: str, request: pytest.FixtureRequest) -> None:
    """To look first and then write is no create: the refusal names filesystem and way out. Nothing is written."""
    store = request.getfixturevalue(kind)
    for call in (lambda: store.create("a", b"1"), lambda: require_create(store)):
        with pytest.raises(ConfigurationError, match=f"{kind} does not decide it.*PostgreSQL or SQLite"):
            call()
    assert names(store) == []


def test_what_cannot_write_a_whole_object_is_refused() -> None:
    """Before anything is opened: neither a rename nor an upload means that others would read halves."""
    for url in ("stream://x", "zip://x", "http://127.0.0.1/x"):
        with pytest.raises(ConfigurationError, match="can hold no store"):
            open_store(url)


def test_a_filesystem_without_times_is_refused_by_name(blob: FsspecStore) -> None:
    """Nothing could be told old or new there."""
    blob.put("a", b"1")
    BlobFileSystem.fault["timeless"] = True
    with pytest.raises(ConfigurationError, match="blob does not tell when a came"):
        blob.head("a")


def test_options_that_a_filesystem_refuses_are_our_error() -> None:
    """The message names the filesystem, and shows no option."""
    store = open_store("fsspec+s3://b/p", {"key": "k", "username": CANARY})
    with pytest.raises(ConfigurationError, match="s3 refuses its options") as caught:
        store.get("a")
    assert CANARY not in f"{caught.value} {caught.value.__cause__} {store!r}"


def test_threads_do_not_share_what_is_made_for_one(disk: ObjectStore) -> None:
    """A filesystem that says nothing of threads is opened once in each; one that serves all, once."""
    for store, filesystems in ((bare(disk), 3), (bare(open_store("fsspec+memory://threads")), 1)):
        kept: list[Any] = []  # kept, else the number of one that is gone could be that of the next
        for _ in range(3):
            thread = threading.Thread(target=lambda s, k: k.append(s._fs), args=(store, kept))
            thread.start()
            thread.join()
        assert len({id(fs) for fs in kept}) == filesystems


# ---- traps


def test_a_short_body_is_an_error(blob: FsspecStore) -> None:
    """Fewer bytes than the object has are never returned, and asking again may help."""
    blob.put("a", b"0123456789")
    BlobFileSystem.fault["short"] = True
    with pytest.raises(StoreUnavailableError, match=r"blob://\w+/a: 5 of 10"):
        blob.get("a")
    with pytest.raises(StoreUnavailableError, match="short"):
        blob.get_ranges("a", [(0, 4)])


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(PermissionError("no"), StoragePermissionError), (TimeoutError("slow"), StoreUnavailableError)],
)
def test_a_listing_that_fails_is_never_empty(blob: FsspecStore, raised: Exception, kind: type[Exception]) -> None:
    """A walk by fsspec would leave out what it may not see."""
    blob.put("a/b", b"1")
    BlobFileSystem.fault["listing"] = raised
    with pytest.raises(kind, match="Could not list"):
        list(blob.list("a/"))


@pytest.mark.parametrize("scheme", ["fsspec+file", "disk"])
def test_a_write_that_fails_changes_nothing(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half of an object is ever seen, and no temporary file stays."""
    store = open_store(f"{scheme}://{tmp_path}/store")
    store.put("a", b"before")
    whole = LocalFileSystem.open

    def full(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        file = whole(self, path, mode, **options)
        file.write(b"half")
        file.write = lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        return file

    monkeypatch.setattr(LocalFileSystem, "open", full)
    with pytest.raises(StorageError, match=r"write .*/store/a: .*No space left"):
        store.put("a", b"after")
    monkeypatch.undo()
    assert store.get("a") == b"before"
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["a"]


def test_an_object_does_not_go_into_a_folder_of_its_name(tmp_path: Path) -> None:
    """A rename by fsspec would move it there, and call that success."""
    store = open_store(f"fsspec+file://{tmp_path}")
    store.put("a/b", b"1")
    with pytest.raises(StorageError, match="Could not write"):
        store.put("a", b"2")
    with pytest.raises(StorageError, match="Not a directory"):
        store.create("a/b/c", b"2")
    assert names(store) == ["a/b"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_delete_leaves_folders_alone(disk: ObjectStore, tmp_path: Path) -> None:
    """Some filesystems remove an empty folder where they are asked to remove a file."""
    disk.put("a/b", b"1")
    disk.delete(["a/b"])
    disk.delete(["a"])
    assert (tmp_path / "store" / "a").is_dir()


def test_links_are_followed(tmp_path: Path) -> None:
    """To files and to folders, as the native store does."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b").write_bytes(b"1")
    store = open_store(f"fsspec+file://{tmp_path}/store")
    store.put("x", b"2")
    (tmp_path / "store" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "store" / "file").symlink_to(tmp_path / "elsewhere" / "b")
    assert names(store) == ["file", "folder/b", "x"]
    assert store.get("folder/b") == store.get("file") == b"1"


def test_temporary_files_of_killed_writers_are_leftovers(tmp_path: Path) -> None:
    """No listing shows them, and they can be discarded."""
    store = bare(open_store(f"fsspec+file://{tmp_path}"))
    store.put("a/b", b"1")
    (tmp_path / "a" / "part#12").write_bytes(b"123")
    found = list(store.leftovers())
    assert ([left.name for left in found], found[0].size, found[0].last_modified.tzinfo is not None) == (
        ["a/part#12"],
        3,
        True,
    )
    store.discard(found[0])
    store.discard(found[0])
    assert list(store.leftovers()) == []
    assert names(store) == ["a/b"]
    assert list(bare(open_store("fsspec+memory://left")).leftovers()) == []


def test_one_directory_through_both_stores(tmp_path: Path) -> None:
    """The native one and that over fsspec show and refuse the same."""
    native, through = open_store(tmp_path), open_store(f"fsspec+file://{tmp_path}")
    native.create("a", b"1")
    through.create("b/c", b"2")
    assert names(native) == names(through) == ["a", "b/c"]
    for store in (native, through):
        for key in ("a", "b/c"):
            with pytest.raises(ObjectExistsError):
                store.create(key, b"other")
    assert dict(native.sidecar_config()) == dict(through.sidecar_config())


def test_a_store_that_no_heartbeat_process_can_open_says_so(blob: FsspecStore) -> None:
    """It has obstore, and no fsspec."""
    with pytest.raises(ConfigurationError, match=blob.url):
        blob.sidecar_config()


# ---- S3 through s3fs


@pytest.fixture
def s3fs_url(s3_url: str) -> str:
    """The same place through fsspec."""
    return f"fsspec+{s3_url}"


@pytest.mark.s3
def test_s3_through_both_stores(s3_url: str, s3fs_url: str, s3_options: dict[str, Any], run_python: RunPython) -> None:
    """What one, or another process, writes the other sees at once, however often it has looked before (G01)."""
    native, through = open_store(s3_url, s3_options), open_store(s3fs_url, s3_options)
    for n in range(3):
        assert names(through, "a/") == [f"a/{m}" for m in range(n)]
        with pytest.raises(ObjectNotFoundError):
            through.head(f"a/{n}")
        native.create(f"a/{n}", b"1")
        assert through.head(f"a/{n}").size == 1
    with pytest.raises(ObjectExistsError):
        through.create("a/0", b"2")
    code = "from dagster_resilient.storage.object_store import open_store; open_store(*given).create('a/3', b'3')"
    run_python(code, [s3fs_url, s3_options])
    assert names(through, "a/") == names(native, "a/") == ["a/0", "a/1", "a/2", "a/3"]
    assert dict(native.sidecar_config()) == dict(through.sidecar_config())


@pytest.mark.s3
def test_folder_markers_and_an_object_of_the_prefix_name(
    s3fs_url: str, s3_options: dict[str, Any], s3_url: str, s3_server: Any
) -> None:
    """Empty objects named like folders, and an object named like the prefix, are no part of a listing (G07)."""
    bucket, prefix = s3_url.removeprefix("s3://").split("/")
    store = open_store(s3fs_url, s3_options)
    store.put("ckpt/step-5/data", b"1")
    for key in ("ckpt/", "ckpt/step-5/", "ckpt/step-6/"):
        servers.client(s3_server).put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=b"")
    assert names(store) == names(store, "ckpt/") == ["ckpt/step-5/data"]
    store.delete(["ckpt", "ckpt/step-6"])
    assert names(store, "ckpt/step-6/") == []
    assert store.get("ckpt/step-5/data") == b"1"
    with pytest.raises(ConfigurationError, match="versionId"):
        store.put("a?versionId=1", b"1")


@pytest.mark.s3
def test_errors_of_s3fs_are_ours_and_show_no_secret(s3fs_url: str, s3_options: dict[str, Any]) -> None:
    """Wrong keys are "permission denied", no bucket is not "no object", and no reply is "unavailable"."""
    wrong = open_store(s3fs_url, {**s3_options, "secret": CANARY})
    missing = open_store("fsspec+s3://no-such-bucket/x", s3_options)
    once = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    silent = open_store(s3fs_url, {**s3_options, **once})
    bare(silent)._fs.retries = 1  # of s3fs itself
    shown = []
    for store, kind, calls in (
        (wrong, StoragePermissionError, [lambda s: s.get("a"), lambda s: s.put("a", b"1"), names]),
        (missing, StorageError, [lambda s: s.put("a", b"1"), names, lambda s: s.create("a", b"1")]),
        (bare(silent), StoreUnavailableError, [lambda s: s.get("a")]),
    ):
        for call in calls:
            with pytest.raises(kind, match=store.url.replace("+", r"\+")) as caught:
                call(store)
            assert type(caught.value) is kind
            assert caught.value.store == store.url
            shown.append(f"{caught.value} {caught.value!r} {caught.value.__cause__!r} {store!r}")
    assert CANARY not in " ".join(shown)
    assert s3_options["secret"] not in " ".join(shown)


@pytest.mark.s3
def test_reads_use_one_request(s3fs_url: str, s3_options: dict[str, Any]) -> None:
    """A large object comes from one version, though s3fs would read it in parts."""
    store = bare(open_store(s3fs_url, {**s3_options, "default_block_size": 1000}))
    store.put("a", b"0" * 5000)
    asked: list[Any] = []
    client = store._fs.s3
    client.meta.events.register("before-call.s3.GetObject", lambda params, **_: asked.append(params["headers"]))
    assert store.get("a") == b"0" * 5000
    assert [headers.get("Range") for headers in asked] == [None]


def test_the_time_of_memory_is_that_of_the_last_write() -> None:
    """`created` stands for it: an object is replaced, never changed."""
    store = open_store("fsspec+memory://times")
    store.put("a", b"1")
    first = store.head("a").last_modified
    time.sleep(0.001)
    store.put("a", b"2")
    assert store.head("a").last_modified > first
    assert first.tzinfo is not None
