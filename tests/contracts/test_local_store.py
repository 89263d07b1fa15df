"""What a directory promises beyond the common contract: durability, and places that are spelled in many ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_resilient.errors import ObjectNotFoundError, StorageError, StoreUnavailableError
from dagster_resilient.storage.local_store import LocalDirectoryStore
from dagster_resilient.storage.object_store import ObjectStore, open_store

Place = tuple[str, dict[str, Any]]
RunPython = Callable[..., str]


def names(store: ObjectStore, prefix: str = "") -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in store.list(prefix)]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is synced, linked, renamed, in order: a file's sync shows as its size, a folder's as its name."""
    calls: list[str] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def noted_fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        calls.append(f"sync folder {path.name}" if path.is_dir() else f"sync {path.stat().st_size} bytes")
        fsync(handle)

    def noted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(source: Any, target: Any, **kwargs: Any) -> None:
            calls.append(f"{name} {Path(target).name}")
            call(source, target, **kwargs)

        return run

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted("link", link))
    monkeypatch.setattr(os, "replace", noted("replace", replace))
    return calls


def test_a_local_write_is_on_the_disk_before_it_is_visible(local_url: str, synced: list[str]) -> None:
    """The file is synced before it gets its name, and the folder after; new folders are synced into their parents."""
    store = open_store(local_url)
    store.put("new/a", b"12345")
    assert synced[-3:] == ["sync 5 bytes", "replace a", "sync folder new"]
    assert synced[:-3][-1] == "sync folder store"
    synced.clear()
    store.create("new/b", b"123")
    assert synced == ["sync 3 bytes", "link b", "sync folder new"]


def files_below(url: str) -> list[str]:
    """All files that are really there, temporary ones too."""
    root = Path(url.removeprefix("file://"))
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("verb", ["put", "create"])
@pytest.mark.parametrize("step", ["fsync", "link", "replace"])
def test_a_local_write_that_fails_leaves_nothing(
    local_url: str, monkeypatch: pytest.MonkeyPatch, verb: str, step: str
) -> None:
    """Whatever step fails, the error names the object, no temporary file stays, and the old object is whole."""
    store = open_store(local_url)
    store.put("old", b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, step, fail)
    if (verb, step) not in {("put", "link"), ("create", "replace")}:
        with pytest.raises(StorageError, match=f"{store.url}/new.*No space left"):
            getattr(store, verb)("new", b"new")
        assert files_below(local_url) == ["old"]
    monkeypatch.undo()
    assert store.get("old") == b"old"


def test_what_a_killed_writer_left_is_invisible(local_url: str) -> None:
    """A temporary file is neither listed nor in the way of the next write."""
    store = open_store(local_url)
    store.put("a/b", b"1")
    junk = Path(local_url.removeprefix("file://")) / "a" / "part#123456789"
    junk.write_bytes(b"half")
    assert names(store) == ["a/b"]
    store.put("a/b", b"2")
    store.create("a/c", b"3")
    assert names(store) == ["a/b", "a/c"]


def test_a_file_that_grows_too_large_is_refused_whole(local_url: str, run_python: RunPython) -> None:
    """At a full disk (here: a limit on file size) the error names the target and the cause; nothing of it stays.

    The previous version loads, and when there is space again the next write succeeds.
    """
    store = open_store(local_url)
    store.put("value", b"previous")
    code = """
import resource
from dagster_resilient.errors import StorageError, StoreUnavailableError
from dagster_resilient.storage.object_store import open_store
store = open_store(given)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
for verb in ("put", "create"):
    try:
        getattr(store, verb)("value" if verb == "put" else "new", [b"x" * 700_000] * 4)
    except StorageError as error:
        print(isinstance(error, StoreUnavailableError), error)
print(store.get("value").decode())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.put("value", [b"x" * 700_000] * 4)
"""
    put, create, previous = run_python(code, local_url).splitlines()
    assert put == f"False Could not write {store.url}/value: File too large."
    assert create == f"False Could not create {store.url}/new: File too large."
    assert previous == "previous"
    assert files_below(local_url) == ["value"]
    assert store.head("value").size == 2_800_000


def test_local_files_have_the_usual_mode(local_url: str) -> None:
    """Other users' processes may read them, as the umask says: the temporary file was no private one."""
    open_store(local_url).put("a", b"1")
    assert (Path(local_url.removeprefix("file://")) / "a").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


# ---- spellings of a place


@pytest.mark.parametrize(
    "spelling", ["{p}", "{p}/", "file://{p}", "file://{p}//", "file:{p}", "{p}/x/..", "FILE://{p}"]
)
def test_every_spelling_of_a_directory_is_the_same_place(tmp_path: Path, spelling: str) -> None:
    """Slashes at the end, a scheme or none, a path object: the URL that the store shows is one."""
    expected = open_store(tmp_path / "a b%20").url
    assert open_store(spelling.format(p=f"{tmp_path}/a b%20")).url == expected == f"file://{tmp_path}/a b%20"


def test_a_relative_path_is_fixed_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that changes its directory later still writes to the same place. ``~`` is the home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store = open_store("data")
    monkeypatch.chdir("/")
    store.put("a", b"1")
    assert (tmp_path / "data" / "a").read_bytes() == b"1"
    assert open_store("~/data").url == f"file://{tmp_path}/home/data"


@pytest.mark.parametrize("spelling", ["s3://b/x/y", "s3://b//x//y/", "s3a://b/x/y/", "S3://b/x/y"])
def test_every_spelling_of_an_s3_prefix_is_the_same_place(spelling: str) -> None:
    """Slashes that are doubled or at the end mean nothing."""
    assert open_store(spelling).url == "s3://b/x/y"
    assert open_store("s3://b/").url == open_store("s3://b").url == "s3://b"


def test_memory_stores_are_told_apart_by_name() -> None:
    """One name is one store; another name, and the store without a name, are others."""
    open_store("memory://one").put("a", b"1")
    assert names(open_store("memory://one/")) == ["a"]
    assert names(open_store("memory://two")) == names(open_store("memory://")) == []


def test_a_directory_that_vanishes_is_an_outage_not_a_new_store(tmp_path: Path) -> None:
    """Made anew it would be a store without logs and fences; the process is told, and finds all when it is back."""
    store = open_store(str(tmp_path / "store")).with_patience(0.0)  # type: ignore[attr-defined]
    store.put("a", b"1")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError, match="vanished"):
        store.put("b", b"2")
    with pytest.raises(StoreUnavailableError, match="vanished"):
        store.get("a")
    assert not (tmp_path / "store").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert store.get("a") == b"1"


def test_looking_does_not_make_the_place(tmp_path: Path) -> None:
    """A mistyped path holds nothing, and is not there afterwards; the first write makes it."""
    store = LocalDirectoryStore(tmp_path / "typo")
    assert list(store.list("")) == []
    assert list(store.leftovers()) == []
    with pytest.raises(ObjectNotFoundError):
        store.get("a")
    with pytest.raises(ObjectNotFoundError):
        store.head("a")
    store.delete(["a"])
    assert not (tmp_path / "typo").exists()
    store.put("a", b"1")
    assert store.get("a") == b"1"
