"""What every `ObjectStore` does, on memory, a directory and a real S3 server."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
)
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore, open_store

Place = tuple[str, dict[str, Any]]
RunPython = Callable[..., str]

BODIES: dict[str, Callable[[], Any]] = {
    "empty": lambda: b"",
    "no buffer": list,
    "empty buffers around one": lambda: [b"", b"a", b""],
    "bytes": lambda: b"abc",
    "bytearray": lambda: bytearray(b"abc"),
    "memoryview": lambda: memoryview(b"abcdef")[1:4],
    "several kinds": lambda: [b"ab", bytearray(b"cd"), memoryview(b"ef")],
    "generator": lambda: (bytes([n]) for n in range(5)),
    "floats of numpy": lambda: memoryview(np.arange(6, dtype="f4")),
    "a matrix of numpy": lambda: [memoryview(np.arange(6, dtype="i8").reshape(2, 3))],
    "every second number": lambda: memoryview(np.arange(12, dtype="f8")[::2]),
    "no row": lambda: memoryview(np.zeros((0, 3))),
    "big-endian": lambda: memoryview(np.arange(3, dtype=">i4")),
}


def flat(body: Any) -> bytes:
    """The bytes that a body stands for."""
    if isinstance(body, (bytes, bytearray, memoryview)):
        return memoryview(body).tobytes()
    return b"".join(memoryview(part).tobytes() for part in body)


def names(store: ObjectStore, prefix: str = "", start_after: str | None = None) -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in store.list(prefix, start_after)]


@pytest.mark.parametrize("verb", ["put", "create"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_what_is_written_is_read(store: ObjectStore, verb: str, body: Callable[[], Any]) -> None:
    """Any buffer or buffers come back as their bytes, one behind the other."""
    getattr(store, verb)("a/b", body())
    assert store.get("a/b") == flat(body())
    assert store.head("a/b").size == len(flat(body()))


def test_put_replaces(store: ObjectStore) -> None:
    """The last put is what is there, also where it is shorter."""
    store.put("a", b"long before")
    store.put("a", b"short")
    assert store.get("a") == b"short"


def test_a_large_object_in_several_buffers(store: ObjectStore) -> None:
    """20 MB in buffers of uneven size, larger and smaller than an S3 part, come back whole."""
    noise = np.random.default_rng(7).integers(0, 256, 20_000_000, dtype="u1")
    cuts = [0, 1, 6_000_000, 6_000_001, 13_000_000, 20_000_000]
    store.put("big", [memoryview(noise[a:b]) for a, b in itertools.pairwise(cuts)])
    assert store.get("big") == noise.tobytes()
    ranges = [(15_000_000, 15_000_009), (5_999_990, 6_000_010), (0, 5), (6_000_005, 6_100_000), (500_000, 500_003)]
    assert store.get_ranges("big", ranges) == [noise[a:b].tobytes() for a, b in ranges]


@pytest.mark.parametrize("verb", ["put", "create"])
def test_buffers_may_be_changed_when_the_call_has_returned(store: ObjectStore, verb: str) -> None:
    """The store keeps no reference to what it was given."""
    buffer = bytearray(b"before")
    getattr(store, verb)("a", buffer)
    buffer[:] = b"after!"
    assert store.get("a") == b"before"


@pytest.mark.parametrize(
    "read",
    [lambda s, k: s.get(k), lambda s, k: s.head(k), lambda s, k: s.get_ranges(k, [(0, 1)])],
    ids=["get", "head", "get_ranges"],
)
@pytest.mark.parametrize("key", ["absent", "folder", "folder/object/below"])
def test_reading_what_is_not_there(store: ObjectStore, key: str, read: Callable[[ObjectStore, str], Any]) -> None:
    """It is our error and the builtin one, and names the object. A prefix is no object, nor is what is "under" one."""
    store.put("folder/object", b"1")
    with pytest.raises(ObjectNotFoundError, match=f"{store.url}/{key}") as caught:
        read(store, key)
    assert isinstance(caught.value, FileNotFoundError)
    assert (caught.value.store, caught.value.key) == (store.url, key)


def test_create_is_refused_where_an_object_is(store: ObjectStore) -> None:
    """The object that was there stays, whether put or created."""
    store.put("put", b"first")
    store.create("created", b"first")
    for key in ("put", "created"):
        with pytest.raises(ObjectExistsError, match=f"{store.url}/{key}") as caught:
            store.create(key, b"second")
        assert isinstance(caught.value, FileExistsError)
        assert store.get(key) == b"first"


def test_create_again_after_delete(store: ObjectStore) -> None:
    """A deleted key is free."""
    store.create("a", b"first")
    store.delete(["a"])
    store.create("a", b"second")
    assert store.get("a") == b"second"


def test_one_of_many_racing_creators_wins(store: ObjectStore) -> None:
    """Of creates at the same time exactly one succeeds, and its bytes are what is there."""
    together = threading.Barrier(4)

    def attempt(n: int) -> int | None:
        together.wait(timeout=30)
        try:
            store.create("race", f"writer {n}".encode())
        except ObjectExistsError:
            return None
        return n

    with ThreadPoolExecutor(4) as pool:
        winners = [n for n in pool.map(attempt, range(4)) if n is not None]
    assert len(winners) == 1
    assert store.get("race") == f"writer {winners[0]}".encode()


def test_head_tells_size_and_time(store: ObjectStore) -> None:
    """The time is the store's, with a time zone, and a later write is not older."""
    store.put("a", b"12345")
    store.put("b", b"")
    first, second = store.head("a"), store.head("b")
    assert (first.key, first.size) == ("a", 5)
    assert first.last_modified.astimezone(UTC) <= second.last_modified.astimezone(UTC)


