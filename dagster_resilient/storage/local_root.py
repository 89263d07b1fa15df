"""The directory of a store, told from any other that later stands under its path.

A directory that was unmounted leaves its mount point behind, an empty directory that looks like a new store: without
logs and fences, and every commit would go into it. So a store's directory carries a mark, and a process that has seen
it takes no other directory for it. Device and number of a directory tell cheaply whether to look; they alone would
refuse a network mount that came back with another device number.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from dagster_resilient.errors import StoreUnavailableError

# Of the form of temporary files, which listings leave out.
MARK = ".resilient#0"


class Root:
    """The directory at a path, as this process has seen it."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self._url = path, url
        self._place: tuple[int, int] | None = None
        self._mark: bytes | None = None

    def is_there(self) -> bool:
        """Whether there is a directory.

        Raises:
            StoreUnavailableError: There was one, and it has gone, or another one stands in its place.
        """
        place = self._look()
        if place is None and self._place is not None:
            raise self._gone("has vanished")
        if place is not None and place != self._place:
            mark = self._read()
            if self._place is not None and (mark is None or mark != self._mark):
                raise self._gone("is another directory than it was")
            self._place, self._mark = place, mark
        return place is not None

    def is_made(self) -> bool:
        """Whether a store was ever written here: an empty directory may be a mount point."""
        return self.is_there() and (self._mark is not None or any(os.scandir(self.path)))

    def mark(self) -> None:
        """Make sure that a directory that is there carries a mark. Where that cannot be, only less is noticed later."""
        if self._mark is None and self.is_there():
            with contextlib.suppress(OSError):  # no links, no space, no right: what needs them will say so itself
                self._mark = self._read() or self._make()

    def _look(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None

    def _read(self) -> bytes | None:
        try:
            return (self.path / MARK).read_bytes()
        except FileNotFoundError:
            return None

    def _make(self) -> bytes:
        """Write it elsewhere and link it, so that nobody reads half of it; whoever is first has made it."""
        made = secrets.token_hex(16).encode()
        temporary = self.path / f"part#{secrets.randbits(63)}"
        try:
            temporary.write_bytes(made)
            (self.path / MARK).hardlink_to(temporary)
        except FileExistsError:
            return (self.path / MARK).read_bytes()
        finally:
            temporary.unlink(missing_ok=True)
        return made

    def _gone(self, what: str) -> StoreUnavailableError:
        message = f"{self._url} {what} since this process opened it (unmounted, renamed, deleted?). Bring it back."
        return StoreUnavailableError(message, store=self._url)
