"""What every `ObjectStore` does, on memory, a directory and a real S3 server."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
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