def test_list_yields_what_is_under_a_prefix_in_order(store: ObjectStore) -> None:
    """Only keys below the prefix, whatever their depth, in order of key, with sizes; siblings of like names are not."""
    for key in ("p/b", "p/a", "p/c/deep/er", "pq/x", "p.x", "o/y"):
        store.put(key, key.encode())
    assert names(store, "p/") == ["p/a", "p/b", "p/c/deep/er"]
    assert names(store, "p/c/") == ["p/c/deep/er"]
    assert names(store) == sorted(["p/b", "p/a", "p/c/deep/er", "pq/x", "p.x", "o/y"])
    assert [info.size for info in store.list("p/")] == [3, 3, 11]
    assert names(store, "absent/") == []


def test_an_empty_store_lists_nothing(store: ObjectStore) -> None:
    """A place that was never written to is an empty store, no error."""
    assert names(store) == []


def test_list_starts_after_a_name_of_fixed_width(store: ObjectStore) -> None:
    """Only greater names are shown, whether or not the named one exists."""
    for n in (1, 2, 3, 10, 20):
        store.put(f"log/{keys.numbered(n)}.json", b"")
    assert names(store, "log/", f"log/{keys.numbered(2)}.json") == [f"log/{keys.numbered(n)}.json" for n in (3, 10, 20)]
    assert names(store, "log/", f"log/{keys.numbered(15)}.json") == [f"log/{keys.numbered(20)}.json"]
    assert names(store, "log/", f"log/{keys.numbered(20)}.json") == []


def test_list_shows_more_than_one_page(store: ObjectStore) -> None:
    """S3 answers in pages of 1,000: what is on the second one is shown too, and deleted by one call."""
    wanted = [f"steps/{keys.numbered(n)}" for n in range(1105)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"1"), wanted))
    assert names(store, "steps/") == wanted
    store.delete(wanted)
    assert names(store, "steps/") == []


def test_list_takes_a_folder_like_prefix_only(store: ObjectStore) -> None:
    """Stores disagree on what half a name means, so it is refused."""
    with pytest.raises(ConfigurationError, match="'half'"):
        list(store.list("half"))


def test_delete_takes_exactly_the_keys_named(store: ObjectStore) -> None:
    """No patterns, no prefixes: what only looks like the key stays. A key that is not there is no error."""
    kept = ["ab", "axb", "a/b", "[x]", "folder/one"]
    for key in [*kept, "a*b"]:
        store.put(key, b"1")
    store.delete(["a*b", "x*", "[ab]", "folder", "ab/c", "absent"])
    assert names(store) == sorted(kept)
    store.delete([])
    assert names(store) == sorted(kept)


def test_get_ranges_returns_each_range_in_the_order_asked_for(store: ObjectStore) -> None:
    """Half-open, in any order, overlapping, empty, or none."""
    store.put("a", b"0123456789")
    assert store.get_ranges("a", [(4, 6), (0, 3), (2, 5), (7, 7), (9, 10)]) == [b"45", b"012", b"234", b"", b"9"]
    assert store.get_ranges("a", []) == []


@pytest.mark.parametrize("ranges", [[(8, 11)], [(0, 1), (20, 30)]], ids=["across the end", "behind the end"])
def test_get_ranges_never_returns_less_than_asked_for(store: ObjectStore, ranges: list[tuple[int, int]]) -> None:
    """A range beyond the end is an error that names the object: a short read is never taken for data."""
    store.put("a", b"0123456789")
    with pytest.raises(StorageError, match=f"{store.url}/a"):
        store.get_ranges("a", ranges)


