"""A store that fails on command, and keeps a record of what it was asked.

store = FaultStore(open_store("memory://x"), {3: Fault("lose_reply"), 5: Fault("fail")})
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from dagster_resilient.errors import StorageError, StoreUnavailableError
from dagster_resilient.storage.object_store import Buffer, Leftover, ObjectInfo, ObjectStore, as_buffers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on a store.

    Attributes:
        verb: Name of the method.
        key: Its key; for `list` its prefix, for `delete` its keys joined by a blank, for `discard` the leftover's name.
    """

    verb: str
    key: str


Unlawful = Literal["corrupt_read", "torn_read", "corrupt_write", "stale_list"]
Kind = Literal["fail", "torn", "no_space", "lose_reply", "die_before", "die_after", "delay"] | Unlawful


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at one operation.

    Attributes:
        kind: One of

            - ``fail``: the request is lost, the store never sees it: `StoreUnavailableError`.
            - ``torn``: a write breaks off half way: `StoreUnavailableError`. Nothing of it is visible, as
              `object_store` promises; in a directory its temporary file stays.
            - ``no_space``: the store is full: `StorageError`.
            - ``lose_reply``: the store does it, and the reply is lost: `StoreUnavailableError`.
            - ``die_before``, ``die_after``: this process gets SIGKILL before or after the store does it. Nothing is
              cleaned up, no handler runs, as when a machine is lost.
            - ``delay``: nothing but the delay.

            Some are what no store may do. They show that a reader checks what it gets; where the operation is of
            another kind, they do nothing:

            - ``corrupt_read``: one bit of what `get` or `get_ranges` returns is flipped.
            - ``torn_read``: what they return lacks its last byte.
            - ``corrupt_write``: one bit of what `put`, `create` or `replace` writes is flipped on the way.
            - ``stale_list``: a listing lacks the newest objects, as if it came from a cache.
        seconds: Delay before the operation.
        lacks: How many objects a stale listing lacks.
    """

    kind: Kind
    seconds: float = 0.0
    lacks: int = 1


Plan = Mapping[int, Fault] | Callable[[int, Operation], Fault | None]


class FaultStore(ObjectStore):
    """A store around another one that follows a plan of faults, and records every operation.

    Put it inside a `RetryingStore` to see what a caller sees after retries, or use it bare to see each fault.

    Attributes:
        operations: All operations so far, in the order in which they began. Their indexes are the numbers of the plan.
        down: While True, every operation fails before it reaches the store. See also `outage`.
        honours_conditions: Where False, `create` and `replace` overwrite: a server that ignores ``If-None-Match`` and
            ``If-Match``.
        endpoint: A name of its own, so that its faults open no circuit breaker of the store inside.
    """

    def __init__(self, inner: ObjectStore, plan: Plan | None = None, *, honours_conditions: bool = True) -> None:
        """Wrap a store.

        Args:
            inner: The store that does the work.
            plan: Faults by the number of the operation, from 0; or a function of number and operation.
            honours_conditions: See the attribute.
        """
        self.url = inner.url
        self.is_shared = inner.is_shared
        self.checks_bodies = inner.checks_bodies
        self.replaces = inner.replaces
        self.endpoint = uuid.uuid4().hex
        self.operations: list[Operation] = []
        self.down = False
        self.honours_conditions = honours_conditions
        self._inner = inner
        self._plan = plan or {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FaultStore({self._inner!r})"

    def count(self, verb: str) -> int:
        """Return how often an operation was called."""
        return sum(operation.verb == verb for operation in self.operations)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Be down inside the block."""
        self.down = True
        try:
            yield
        finally:
            self.down = False

    def _run(self, verb: str, key: str, call: Callable[[], T], flipped: Callable[[], T] | None = None) -> T:
        operation = Operation(verb, key)
        with self._lock:
            number = len(self.operations)
            self.operations.append(operation)
        if self.down:
            raise self._unavailable(operation, "the store is down")
        fault = self._plan(number, operation) if callable(self._plan) else self._plan.get(number)
        if fault is None:
            return call()
        self._before(fault, operation)
        result = flipped() if flipped is not None and fault.kind == "corrupt_write" else call()
        self._after(fault, operation)
        return cast("T", _spoiled(fault, result))

    def _before(self, fault: Fault, operation: Operation) -> None:
        if fault.seconds:
            time.sleep(fault.seconds)
        if fault.kind == "die_before":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "fail":
            raise self._unavailable(operation, "the request was lost")
        if fault.kind == "torn":
            self._leave_temporary(operation.key)
            raise self._unavailable(operation, "the connection broke in the middle of the body")
        if fault.kind == "no_space":
            message = f"Could not {operation.verb} {self.url}/{operation.key}: {os.strerror(errno.ENOSPC)}."
            raise StorageError(message, store=self.url, key=operation.key)

    def _after(self, fault: Fault, operation: Operation) -> None:
        if fault.kind == "die_after":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "lose_reply":
            raise self._unavailable(operation, "the reply was lost")

    def _unavailable(self, operation: Operation, reason: str) -> StoreUnavailableError:
        message = f"Could not {operation.verb} {self.url}/{operation.key}: {reason}."
        return StoreUnavailableError(message, store=self.url, key=operation.key)

    def _leave_temporary(self, key: str) -> None:
        """Leave in a directory what a killed writer leaves there."""
        if self.url.startswith("file://"):
            folder = (Path(self.url.removeprefix("file://")) / key).parent
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"part#{secrets.randbits(63)}").write_bytes(b"torn")

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._run("get", key, lambda: self._inner.get(key))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        return self._run("get_ranges", key, lambda: self._inner.get_ranges(key, ranges))

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object."""
        views = as_buffers(buffers)
        self._run("put", key, lambda: self._inner.put(key, views), lambda: self._inner.put(key, _flipped(views)))

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key, unless conditions are ignored."""
        views = as_buffers(buffers)
        write = self._inner.create if self.honours_conditions else self._inner.put
        self._run("create", key, lambda: write(key, views), lambda: write(key, _flipped(views)))

    def replace(self, key: str, buffers: Buffer | Iterable[Buffer], version: str) -> str:
        """Overwrite an object of this version, or of any where conditions are ignored."""
        views = as_buffers(buffers)

        def write(body: Sequence[Buffer]) -> str:
            known = version if self.honours_conditions else self._inner.head(key).version or version
            return self._inner.replace(key, body, known)

        return self._run("replace", key, lambda: write(views), lambda: write(_flipped(views)))

    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        return self._run("head", key, lambda: self._inner.head(key))

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix."""
        return iter(self._run("list", prefix, lambda: [*self._inner.list(prefix, start_after)]))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys."""
        doomed = [*keys]
        self._run("delete", " ".join(doomed), lambda: self._inner.delete(doomed))

    def leftovers(self) -> Iterator[Leftover]:
        """Yield what killed writers left."""
        return iter(self._run("leftovers", "", lambda: [*self._inner.leftovers()]))

    def discard(self, leftover: Leftover) -> None:
        """Remove a leftover."""
        self._run("discard", leftover.name, lambda: self._inner.discard(leftover))

    def is_made(self) -> bool:
        """Return what the store inside returns."""
        return self._inner.is_made()

    def sidecar_config(self) -> Mapping[str, Any]:
        """Return what the store inside returns."""
        return self._inner.sidecar_config()


