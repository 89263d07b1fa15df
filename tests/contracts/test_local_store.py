"""What a directory promises beyond the common contract: durability, and places that are spelled in many ways."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dagster_resilient.errors import ConfigurationError, ObjectNotFoundError, StorageError, StoreUnavailableError
from dagster_resilient.state._sidecar_store import Directory
from dagster_resilient.storage.local_root import MARK
from dagster_resilient.storage.local_store import LocalDirectoryStore
from dagster_resilient.storage.object_store import Leftover, ObjectStore, open_store
from dagster_resilient.storage.retry import hasty

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
            if Path(target).name != MARK:
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
    """All files that are really there, temporary ones too, and not the mark of the directory."""
    root = Path(url.removeprefix("file://"))
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != MARK)


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


def test_an_empty_directory_in_its_place_is_an_outage_too(tmp_path: Path) -> None:
    """That is what is left where a file system was unmounted. Nothing is read from it, and nothing written into it."""
    store = open_store(str(tmp_path / "store")).with_patience(0.0)  # type: ignore[attr-defined]
    store.put("a", b"1")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()
    for call in (lambda: store.put("b", b"2"), lambda: store.get("a"), lambda: list(store.list("")), store.is_made):
        with pytest.raises(StoreUnavailableError, match=r"is another directory|circuit"):
            call()
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "store").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert hasty(store, 30.0).get("a") == b"1"


def test_another_store_in_its_place_is_an_outage(tmp_path: Path) -> None:
    """It carries another mark."""
    store = open_store(str(tmp_path / "store")).with_patience(0.0)  # type: ignore[attr-defined]
    store.put("a", b"1")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    open_store(str(tmp_path / "store")).put("a", b"2")
    with pytest.raises(StoreUnavailableError, match="is another directory"):
        store.get("a")


def test_a_store_that_comes_back_elsewhere_is_the_same(tmp_path: Path) -> None:
    """A network mount may come back with another device number: its mark says that it is the same."""
    store = open_store(str(tmp_path / "store"))
    store.put("a", b"1")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "copy").rename(tmp_path / "store")
    store.put("b", b"2")
    assert (store.get("a"), store.get("b")) == (b"1", b"2")


def test_a_store_from_before_there_were_marks_gets_one(tmp_path: Path) -> None:
    """With the next write; whoever only reads leaves none."""
    (tmp_path / "a").write_bytes(b"1")
    store = open_store(str(tmp_path))
    assert (store.get("a"), store.is_made()) == (b"1", True)
    assert not (tmp_path / MARK).exists()
    store.put("b", b"2")
    assert (tmp_path / MARK).read_bytes()


def test_the_mark_is_one_and_nobodys_object(tmp_path: Path) -> None:
    """However many begin at once; neither listed nor taken for a leftover."""
    stores = [open_store(str(tmp_path / "store")) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: stores[n].put(f"k{n}", b"1"), range(8)))
    assert [names(store) for store in stores] == [[f"k{n}" for n in range(8)]] * 8
    assert list(stores[0].leftovers()) == []
    for store in stores:
        store.put("more", b"1")
    with pytest.raises(ConfigurationError):
        stores[0].discard(Leftover(MARK, 1, datetime.now(UTC)))


def test_a_place_is_made_once_something_was_stored(tmp_path: Path) -> None:
    """An absent or an empty directory is none yet."""
    store = open_store(str(tmp_path / "store"))
    assert not store.is_made()
    (tmp_path / "store").mkdir()
    assert not open_store(str(tmp_path / "store")).is_made()
    store.put("a", b"1")
    assert store.is_made()


def test_a_sidecar_takes_no_other_directory_for_it(tmp_path: Path) -> None:
    """A heartbeat in an empty mount point would make it a store."""
    open_store(str(tmp_path / "store")).put("a", b"1")
    sidecar = Directory(str(tmp_path / "store"))
    sidecar.put("live/a", b"1", 1.0)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        sidecar.put("live/a", b"2", 1.0)
    (tmp_path / "store").mkdir()
    with pytest.raises(FileNotFoundError, match="another directory"):
        sidecar.put("live/a", b"2", 1.0)
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "store").rmdir()
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "store")
    sidecar.put("live/a", b"3", 1.0)
    assert (tmp_path / "store" / "live" / "a").read_bytes() == b"3"


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
