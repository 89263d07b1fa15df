"""The test kit does what it says: a test that relies on it fails for the right reason."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from dagster_resilient.errors import ObjectExistsError, ObjectNotFoundError, StorageError, StoreUnavailableError
from dagster_resilient.storage.memory_store import MemoryObjectStore
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.testing import FakeClock, Fault, FaultStore, Operation


@pytest.fixture
def inner() -> MemoryObjectStore:
    """An empty store."""
    return MemoryObjectStore(uuid.uuid4().hex)


def test_without_a_plan_a_fault_store_is_the_store_inside(inner: MemoryObjectStore) -> None:
    """All operations pass through, and are recorded with their keys in order."""
    store = FaultStore(inner)
    store.put("p/a", [b"1", b"2"])
    store.create("p/b", b"3")
    assert (store.get("p/a"), store.head("p/b").size, store.get_ranges("p/a", [(1, 2)])) == (b"12", 1, [b"2"])
    assert [info.key for info in store.list("p/")] == ["p/a", "p/b"]
    store.delete(["p/a", "p/b"])
    assert store.operations == [
        *(Operation("put", "p/a"), Operation("create", "p/b"), Operation("get", "p/a"), Operation("head", "p/b")),
        *(Operation("get_ranges", "p/a"), Operation("list", "p/"), Operation("delete", "p/a p/b")),
    ]
    assert store.count("get") == 1
    assert (store.url, store.is_shared) == (inner.url, inner.is_shared)


@pytest.mark.parametrize(("kind", "applied"), [("fail", False), ("torn", False), ("lose_reply", True)])
def test_a_lost_message_is_unavailable(inner: MemoryObjectStore, kind: str, applied: bool) -> None:
    """The caller sees the same error, whether or not the store has done it; only operation 1 is hit."""
    store = FaultStore(inner, {1: Fault(kind)})  # type: ignore[arg-type]
    store.put("a", b"before")
    with pytest.raises(StoreUnavailableError, match=f"{inner.url}/a"):
        store.put("a", b"after")
    assert store.get("a") == (b"after" if applied else b"before")


def test_a_full_store_refuses_for_good(inner: MemoryObjectStore) -> None:
    """The error is no "unavailable": nobody retries it."""
    with pytest.raises(StorageError, match=os.strerror(errno.ENOSPC)) as caught:
        FaultStore(inner, {0: Fault("no_space")}).put("a", b"1")
    assert not isinstance(caught.value, StoreUnavailableError)
    assert list(inner.list("")) == []


def test_a_torn_local_write_leaves_an_invisible_file(local_url: str) -> None:
    """What a killed writer leaves is there, and no reader sees it."""
    store = FaultStore(open_store(local_url), {0: Fault("torn")})
    with pytest.raises(StoreUnavailableError):
        store.put("p/a", b"1")
    assert list(store.list("")) == []
    assert [path.name[:5] for path in Path(local_url.removeprefix("file://"), "p").iterdir()] == ["part#"]


def test_an_outage_hits_everything_and_ends(inner: MemoryObjectStore) -> None:
    """Inside the block nothing reaches the store."""
    store = FaultStore(inner)
    with store.outage(), pytest.raises(StoreUnavailableError, match="down"):
        store.put("a", b"1")
    with pytest.raises(ObjectNotFoundError):
        store.get("a")
    assert [operation.verb for operation in store.operations] == ["put", "get"]


def test_a_store_can_ignore_conditions(inner: MemoryObjectStore) -> None:
    """As some servers do: a create overwrites. With conditions it is refused."""
    FaultStore(inner).create("a", b"1")
    with pytest.raises(ObjectExistsError):
        FaultStore(inner).create("a", b"2")
    FaultStore(inner, honours_conditions=False).create("a", b"2")
    assert inner.get("a") == b"2"


def test_a_plan_can_be_a_function(inner: MemoryObjectStore) -> None:
    """It sees the number and the operation."""
    store = FaultStore(inner, lambda _, operation: Fault("fail") if operation.key == "b" else None)
    store.put("a", b"1")
    with pytest.raises(StoreUnavailableError):
        store.put("b", b"1")


@pytest.mark.parametrize(("kind", "applied"), [("die_before", False), ("die_after", True)])
def test_a_process_can_die_at_an_operation(
    local_url: str, run_python: Callable[..., str], kind: str, applied: bool
) -> None:
    """SIGKILL before or after the store has done it: nothing later in the process runs."""
    code = """
import os
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.testing import Fault, FaultStore
url, kind = given
child = os.fork()
if child == 0:
    try:
        FaultStore(open_store(url), {0: Fault(kind)}).put("a", b"1")
    finally:
        open_store(url).put("b", b"1")
print(os.WTERMSIG(os.waitpid(child, 0)[1]), [info.key for info in open_store(url).list("")])
"""
    assert run_python(code, [local_url, kind]).strip() == f"9 {['a'] if applied else []}"


def test_a_delay_comes_before_the_operation(inner: MemoryObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is slow, and then does it."""
    clock = FakeClock()
    monkeypatch.setattr("time.sleep", clock.sleep)
    FaultStore(inner, {0: Fault("delay", seconds=30.0)}).put("a", b"1")
    assert clock() == 30.0
    assert inner.get("a") == b"1"


def test_a_fake_clock_moves_only_when_told() -> None:
    """It stands, advances, notes its sleeps, and never goes back."""
    clock = FakeClock(start=100.0)
    assert (clock(), clock()) == (100.0, 100.0)
    clock.advance(2.5)
    clock.sleep(1.5)
    assert clock() == 104.0
    assert clock.slept == [1.5]
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
