"""Stores and clocks that a test of the sidecar holds in its hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from dagster_resilient.state._sidecar_store import Patience
from dagster_resilient.state._sidecar_work import Caller
from dagster_resilient.state.heartbeat import process_identity

LOG = "tasks/train/log/%-/"
KEY = "live/r/step-0a.json"
FENCE = "fences/r.json"
HUNG = "hung/r/step-0a.json"


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Objects:
    """A store in a dict. `before` is called with verb, key and limit, and may wait, or raise."""

    def __init__(self, before: Callable[[str, str, float], object] = lambda verb, key, limit: None) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.before = before

    def _note(self, verb: str, key: str, limit: float) -> None:
        self.calls.append((verb, key))
        self.before(verb, key, limit)

    def put(self, key: str, body: bytes, timeout: float) -> None:
        """Write an object."""
        self._note("put", key, timeout)
        self.objects[key] = body

    def get(self, key: str, timeout: float) -> bytes:
        """Read an object."""
        self._note("get", key, timeout)
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key]

    def delete(self, key: str, timeout: float) -> None:
        """Delete an object."""
        self._note("delete", key, timeout)
        self.objects.pop(key, None)

    def names(self, prefix: str, after: str | None, timeout: float) -> list[str]:
        """List what is behind `after`."""
        self._note("list", prefix, timeout)
        names = [key.removeprefix(prefix) for key in self.objects if key.startswith(prefix)]
        return [name for name in names if after is None or name > after]

    def count(self, verb: str) -> int:
        """How often a verb was called."""
        return sum(call[0] == verb for call in self.calls)

    def append(self, n: int, generation: int, **more: Any) -> None:
        """Write an entry of the log."""
        self.objects[f"{LOG}{n:010d}.json"] = json.dumps({"n": n, "generation": generation, **more}).encode()


def me() -> tuple[int, int]:
    """This process."""
    identity = process_identity(os.getpid())
    assert identity is not None
    return identity


def config(**changes: Any) -> dict[str, Any]:
    """What the parent tells the sidecar."""
    told = {"key": KEY, "fence_key": FENCE, "watches": [], "parent": me(), "worker": None, "store": {}}
    told |= {"hung_key": HUNG, "expects": [], "restarted": False}
    graces = {"fence_grace": 10.0, "term_grace": 10.0, "store_timeout": 5.0}
    return {**told, **graces, "beat": {"interval": 10.0, "ttl": 45.0, "host": os.uname().nodename}, **changes}


def a_caller(store: Objects, clock: Callable[[], float], told: list[dict[str, Any]] | None = None) -> Caller:
    """Return a caller that opens this store."""
    return Caller(lambda: store, Patience(5.0, 22.5), ([] if told is None else told).append, clock)
