"""The test kit does what it says: a test that relies on it fails for the right reason."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoreUnavailableError,
    VersionConflictError,
)
from dagster_resilient.storage.memory_store import MemoryObjectStore
from dagster_resilient.storage.object_store import Leftover, ObjectInfo, ObjectStore, open_store
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


class Versioned(MemoryObjectStore):
    """A store in memory with versions and leftovers."""

    replaces = True
    checks_bodies = False

    def head(self, key: str) -> ObjectInfo:
        """Show the bytes as the version."""
        return dataclasses.replace(super().head(key), version=self.get(key).hex())

    def replace(self, key: str, buffers: Any, version: str) -> str:
        """Compare, then write; enough for one thread."""
        if self.head(key).version != version:
            raise VersionConflictError("changed", store=self.url, key=key)
        self.put(key, buffers)
        return str(self.head(key).version)

    def leftovers(self) -> Iterator[Leftover]:
        """One upload that was never completed."""
        yield Leftover("upload 1", 7, datetime.now(UTC))

    def discard(self, leftover: Leftover) -> None:
        """Show that it was asked for."""
        self.put("discarded", leftover.name.encode())


def test_versions_and_leftovers_pass_through() -> None:
    """With the rest of what the store inside can do, and recorded like all operations."""
    store = FaultStore(Versioned(uuid.uuid4().hex))
    assert (store.replaces, store.checks_bodies) == (True, False)
    store.put("a", b"1")
    assert store.replace("a", [b"2"], store.head("a").version or "") == b"2".hex()
    with pytest.raises(VersionConflictError):
        store.replace("a", b"3", b"1".hex())
    [leftover] = store.leftovers()
    store.discard(leftover)
    assert (store.get("a"), store.get("discarded")) == (b"2", b"upload 1")
    assert [operation.verb for operation in store.operations[:5]] == ["put", "head", "replace", "replace", "leftovers"]
    assert store.operations[5] == Operation("discard", "upload 1")


def test_a_store_without_versions_stays_one() -> None:
    """What the store inside lacks, the faults do not add."""

    class Plain(MemoryObjectStore):
        replaces = False
        replace = ObjectStore.replace

    store = FaultStore(Plain(uuid.uuid4().hex))
    assert (store.replaces, store.checks_bodies, list(store.leftovers())) == (False, True, [])
    with pytest.raises(ConfigurationError, match="if-match"):
        store.replace("a", b"1", "any")


def test_a_replace_can_ignore_conditions() -> None:
    """As on a server that knows no If-Match: the change of another writer is lost."""
    store = FaultStore(Versioned(uuid.uuid4().hex), honours_conditions=False)
    store.put("a", b"1")
    store.replace("a", b"2", "of long ago")
    assert store.get("a") == b"2"


def test_what_is_read_can_be_corrupt_or_short(inner: MemoryObjectStore) -> None:
    """One bit differs, or the last byte is missing; what is stored is whole. Nothing can be done to nothing."""
    inner.put("a", b"0123")
    inner.put("empty", b"")
    for kind, body, part in (("corrupt_read", b"0133", b"3"), ("torn_read", b"012", b"")):
        store = FaultStore(inner, lambda _number, _operation, kind=kind: Fault(kind))  # type: ignore[misc]
        assert store.get("a") == body
        assert store.get_ranges("a", [(0, 0), (2, 3), (0, 2)]) == [b"", part, b"01"]
        assert (store.get("empty"), store.get_ranges("empty", [])) == (b"", [])
        assert store.head("a").size == 4
        assert inner.get("a") == b"0123"


def test_what_is_written_can_be_corrupt() -> None:
    """One bit differs from what was given, and the writer is told that all is well."""
    inner = Versioned(uuid.uuid4().hex)
    inner.put("replace", b"0")
    store = FaultStore(inner, lambda _number, _operation: Fault("corrupt_write"))
    store.put("put", [b"01", b"23"])
    store.create("create", b"0123")
    store.replace("replace", b"0123", b"0".hex())
    assert [inner.get(key) for key in ("put", "create", "replace")] == [b"0133"] * 3


@pytest.mark.parametrize("lacks", [0, 1, 2, 9])
def test_a_listing_can_lack_the_newest(inner: MemoryObjectStore, lacks: int) -> None:
    """As from a cache: what was there before is shown, in order."""
    for key in ("b", "c", "a"):
        inner.put(key, b"")
    store = FaultStore(inner, {0: Fault("stale_list", lacks=lacks)})
    assert [info.key for info in store.list("")] == sorted(["b", "c", "a"][: max(0, 3 - lacks)])
    assert [info.key for info in store.list("")] == ["a", "b", "c"]


def test_faults_need_no_pytest(run_python: Callable[..., str]) -> None:
    """The suites load it when they are asked for: a program that tests its own faults need not install it."""
    code = """
