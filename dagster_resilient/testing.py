"""What we test ourselves with, for others to test theirs: a store that fails on command, and a clock that waits.

store = FaultStore(open_store("memory://x"), {3: LoseReply(), 5: Fail()})
clock = FakeClock()
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from dagster_resilient.errors import StorageError, StoreUnavailableError
from dagster_resilient.storage.object_store import Buffer, ObjectInfo, ObjectStore, as_buffers

T = TypeVar("T")

__all__ = ["FakeClock", "Fault", "FaultStore", "Operation"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on a store.

    Attributes:
        verb: Name of the method.
        key: Its key, its prefix for `list`, or its keys joined by a blank for `delete`.
    """

    verb: str
    key: str


Kind = Literal["fail", "torn", "no_space", "lose_reply", "die_before", "die_after", "delay"]


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
        seconds: Delay before the operation.
    """

    kind: Kind
    seconds: float = 0.0


Plan = Mapping[int, Fault] | Callable[[int, Operation], Fault | None]


class FaultStore(ObjectStore):
    """A store around another one that follows a plan of faults, and records every operation.

    Put it inside a `RetryingStore` to see what a caller sees after retries, or use it bare to see each fault.

    Attributes:
        operations: All operations so far, in the order in which they began. Their indexes are the numbers of the plan.
        down: While True, every operation fails before it reaches the store. See also `outage`.
        honours_conditions: Where False, `create` overwrites: a server that ignores ``If-None-Match``.
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

    def _run(self, verb: str, key: str, call: Callable[[], T]) -> T:
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
        result = call()
        self._after(fault, operation)
        return result

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
        self._run("put", key, lambda: self._inner.put(key, views))

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key, unless conditions are ignored."""
        views = as_buffers(buffers)
        write = self._inner.create if self.honours_conditions else self._inner.put
        self._run("create", key, lambda: write(key, views))

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

    def sidecar_config(self) -> Mapping[str, Any]:
        """Return what the store inside returns."""
        return self._inner.sidecar_config()


class FakeClock:
    """A clock that stands still until it is moved. Call it for the time in seconds; `sleep` moves it on.

    Attributes:
        slept: The durations that `sleep` was called with.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self.slept: list[float] = []

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on. A monotonic clock never goes back."""
        if seconds < 0:
            raise ValueError(f"A monotonic clock cannot go back by {-seconds} s.")
        self._now += seconds

    def sleep(self, seconds: float) -> None:
        """Note the duration and move on by it, in no time."""
        self.slept.append(seconds)
        self.advance(max(seconds, 0.0))
