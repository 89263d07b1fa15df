"""A file that becomes an object when it is closed, and not when it is left."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

from dagster_resilient.storage.object_store import ObjectStore

_log = logging.getLogger(__name__)


class ObjectWriter(io.BufferedIOBase):
    """Keeps in memory what is written, and publishes it when it is closed: whole, or not at all.

    It is not published where its `with` block ends by an exception, nor where it is forgotten without being closed.
    Libraries close files in a `finally` of their own, which looks like an ordinary end: so a close while an exception
    is handled that was not yet there at the opening publishes nothing either, and raises that exception again.

    Args:
        store: Where to.
        key: The object.
        mode: ``wb``, or ``xb`` to be refused, at the end, where an object is.
        autocommit: Whether closing publishes; else `commit` does, as fsspec's transactions ask for.
    """

    def __init__(self, store: ObjectStore, key: str, mode: str, *, autocommit: bool = True) -> None:
        self._written = io.BytesIO()
        self._before = sys.exception()
        self._store, self._key = store, key
        self.mode = mode
        self.autocommit = autocommit

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store.url}/{self._key})"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publish, or discard after an exception."""
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        """Discard: whoever wrote it has not come to its end."""
        if not self.closed and "_written" in self.__dict__:
            _log.warning("%r was not closed, and is not published.", self)
            self.discard()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Append a copy of any buffer."""
        if self.closed:
            raise ValueError(f"{self!r} is closed.")
        return self._written.write(data)

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._written.tell()

    def close(self) -> None:
        """Publish, unless an exception is on its way.

        Raises:
            StorageError: The store failed: nothing was published.
        """
        if self.closed:
            return
        broken = sys.exception()
        try:
            if broken is not None and broken is not self._before:
                broken.add_note(f"{self!r} was closed while this was handled, and is not published.")
                raise broken
            if self.autocommit:
                self.commit()
        finally:
            super().close()

    def commit(self) -> None:
        """Publish what was written."""
        (self._store.create if self.mode == "xb" else self._store.put)(self._key, self._written.getbuffer())

    def discard(self) -> None:
        """Close without publishing."""
        super().close()


class TextWriter(io.TextIOWrapper):
    """Text on its way to an `ObjectWriter`. Python's own closes, and so publishes, the file when it is forgotten."""

    def __init__(self, writer: ObjectWriter, **options: Any) -> None:
        super().__init__(writer, **options)  # type: ignore[arg-type]  # it asks for a name, which it does not need
        self._writer = writer

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publish, or discard after an exception."""
        if kind is not None:
            self._writer.discard()
        self.close()

    def __del__(self) -> None:
        """Discard."""
        if not self.closed:
            self._writer.discard()
