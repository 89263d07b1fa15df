"""`ObjectStore` in this process's memory, for tests and notebooks."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    VersionConflictError,
)
from dagster_resilient.storage.object_store import Buffer, ObjectInfo, ObjectStore, as_buffers, check_key, check_prefix


class _Object(NamedTuple):
    body: bytes
    modified: datetime
    version: str

    def info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.body), self.modified, self.version)


_STORES: dict[str, dict[str, _Object]] = {}
_VERSIONS = itertools.count(1)


class _Writing:
    """The lock of all writers. Readers need none: they make one operation on a dict, which is atomic.

    A thread may take it again, since a signal's handler may write in the middle of a write.
    """

    lock = threading.RLock()


def _after_fork() -> None:
    """A fork may copy the lock while a thread, which it does not copy, holds it."""
    _Writing.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class MemoryObjectStore(ObjectStore):
    """Objects in this process's memory, shared by all who open the same name."""

    is_shared = False
    replaces = True

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self._objects = _STORES.setdefault(name, {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _find(self, key: str) -> _Object:
        found = self._objects.get(check_key(key))
        if found is None:
            raise ObjectNotFoundError(f"No object at {self.url}/{key}.", store=self.url, key=key)
        return found

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._find(key).body

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        whole = self._find(key).body
        if any(end > len(whole) for _, end in ranges):
            message = f"Could not read {self.url}/{key}: a range ends beyond its {len(whole)} bytes."
            raise StorageError(message, store=self.url, key=key)
        return [whole[start:end] for start, end in ranges]

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object."""
        new = _object(buffers)
        with _Writing.lock:
            self._objects[check_key(key)] = new

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key."""
        new = _object(buffers)
        with _Writing.lock:
            first = self._objects.setdefault(check_key(key), new) is new
        if not first:
            raise ObjectExistsError(f"An object is already at {self.url}/{key}.", store=self.url, key=key)

    def replace(self, key: str, buffers: Buffer | Iterable[Buffer], version: str) -> str:
        """Overwrite an object only if it is still the one of this version."""
        new = _object(buffers)
        with _Writing.lock:
            found = self._objects.get(check_key(key))
            if found is not None and found.version == version:
                self._objects[key] = new
                return new.version
        message = f"{self.url}/{key} was changed or deleted since its version was read."
        raise VersionConflictError(message, store=self.url, key=key)

    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        return self._find(key).info(key)

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix."""
        check_prefix(prefix)
        for key, found in sorted(self._objects.copy().items()):
            if key.startswith(prefix) and (start_after is None or key > start_after):
                yield found.info(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys."""
        for key in keys:
            with _Writing.lock:
                self._objects.pop(check_key(key), None)

    def sidecar_config(self) -> Mapping[str, Any]:
        """Refuse: no second process can open it."""
        raise ConfigurationError(f"{self.url} exists in one process only; no second process can open it.")


def _object(buffers: Buffer | Iterable[Buffer]) -> _Object:
    return _Object(b"".join(as_buffers(buffers)), datetime.now(UTC), str(next(_VERSIONS)))
