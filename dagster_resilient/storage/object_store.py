"""The narrow interface to object storage, and `open_store`, which picks an implementation for a URL.

Timing, which every implementation keeps:

- When `put` or `create` returns, the object is whole and durable, as far as the store promises durability. When it
  raises, the object is whole or absent, never in part.
- `create` is decided by the store in one conditional request. Where the reply was lost, the caller cannot tell a
  conflict with itself from a conflict with others; `retry.RetryingStore` resolves that by reading back.
- `get`, `head` and `list` see every write that was acknowledged before they began, whichever process made it.
- Buffers passed to `put` and `create` may be changed again when the call has returned.
- A store may be used by many threads, and by a process that was forked from one that uses it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from os import PathLike, fspath
from typing import Any

from dagster_resilient.errors import ConfigurationError

Buffer = bytes | bytearray | memoryview
_UNFIT = re.compile(r"\.{0,2}|.*\0.*|.*#\d+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says about one object.

    Attributes:
        key: Key relative to the root of the store.
        size: Bytes.
        last_modified: By the store's clock, with time zone.
        version: What `ObjectStore.replace` takes (an ETag); None where the store has none. A listing may leave it out.
    """

    key: str
    size: int
    last_modified: datetime
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a killed writer left outside all keys: a temporary file, or an upload in parts that was never completed.

    Attributes:
        name: How the store names it; only `ObjectStore.discard` understands it.
        size: Bytes, as far as the store tells; else 0.
        last_modified: When it was begun or last written, by the store's clock.
    """

    name: str
    size: int
    last_modified: datetime


class ObjectStore(ABC):
    """A flat map from key to bytes under one root URL.

    Attributes:
        url: The root as a person would write it, without credentials.
        is_shared: Whether other processes see the same objects. False for `memory://`.
        checks_bodies: Whether the store itself refuses a write whose bytes were changed on the way. Where not, a
            verified write reads back what was written.
        replaces: Whether the store has `replace`.
    """

    url: str
    is_shared: bool = True
    checks_bodies: bool = True
    replaces: bool = False

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the whole object.

        Raises:
            ObjectNotFoundError: No object has this key.
            StorageError: The store failed; see the tree in `errors`.
        """

    @abstractmethod
    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each half-open range ``(start, end)``, in the order asked for.

        Raises:
            StorageError: A range ends beyond the object: fewer bytes than asked for are never returned.
        """

    def is_made(self) -> bool:
        """Whether the place is there and is a store's. False where only the first write makes it, as with a directory.

        Raises:
            StoreUnavailableError: It was there, and has gone.
        """
        return True

    def get_into(self, key: str, buffer: bytearray | memoryview, start: int = 0) -> None:
        """Fill a buffer with the bytes of an object from `start` on: fresh memory costs more than a copy into used one.

        Args:
            key: The object.
            buffer: A writable, contiguous buffer. After an error its content is undefined.
            start: Where in the object to begin.

        Raises:
            ObjectNotFoundError: No object has this key.
            StorageError: The object ends before the buffer is full.
        """
        view = memoryview(buffer).cast("B")
        view[:] = self.get_ranges(key, [(start, start + view.nbytes)])[0]

    @abstractmethod
    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object atomically, whether or not one was there."""

    @abstractmethod
    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key, decided by the store.

        Raises:
            ObjectExistsError: An object was there. After a lost reply it may be our own.
        """

    def replace(self, key: str, buffers: Buffer | Iterable[Buffer], version: str) -> str:  # noqa: ARG002 - see below
        """Overwrite an object only if it is still the one that `head` told of (if-match), decided by the store.

        Args:
            key: The object.
            buffers: Its new bytes.
            version: `ObjectInfo.version` of what may be overwritten.

        Returns:
            The new version.

        Raises:
            VersionConflictError: The object was changed, or is gone. After a lost reply the change may be our own.
            ConfigurationError: The store has no such operation; see `replaces`.
        """
        raise ConfigurationError(f"{self.url} cannot replace {key} by version: this kind of store has no if-match.")

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size and time without the bytes.

        Raises:
            ObjectNotFoundError: No object has this key; on S3 also where there is no such bucket, since the answer to
                HEAD carries no reason.
        """

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

    def leftovers(self) -> Iterator[Leftover]:
        """Yield what killed writers left under this root, where no `list` shows it. Other roots' are never shown."""
        return iter(())

    def discard(self, leftover: Leftover) -> None:  # noqa: B027 - a store without leftovers has nothing to discard
        """Remove a leftover. Its writer, if it still lives, gets an error when it tries to finish; nothing is lost."""

    def filesystem(self) -> Any:
        """Return the store as an fsspec filesystem whose paths are keys, for other libraries; see `filesystem`."""
        from dagster_resilient.storage.filesystem import StoreFileSystem  # noqa: PLC0415 - loads only when used

        return StoreFileSystem(self)

    @abstractmethod
    def sidecar_config(self) -> Mapping[str, Any]:
        """What a process that has only obstore needs to open this store again. Holds credentials: never print it."""


def check_key(key: str) -> str:
    """Return a key that every store can hold, and that no store could take for another one.

    Raises:
        ConfigurationError: A segment is empty, ``.`` or ``..`` (a directory would be left), holds a NUL, or ends in
            ``#`` and digits (the name of a local temporary file).
    """
    if any(_UNFIT.fullmatch(segment) for segment in key.split("/")):
        raise ConfigurationError(f"{key!r} is no key of a store; build keys with `storage.keys`.")
    return key


def check_prefix(prefix: str) -> str:
    """Return a prefix for `list`: "", or a key and a slash. Stores disagree on what anything else means."""
    if prefix and not prefix.endswith("/"):
        raise ConfigurationError(f"The prefix {prefix!r} does not end in a slash.")
    if prefix:
        check_key(prefix[:-1])
    return prefix


def as_buffers(buffers: Buffer | Iterable[Buffer]) -> Sequence[memoryview]:
    """Return one or many buffers as a sequence of byte views. Nothing is copied, unless a view has gaps.

    A sequence, because a second try needs the first buffer again.
    """
    whole: Any = buffers
    try:
        return [_byte_view(memoryview(whole))]
    except TypeError:
        return [_byte_view(memoryview(one)) for one in whole]


def _byte_view(view: memoryview) -> memoryview:
    """A view with a stride, a zero in its shape or a format other than a plain number cannot be cast."""
    if view.c_contiguous and view.nbytes and len(view.format) == 1:
        return view.cast("B")
    return memoryview(view.tobytes())


def open_store(url: str | PathLike[str], storage_options: Mapping[str, Any] | None = None) -> ObjectStore:
    """Open the store at a URL.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path``, a plain path, ``memory://name``, or the URL
            of any other fsspec filesystem. Slashes that are doubled or at the end mean nothing. As in fsspec, nothing
            in it is percent-decoded, and ``?`` and ``#`` are letters. ``fsspec+s3://``, ``fsspec+file://`` and
            ``fsspec+memory://`` take fsspec where we have a store of our own.
        storage_options: As fsspec spells them; for S3 see the how-to page. The environment (``AWS_*``) fills what is
            not given. Directories and memory take none.

    Raises:
        ConfigurationError: The scheme or an option is not known, the URL names no bucket, or the filesystem is not
            installed or cannot write an object whole.
    """
    from dagster_resilient.storage.urls import open_url  # noqa: PLC0415 - a store loads only when it is used

    return open_url(fspath(url), dict(storage_options or {}))
