"""A store in processes that were forked from one that had used it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from dagster_resilient.errors import ConfigurationError, StorageError
from dagster_resilient.storage.object_store import ObjectStore

Place = tuple[str, dict[str, Any]]
RunPython = Callable[..., str]


def names(store: ObjectStore, prefix: str = "") -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in store.list(prefix)]


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


def test_a_forked_child_replaces_and_finds_leftovers(store: ObjectStore) -> None:
    """What is not read or written in the usual way works after a fork too, with the same errors."""
    store.put("a", b"1")

    def child() -> Any:
        seen: list[Any] = [len(list(store.leftovers()))]
        if store.replaces:
            known = store.head("a").version or ""
            again = store.replace("a", b"22", known)
            seen.append(again == store.head("a").version)
            try:
                store.replace("a", b"other", known)
            except StorageError as error:
                seen.append([type(error).__name__, error.key])
        buffer = bytearray(2)
        store.put("b", b"0123")
        store.get_into("b", buffer, 1)
        try:
            store.get("b/../a")
        except ConfigurationError as error:
            seen.append(type(error).__name__)
        return [*seen, buffer.decode()]

    expected = [True, ["VersionConflictError", "a"]] if store.replaces else []
    assert in_fork(child) == [0, *expected, "ConfigurationError", "12"]