def _spoiled(fault: Fault, result: Any) -> Any:
    """Return what an operation returns under a fault that no store may have."""
    if fault.kind == "stale_list" and isinstance(result, list):
        return _without_newest(result, fault.lacks)
    if fault.kind not in {"corrupt_read", "torn_read"} or not isinstance(result, (bytes, list)):
        return result
    spoil: Callable[[bytes], bytes] = _flip if fault.kind == "corrupt_read" else _without_last_byte
    if isinstance(result, bytes):
        return spoil(result)
    hit = next((n for n, part in enumerate(result) if isinstance(part, bytes) and part), None)
    return [spoil(part) if n == hit else part for n, part in enumerate(result)]


def _without_last_byte(body: bytes) -> bytes:
    return body[:-1]


def _without_newest(listed: list[Any], lacks: int) -> list[Any]:
    """The newest by the store's clock, which may show full seconds only; then the greatest key."""

    def age(info: ObjectInfo) -> tuple[datetime, str]:
        return info.last_modified, info.key

    newest = sorted((info for info in listed if isinstance(info, ObjectInfo)), key=age)[len(listed) - lacks :]
    return [info for info in listed if info not in newest]


def _flip(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else body


def _flipped(views: Sequence[memoryview]) -> Sequence[bytes]:
    return [_flip(b"".join(views))]
