"""`ObjectStore` in this process's memory, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dagster_resilient.errors import ConfigurationError, ObjectExistsError, ObjectNotFoundError, StorageError
from dagster_resilient.storage.object_store import Buffer, ObjectInfo, ObjectStore, as_buffers, check_key, check_prefix

_Object = tuple[bytes, datetime]
_STORES: dict[str, dict[str, _Object]] = {}


class MemoryObjectStore(ObjectStore):
    """Objects in this process's memory, shared by all who open the same name.

    Each operation is one operation on a dict, which is atomic between threads. There is no lock that a fork could
    inherit in a held state.
    """

    is_shared = False

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
        return self._find(key)[0]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        whole = self._find(key)[0]
        if any(end > len(whole) for _, end in ranges):
            message = f"Could not read {self.url}/{key}: a range ends beyond its {len(whole)} bytes."
            raise StorageError(message, store=self.url, key=key)
        return [whole[start:end] for start, end in ranges]

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object."""
        self._objects[check_key(key)] = _object(buffers)

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key."""
        new = _object(buffers)
        if self._objects.setdefault(check_key(key), new) is not new:
            raise ObjectExistsError(f"An object is already at {self.url}/{key}.", store=self.url, key=key)

    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        body, modified = self._find(key)
        return ObjectInfo(key, len(body), modified)

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix."""
        check_prefix(prefix)
        for key, (body, modified) in sorted(self._objects.copy().items()):
            if key.startswith(prefix) and (start_after is None or key > start_after):
                yield ObjectInfo(key, len(body), modified)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys."""
        for key in keys:
            self._objects.pop(check_key(key), None)

    def sidecar_config(self) -> Mapping[str, Any]:
        """Refuse: no second process can open it."""
        raise ConfigurationError(f"{self.url} exists in one process only; no second process can open it.")


def _object(buffers: Buffer | Iterable[Buffer]) -> _Object:
    return b"".join(as_buffers(buffers)), datetime.now(UTC)