SPECIAL = [
    *("a/%2E%2E/b", "a/%", "a/%25", "a/%2F", "a/+", "a/ ", "a/a b", "a/#", "a/x#y", "a/?", "a/&=,;[]*", "a/~'\""),
    *("a/é", "a/😀"),
]


def test_keys_keep_every_character(store: ObjectStore) -> None:
    """What a key contains comes back from a listing as it was, and stays apart from what it resembles."""
    for key in SPECIAL:
        store.put(key, key.encode())
    assert names(store, "a/") == sorted(SPECIAL)
    assert [store.get(key).decode() for key in SPECIAL] == SPECIAL
    store.delete(SPECIAL[::2])
    assert names(store, "a/") == sorted(SPECIAL[1::2])


@pytest.mark.parametrize("text", ["", "a/b", "..", "%2E%2E", "a\nb", "a\x00", "漢" * 300, "é", "A", "k" * 300])
def test_encoded_names_are_kept(store: ObjectStore, text: str) -> None:
    """Whatever a partition is called, its segment is a key that is stored, listed and decoded."""
    key = f"{keys.task_prefix(['asset', text], text)}/log/1.json"
    store.create(key, b"1")
    assert names(store, "tasks/") == [key]
    assert store.get(key) == b"1"


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", ".", "a/..", "../a", "a/./b", "a/b#12", "a\x00b"])
def test_keys_that_some_store_cannot_hold_are_refused_by_all(store: ObjectStore, key: str) -> None:
    """No key leaves the root, and none works on one store only. Nothing is written."""
    calls: list[Callable[[], Any]] = [
        lambda: store.put(key, b"1"),
        lambda: store.create(key, b"1"),
        lambda: store.get(key),
        lambda: store.head(key),
        lambda: store.delete([key]),
        lambda: store.get_ranges(key, [(0, 1)]),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError):
            call()
    assert names(store) == []


def test_two_stores_on_one_place_see_the_same(place: Place) -> None:
    """The URL that a store shows opens the same place again, and nothing is remembered from an earlier look."""
    one = open_store(*place)
    other = open_store(one.url, place[1])
    assert names(other) == []
    one.put("a", b"1")
    assert other.get("a") == b"1"
    other.create("b", b"2")
    assert names(one) == ["a", "b"]


def test_a_prefix_is_a_store_of_its_own(place: Place) -> None:
    """A store below another one has keys of its own, which the outer one sees below the prefix."""
    url, options = place
    outer, inner = open_store(url, options), open_store(f"{url}/in ner%2F", options)
    inner.put("a", b"1")
    outer.put("b", b"2")
    assert names(inner) == ["a"]
    if outer.is_shared:  # names of memory stores do not nest
        assert names(outer) == ["b", "in ner%2F/a"]


def test_many_threads_share_a_store(store: ObjectStore) -> None:
    """Reads, writes and listings at the same time do not disturb each other."""

    def work(n: int) -> bool:
        store.put(f"t/{n}", str(n).encode())
        return store.get(f"t/{n}") == str(n).encode() and f"t/{n}" in names(store, "t/")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))


def test_no_credential_is_shown(place: Place) -> None:
    """Neither the URL nor the representation of a store contains a secret; only the sidecar's configuration does."""
    store = open_store(*place)
    shown = f"{store.url} {store!r}"
    assert not [value for name, value in place[1].items() if name != "endpoint_url" and value in shown]
    assert store.url in repr(store)


def test_another_process_sees_every_acknowledged_write(shared_place: Place, run_python: RunPython) -> None:
    """A fresh process reads, lists and is refused by what this one wrote, and this one sees what it wrote."""
    store = open_store(*shared_place)
    store.create("ours", b"1")
    assert names(store, "theirs/") == []
    code = """
from dagster_resilient.errors import ObjectExistsError
from dagster_resilient.storage.object_store import open_store
store = open_store(*given)
print(store.get("ours").decode(), [info.key for info in store.list("")])
try:
    store.create("ours", b"theirs")
except ObjectExistsError:
    print("refused")
store.put("theirs/a", b"2")
"""
    assert run_python(code, shared_place).splitlines() == ["1 ['ours']", "refused"]
    assert (store.get("ours"), store.get("theirs/a")) == (b"1", b"2")
    assert names(store) == ["ours", "theirs/a"]


