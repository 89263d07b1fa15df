"""What every `ObjectStore` must do, as tests that a subclass runs on its own store."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NoReturn

import pytest

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    VersionConflictError,
)
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.testing.reading import Opener, ReadingContract, names

_BODIES: dict[str, Callable[[], Any]] = {
    "empty": lambda: b"",
    "no buffer": list,
    "empty buffers around one": lambda: [b"", b"a", b""],
    "bytes": lambda: b"abc",
    "bytearray": lambda: bytearray(b"abc"),
    "memoryview": lambda: memoryview(b"abcdef")[1:4],
    "several kinds": lambda: [b"ab", bytearray(b"cd"), memoryview(b"ef")],
    "generator": lambda: (bytes([n]) for n in range(5)),
    "floats": lambda: memoryview(array("f", range(6))),
    "a matrix": lambda: [memoryview(bytes(range(48))).cast("q", [2, 3])],
    "every second byte": lambda: memoryview(b"abcdef")[::2],
    "no number": lambda: memoryview(array("d")),
}


def _flat(body: Any) -> bytes:
    """The bytes that a body stands for."""
    if isinstance(body, (bytes, bytearray, memoryview)):
        return memoryview(body).tobytes()
    return b"".join(memoryview(part).tobytes() for part in body)


def _alike(body: bytes, wanted: memoryview) -> bool:
    """Compare outside of an assert, which would print megabytes."""
    return body == wanted


def _winners(writers: int, write: Callable[[int], object], lost: type[StorageError]) -> list[int]:
    """Let threads write at the same time; return the numbers of those that were not refused."""
    together = threading.Barrier(writers)

    def attempt(n: int) -> bool:
        together.wait(timeout=30)
        try:
            write(n)
        except lost:
            return False
        return True

    with ThreadPoolExecutor(writers) as pool:
        return [n for n, won in enumerate(pool.map(attempt, range(writers))) if won]


def _breaking_off(size: int) -> Any:
    """A body whose source fails after so many bytes."""
    yield bytes(size)
    raise RuntimeError("the source broke off")


class ObjectStoreContract(ReadingContract):
    """Subclass it in a test module, and give the fixture `opener`.

    `opener` returns a function; each of its calls opens one and the same place, which is empty when a test begins::

        class TestMyStore(ObjectStoreContract):
            @pytest.fixture
            def opener(self, tmp_path):
                return lambda: MyStore(tmp_path)
    """

    # ---- writing

    @pytest.mark.parametrize("verb", ["put", "create"])
    @pytest.mark.parametrize("body", _BODIES.values(), ids=_BODIES.keys())
    def test_what_is_written_is_read(self, store: ObjectStore, verb: str, body: Callable[[], Any]) -> None:
        """Any buffer or buffers come back as their bytes, one behind the other."""
        getattr(store, verb)("a/b", body())
        assert store.get("a/b") == _flat(body())
        assert store.head("a/b").size == len(_flat(body()))

    def test_put_replaces(self, store: ObjectStore) -> None:
        """The last put is what is there, also where it is shorter."""
        store.put("a", b"long before")
        store.put("a", b"short")
        assert store.get("a") == b"short"

    def test_a_large_object_in_several_buffers(self, store: ObjectStore) -> None:
        """Buffers of uneven size, larger and smaller than a part of an upload, come back whole, and in ranges."""
        block = bytes(range(251))
        noise = memoryview(block * (self.big // len(block)))
        cuts = [0, 1, self.big * 3 // 10, self.big * 3 // 10 + 1, self.big * 13 // 20, len(noise)]
        store.put("big", [noise[a:b] for a, b in pairwise(cuts)])
        assert _alike(store.get("big"), noise)
        far, near, last = self.big * 3 // 4, self.big * 3 // 10, len(noise)
        ranges = [(far, far + 9), (near - 10, near + 10), (0, 5), (near, near + 99_999), (last - 3, last)]
        read = store.get_ranges("big", ranges)
        assert [_alike(body, noise[a:b]) for body, (a, b) in zip(read, ranges, strict=True)] == [True] * len(ranges)

    @pytest.mark.parametrize("verb", ["put", "create"])
    def test_buffers_may_be_changed_when_the_call_has_returned(self, store: ObjectStore, verb: str) -> None:
        """The store keeps no reference to what it was given."""
        buffer = bytearray(b"before")
        getattr(store, verb)("a", buffer)
        buffer[:] = b"after!"
        assert store.get("a") == b"before"

    @pytest.mark.parametrize("verb", ["put", "create"])
    def test_a_write_whose_source_breaks_off_changes_nothing(self, store: ObjectStore, verb: str) -> None:
        """No beginning of an object is ever published, and what was there before stays."""
        store.put("there", b"before")
        with pytest.raises(RuntimeError, match="broke off"):
            getattr(store, verb)("absent", _breaking_off(self.big // 2))
        with pytest.raises(RuntimeError, match="broke off"):
            store.put("there", _breaking_off(self.big // 2))
        assert names(store) == ["there"]
        assert store.get("there") == b"before"

    def test_a_reader_sees_whole_objects_only(self, opener: Opener) -> None:
        """While a key is written again and again, each read returns one of the bodies, and never a mixture."""
        writing, reading = opener(), opener()
        writing.put("a", b"0" * 300_000)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(lambda: [writing.put("a", str(n % 10).encode() * 300_000) for n in range(20)])
            seen = [reading.get("a")]
            while not done.done():
                seen.append(reading.get("a"))
            done.result()
        assert {(len(body), len(set(body))) for body in seen} == {(300_000, 1)}

    # ---- create

    def test_create_is_refused_where_an_object_is(self, store: ObjectStore) -> None:
        """The object that was there stays, whether put or created."""
        store.put("put", b"first")
        store.create("created", b"first")
        for key in ("put", "created"):
            with pytest.raises(ObjectExistsError, match=re.escape(f"{store.url}/{key}")) as caught:
                store.create(key, b"second")
            assert isinstance(caught.value, FileExistsError)
            assert store.get(key) == b"first"

    def test_create_again_after_delete(self, store: ObjectStore) -> None:
        """A deleted key is free."""
        store.create("a", b"first")
        store.delete(["a"])
        store.create("a", b"second")
        assert store.get("a") == b"second"

    def test_one_of_many_racing_creators_wins(self, opener: Opener) -> None:
        """Of creates at the same time through two handles exactly one succeeds, and its bytes are what is there."""
        handles = [opener(), opener()]
        won = _winners(4, lambda n: handles[n % 2].create("race", f"writer {n}".encode()), ObjectExistsError)
        assert [handles[0].get("race")] == [f"writer {n}".encode() for n in won]

    # ---- replace, where the store has it

    def test_a_version_changes_with_the_object(self, opener: Opener) -> None:
        """All handles see one version, until the object is written again."""
        store, other = opener(), opener()
        _needs_replace(store)
        store.put("a", b"1")
        first = store.head("a").version
        assert first
        assert store.head("a").version == other.head("a").version == first
        other.put("a", b"2")
        assert store.head("a").version not in {first, None}

    def test_replace_overwrites_the_version_it_was_given(self, store: ObjectStore) -> None:
        """It returns the new version, with which the object can be replaced again."""
        _needs_replace(store)
        store.put("a", b"1")
        second = store.replace("a", b"2", store.head("a").version or "")
        assert (store.get("a"), store.head("a").version) == (b"2", second)
        store.replace("a", [b"3", b"4"], second)
        assert store.get("a") == b"34"

    def test_replace_is_refused_where_the_object_was_changed(self, opener: Opener) -> None:
        """The other writer's bytes stay, and an object that is gone stays gone."""
        store, other = opener(), opener()
        _needs_replace(store)
        for key in ("changed", "gone"):
            store.put(key, b"1")
        versions = {key: store.head(key).version or "" for key in ("changed", "gone")}
        other.put("changed", b"2")
        other.delete(["gone"])
        for key, version in versions.items():
            with pytest.raises(VersionConflictError, match=re.escape(f"{store.url}/{key}")):
                store.replace(key, b"3", version)
        assert names(store) == ["changed"]
        assert store.get("changed") == b"2"

    def test_one_of_many_racing_replacers_wins(self, opener: Opener) -> None:
        """Of replacements of one version at the same time exactly one succeeds."""
        handles = [opener(), opener()]
        _needs_replace(handles[0])
        handles[0].put("race", b"before")
        known = handles[0].head("race").version or ""
        won = _winners(4, lambda n: handles[n % 2].replace("race", f"{n}".encode(), known), VersionConflictError)
        assert [handles[0].get("race")] == [f"{n}".encode() for n in won]

    def test_a_store_without_replace_says_so(self, store: ObjectStore) -> None:
        """Instead of overwriting what it cannot compare."""
        if store.replaces:
            pytest.skip("this store has replace")
        store.put("a", b"1")
        with pytest.raises(ConfigurationError, match="if-match"):
            store.replace("a", b"2", "any")
        assert store.get("a") == b"1"

    # ---- more than one user

    def test_every_handle_sees_what_any_has_written(self, opener: Opener) -> None:
        """Nothing is remembered from an earlier look: no listing, no size, no absence."""
        one, other = opener(), opener()
        assert names(other) == []
        one.put("a", b"1")
        assert other.get("a") == b"1"
        other.create("b", b"2")
        assert names(one) == ["a", "b"]
        one.put("a", b"longer")
        assert (other.head("a").size, other.get("a")) == (len(b"longer"), b"longer")
        other.delete(["a"])
        assert names(one) == ["b"]
        with pytest.raises(ObjectNotFoundError):
            one.head("a")

    def test_many_threads_share_a_store(self, store: ObjectStore) -> None:
        """Reads, writes and listings at the same time do not disturb each other."""

        def work(n: int) -> bool:
            store.put(f"t/{n}", str(n).encode())
            return store.get(f"t/{n}") == str(n).encode() and f"t/{n}" in names(store, "t/")

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(32)))

    def test_a_forked_process_uses_the_store(self, store: ObjectStore) -> None:
        """A process forked from one that uses it reads and writes, and each sees what the other wrote."""
        if not store.is_shared:
            pytest.skip("no other process sees this store")
        store.put("parent", b"1")
        child = os.fork()
        if child == 0:
            _work_in_child(store)
        assert _exit_status(child) == 0
        assert names(store) == ["child", "parent"]
        assert store.get("child") == b"1 seen"


def _needs_replace(store: ObjectStore) -> None:
    if not store.replaces:
        pytest.skip("this store has no replace")


def _work_in_child(store: ObjectStore) -> NoReturn:
    """Do the work and end at once: nothing of the test runner may run twice."""
    try:
        store.create("child", store.get("parent") + b" seen")
        os._exit(0)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent sees the status and a person the reason
        traceback.print_exc()
        os._exit(1)


def _exit_status(child: int, seconds: float = 60.0) -> int:
    """Wait for the child; one that hangs is killed and returns the signal's number."""
    deadline = time.monotonic() + seconds
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return status
