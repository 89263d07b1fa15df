"""The narrow interface to object storage, and `open_store`, which picks an implementation for a URL.

Timing, which every implementation keeps:

- When `put` or `create` returns, the object is whole and durable, as far as the store promises durability. When it
  raises, the object is whole or absent, never in part.
- `create` is decided by the store in one conditional request. Where the reply was lost, the caller cannot tell a
  conflict with itself from a conflict with others; `state.store` resolves that by reading back.
- `get`, `head` and `list` see every write that was acknowledged before they began, whichever process made it.
- Buffers passed to `put` and `create` may be changed again when the call has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says about one object.

    Attributes:
        key: Key relative to the root of the store.
        size: Bytes.
        last_modified: By the store's clock, with time zone.
    """

    key: str
    size: int
    last_modified: datetime


class ObjectStore(ABC):
    """A flat map from key to bytes under one root URL.

    Attributes:
        url: The root as a person would write it, without credentials.
        is_shared: Whether other processes see the same objects. False for `memory://`.
    """

    url: str
    is_shared: bool = True

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the whole object.

        Raises:
            ObjectNotFoundError: No object has this key.
            StorageError: The store failed; see the tree in `errors`.
        """

    @abstractmethod
    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each half-open range ``(start, end)``, in the order asked for."""

    @abstractmethod
    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object atomically, whether or not one was there."""

    @abstractmethod
    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key, decided by the store.

        Raises:
            ObjectExistsError: An object was there. After a lost reply it may be our own.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size and time without the bytes. Raises `ObjectNotFoundError`."""

    @abstractmethod
    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix that ends in ``/``, in order of key.

        Args:
            prefix: A folder-like prefix, or "" for all.
            start_after: Yield only keys greater than this one. Give it only where the siblings have names of one
                fixed width: some servers answer it wrongly among names that differ in ``-`` or ``.``.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys, no patterns. A key that is not there is no error."""

    @abstractmethod
    def sidecar_config(self) -> Mapping[str, Any]:
        """What a process that has only obstore needs to open this store again. Holds credentials: never print it."""


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> ObjectStore:
    """Open the store at a URL.

    Args:
        url: ``s3://bucket/prefix``, ``file:///path``, a plain path, or ``memory://name``. Slashes that are doubled or
            at the end mean nothing.
        storage_options: As fsspec spells them, for S3: ``key``, ``secret``, ``token``, ``endpoint_url``,
            ``client_kwargs={"region_name": ..., "endpoint_url": ...}``, ``anon``. The environment (``AWS_*``) fills the rest.

    Raises:
        ConfigurationError: The scheme or an option is not known, or the URL names no bucket.
    """
    from dagster_resilient.storage.obstore_store import open_obstore  # noqa: PLC0415 - obstore loads only when used

    return open_obstore(url, dict(storage_options or {}))