def test_a_sidecar_can_open_the_store_again(shared_place: Place) -> None:
    """The configuration is plain JSON. It carries what a process needs that has nothing but obstore."""
    config = open_store(*shared_place).sidecar_config()
    assert json.loads(json.dumps(config)) == config
    assert config["kind"] in {"s3", "local"}


def test_memory_has_no_second_process() -> None:
    """A store in memory says so, instead of letting a sidecar see an empty one."""
    store = open_store("memory://alone")
    assert not store.is_shared
    with pytest.raises(ConfigurationError, match="memory://alone"):
        store.sidecar_config()


def in_fork(work: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Run work in a forked child and return its result; a child that hangs is ended and fails the test."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    deadline = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail(f"The forked child did not end within {seconds:.0f} s.")
        time.sleep(0.01)
    with os.fdopen(read, "rb") as pipe:
        return json.loads(pipe.read())


def test_a_forked_child_goes_on_using_the_store(store: ObjectStore) -> None:
    """A process forked after use reads, writes, lists, deletes and meets the same errors; the parent goes on too."""
    store.put("before/a", b"1")
    store.put("before/b", b"2")

    def child() -> Any:
        store.put("child/large", [b"x" * 3_000_000] * 2)
        store.create("child/new", b"3")
        seen: list[Any] = [store.get("before/a").decode(), len(store.get("child/large")), names(store)]
        seen.append([part.decode() for part in store.get_ranges("before/a", [(0, 1), (1, 1)])])
        seen.append([store.head("child/new").size, names(store, "nothing/")])
        for call in (lambda: store.get("absent"), lambda: store.create("before/b", b"other")):
            try:
                call()
            except StorageError as error:
                seen.append([type(error).__name__, error.key])
        store.delete(["before/a"])
        return [*seen, names(store, "before/")]

    assert in_fork(child) == [
        "1",
        6_000_000,
        ["before/a", "before/b", "child/large", "child/new"],
        ["1", ""],
        [1, []],
        ["ObjectNotFoundError", "absent"],
        ["ObjectExistsError", "before/b"],
        ["before/b"],
    ]
    expected = ["before/b", "child/large", "child/new"] if store.is_shared else ["before/a", "before/b"]
    assert names(store) == expected


def test_a_grandchild_uses_the_store_too(store: ObjectStore) -> None:
    """A fork of a fork works, with the pipes of its parent's helper open in it."""
    store.put("a", b"1")

    def child() -> Any:
        first = store.get("a").decode()
        second = in_fork(lambda: store.get("a").decode())
        return [first, second, store.get("a").decode()]

    assert in_fork(child) == ["1", "1", "1"]


# ---- a directory


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


# ---- S3


@pytest.mark.s3
def test_a_small_object_is_one_request_and_a_large_one_has_growing_parts(
    s3_store: ObjectStore, s3_url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 5 MiB there are no parts; above, parts grow so that their number stays below S3's limit."""
    import servers  # noqa: PLC0415

    from dagster_resilient.storage import obstore_store  # noqa: PLC0415

    def parts(key: str) -> int:
        bucket, prefix = s3_url.removeprefix("s3://").split("/")
        tag = servers.client(s3_server).head_object(Bucket=bucket, Key=f"{prefix}/{key}")["ETag"].strip('"')
        return int(tag.partition("-")[2] or 1)

    s3_store.put("small", [b"x"] * 3)
    s3_store.put("large", [b"x" * 7_000_000] * 3)
    monkeypatch.setattr(obstore_store, "_PARTS", 2)
    s3_store.put("larger", [b"x" * 7_000_000] * 3)
    assert (parts("small"), parts("large"), parts("larger")) == (1, 5, 2)
    assert s3_store.get("larger") == b"x" * 21_000_000


@pytest.mark.s3
def test_folder_markers_of_other_tools_do_no_harm(s3_store: ObjectStore, s3_url: str, s3_server: Any) -> None:
    """Empty objects named like folders, as consoles make them, neither break a listing nor hide what is below."""
    import servers  # noqa: PLC0415

    bucket, prefix = s3_url.removeprefix("s3://").split("/")
    for key in ("ckpt/", "ckpt/step-5/"):
        servers.client(s3_server).put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=b"")
    s3_store.put("ckpt/step-5/data", b"1")
    assert "ckpt/step-5/data" in names(s3_store, "ckpt/")
    assert s3_store.get("ckpt/step-5/data") == b"1"
    s3_store.delete(names(s3_store))
    assert [info for info in s3_store.list("") if info.size] == []


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
