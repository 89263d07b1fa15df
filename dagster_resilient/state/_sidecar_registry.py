"""Which sidecars this process has started: one per store, run and role, closed when the process exits."""

from __future__ import annotations

import multiprocessing.util
import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """A sidecar, as far as it concerns the registry."""

    def close(self) -> None:
        """Say goodbye."""


C = TypeVar("C", bound=Closable)
Name = tuple[str, str, str]


class Registry(Generic[C]):
    """One sidecar per name. They are closed also where the process is a forked child, which skips `atexit`."""

    def __init__(self) -> None:
        self._live: dict[Name, C] = {}
        self._lock = threading.RLock()
        self._finalizer: list[multiprocessing.util.Finalize] = []
        os.register_at_fork(after_in_child=self._begin_anew)

    def get(self, name: Name, started: Callable[[], C]) -> C:
        """Return the one of this name; start it at the first call."""
        with self._lock:
            if name not in self._live:
                self._live[name] = started()
            if not self._finalizer:
                # Below 0: after multiprocessing has ended and joined our children, during which we still live.
                self._finalizer.append(multiprocessing.util.Finalize(None, self.close_all, exitpriority=-100))
            return self._live[name]

    def forget(self, sidecar: C) -> None:
        """Start another one at the next call.

        Takes no lock: the garbage collector may call this in a thread for whose start `get` waits under the lock.
        """
        for name in [name for name, known in list(self._live.items()) if known is sidecar]:
            self._live.pop(name, None)

    def close_all(self) -> None:
        """Close every one."""
        for sidecar in list(self._live.values()):
            sidecar.close()

    def _begin_anew(self) -> None:
        """A forked child beats for itself: it starts with no sidecar; and the inherited lock may be held for ever."""
        self._lock = threading.RLock()
        self._live.clear()
        self._finalizer.clear()