import sys, dagster_resilient.testing as testing
testing.FaultStore, testing.FakeClock
print("pytest" in sys.modules)
testing.ObjectStoreContract, testing.RecordStoreContract; print("dagster" in sys.modules)
print("pytest" in sys.modules, hasattr(testing, "no such name"))
"""
    assert run_python(code).split() == ["False", "False", "True", "False"]


MUTANTS = {
    "Sound": "pass",
    "CreateOverwrites": "def create(self, key, body): self.put(key, body)",
    "CreateLooksFirst": """
    def create(self, key, body):
        try:
            self.head(key)
        except ObjectNotFoundError:
            time.sleep(0.05)
            return self.put(key, body)
        raise ObjectExistsError(f"{self.url}/{key}", store=self.url, key=key)""",
    "ShortRanges": "def get_ranges(self, key, ranges): return [self.get(key)[a:b] for a, b in ranges]",
    "Unordered": "def list(self, *args): return iter([*super().list(*args)][::-1])",
    "OnePage": "def list(self, *args): return iter([*super().list(*args)][:1000])",
    "DeletesBelow": """
    def delete(self, keys):
        super().delete(i.key for i in self.list("") if any(i.key.startswith(key) for key in keys))""",
    "AnyKey": "def put(self, key, body): self._objects[key] = (b.join(as_buffers(body)), datetime.now(UTC))",
    "HeadOfLongAgo": """
    def head(self, key):
        return replace(super().head(key), last_modified=datetime(2020, 1, 1, tzinfo=UTC))""",
    "TimeOfTheFirstWrite": """
    def put(self, key, body):
        first = self._objects.get(key)
        super().put(key, body)
        if first:
            self._objects[key] = self._objects[key]._replace(modified=first.modified)""",
    "NoZone": "def head(self, key): return replace(super().head(key), last_modified=datetime.now())",
}


def test_the_suite_finds_broken_stores(tmp_path: Path) -> None:
    """Each mutant fails at least one of its tests; the store without a bug fails none."""
    head = """
import time
from dataclasses import replace
from datetime import UTC, datetime
import pytest
from dagster_resilient.errors import ObjectExistsError, ObjectNotFoundError
from dagster_resilient.storage.memory_store import MemoryObjectStore
from dagster_resilient.storage.object_store import as_buffers
from dagster_resilient.testing import ObjectStoreContract
"""
    store = """
class {name}(MemoryObjectStore):
    {body}

class Test{name}(ObjectStoreContract):
    big = 1_000_000

    @pytest.fixture
    def opener(self, tmp_path):
        return lambda: {name}(str(tmp_path))
"""
    stores = [store.format(name=name, body=body) for name, body in MUTANTS.items()]
    (tmp_path / "test_mutants.py").write_text("\n".join([head, *stores]))
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    failed = set(re.findall(r"^FAILED .*::Test(\w+)::", done.stdout, re.MULTILINE))
    assert failed == {*MUTANTS} - {"Sound"}, done.stdout + done.stderr


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
