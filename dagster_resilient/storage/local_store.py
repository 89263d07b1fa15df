"""`ObjectStore` in a directory: whole files only, durable, and create-if-absent decided by the file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage.local_root import MARK, Root
from dagster_resilient.storage.object_store import (
    Buffer,
    Leftover,
    ObjectInfo,
    ObjectStore,
    as_buffers,
    check_key,
    check_prefix,
)

_TEMPORARY = re.compile(r".*#\d+", re.DOTALL)
# What a disk, a network mount or a busy machine may get over. Everything else stays as it is, however often one asks.
_PASSING = {
    *(errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
}
_AHEAD = 8 * 1024 * 1024  # after so many bytes the disk is told to begin
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE: begin, wait for nothing, promise nothing
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class LocalDirectoryStore(ObjectStore):
    """A directory. A write is a temporary file, fsync, then a link (create) or rename (put), then fsync of the folder.

    The temporary file lies beside its target, since a rename works only within one file system. Its name ends in ``#``
    and digits: no key does, and neither this store nor object_store's lists such names, so that a file which a killed
    process left behind is never seen.
    """

    def __init__(self, path: Path) -> None:
        # os.path.abspath: Path.absolute keeps "..", and resolve would follow links.
        self._path = Path(os.path.abspath(path.expanduser()))  # noqa: PTH100
        self.url = f"file://{self._path}"
        self._root = Root(self._path, self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        with self._errors("read", key):
            return self._file(key).read_bytes()

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        with self._errors("read", key), self._file(key).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if any(end > size for _, end in ranges):
                message = f"Could not read {self.url}/{key}: a range ends beyond its {size} bytes."
                raise StorageError(message, store=self.url, key=key)
            return [_read_range(file.fileno(), start, end) for start, end in ranges]

    def get_into(self, key: str, buffer: bytearray | memoryview, start: int = 0) -> None:
        """Fill a buffer straight from the file."""
        view = memoryview(buffer).cast("B")
        with self._errors("read", key), self._file(key).open("rb", buffering=0) as file:
            while view:
                count = os.preadv(file.fileno(), [view], start)
                if not count:
                    message = f"Could not read {self.url}/{key}: a range ends beyond the object."
                    raise StorageError(message, store=self.url, key=key)
                view, start = view[count:], start + count

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object atomically."""
        with self._errors("write", key):
            self._write(key, buffers, Path.replace)

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key: a hard link is refused where its name is taken."""
        with self._errors("create", key):
            try:
                self._write(key, buffers, lambda temporary, target: target.hardlink_to(temporary))
            except FileExistsError as error:
                message = f"An object is already at {self.url}/{key}."
                raise ObjectExistsError(message, store=self.url, key=key) from error

    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        with self._errors("read", key):
            return _info(key, self._file(key).stat())

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix."""
        with self._errors("list", check_prefix(prefix)):
            self._look_at_root()
            found = sorted(_walk(self._path / prefix, prefix), key=lambda info: info.key)
        yield from (info for info in found if start_after is None or info.key > start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys. Their folders stay: removing one races with a writer that just made sure of it."""
        for key in keys:
            with contextlib.suppress(ObjectNotFoundError), self._errors("delete", key):
                self._file(key).unlink()

    def leftovers(self) -> Iterator[Leftover]:
        """Yield the temporary files, also those of writers that live: only their age tells them apart."""
        with self._errors("list the leftovers of", ""):
            self._look_at_root()
            found = sorted(_temporaries(self._path, ""), key=lambda one: one.name)
        yield from found

    def discard(self, leftover: Leftover) -> None:
        """Remove a temporary file."""
        *folders, name = leftover.name.split("/")
        if (
            not _TEMPORARY.fullmatch(name)
            or leftover.name == MARK
            or any(folder in {"", ".", ".."} for folder in folders)
        ):
            raise ConfigurationError(f"{leftover.name!r} is no temporary file of {self.url}.")
        with contextlib.suppress(ObjectNotFoundError), self._errors("delete", leftover.name):
            (self._path / leftover.name).unlink()

    def is_made(self) -> bool:
        """Whether there is a directory in which a store was written."""
        with self._errors("look at", ""):
            return self._root.is_made()

    def sidecar_config(self) -> Mapping[str, Any]:
        """Return the path."""
        return {"kind": "local", "path": str(self._path)}

    def _file(self, key: str) -> Path:
        """Return the path of an object that may be read. A folder is none, nor is what lies "under" an object."""
        path = self._path / check_key(key)
        with self._errors("open", key):
            self._look_at_root()
        if path.is_dir():
            raise ObjectNotFoundError(f"No object at {self.url}/{key}.", store=self.url, key=key)
        return path

    def _write(self, key: str, buffers: Buffer | Iterable[Buffer], publish: Callable[[Path, Path], object]) -> None:
        target = self._path / check_key(key)
        self._root.is_there()  # else made anew it would be an empty store, and every commit would go into it
        self._make_folder(target.parent)
        self._root.mark()
        temporary = target.with_name(f"part#{secrets.randbits(63)}")
        try:
            with temporary.open("xb", buffering=0) as file:
                _write_all(file.fileno(), as_buffers(buffers))
                os.fsync(file.fileno())
            publish(temporary, target)
            _sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def _look_at_root(self) -> None:
        """Before a read: an absent directory holds nothing, and is not made; one that has vanished is an outage."""
        if self._root.is_there():
            return
        nearest = next(path for path in (self._path, *self._path.parents) if os.path.lexists(path))
        if not nearest.is_dir():
            self._make_folder(self._path)  # says what is wrong with it

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents; sync each parent, or a power loss forgets the whole branch."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:
            if not folder.is_dir():  # else another writer was faster
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        _sync_folder(folder.parent)

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise self._translated(error, verb, key) from error

    def _translated(self, error: OSError, verb: str, key: str) -> StorageError:
        where = f"{self.url}/{key}"
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and verb in {"read", "delete"}:
            return ObjectNotFoundError(f"No object at {where}.", store=self.url, key=key)
        at = f" ({error.filename})" if error.filename else ""
        message = f"Could not {verb} {where}: {error.strerror or error}{at}."
        kind = StoragePermissionError if isinstance(error, PermissionError) else StorageError
        translated = (StoreUnavailableError if error.errno in _PASSING else kind)(message, store=self.url, key=key)
        translated.errno = error.errno  # ENOSPC and its like, for callers who look for them
        return translated


def _walk(folder: Path, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the objects under a folder."""
    for name, file in _files(folder, prefix):
        if not _TEMPORARY.fullmatch(file.name):
            with contextlib.suppress(FileNotFoundError):
                yield _info(name, file.stat())


def _temporaries(folder: Path, prefix: str) -> Iterator[Leftover]:
    """Yield the temporary files under a folder."""
    for name, file in _files(folder, prefix):
        if _TEMPORARY.fullmatch(file.name) and name != MARK:
            with contextlib.suppress(FileNotFoundError):
                info = _info(name, file.stat())
                yield Leftover(info.key, info.size, info.last_modified)


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files under a folder with their names. What another process deletes meanwhile is left out."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir():
            yield from _files(folder / entry.name, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC))


def _read_range(file: int, start: int, end: int) -> bytes:
    """One call may return less than asked for: Linux stops at 2 GiB."""
    pieces = []
    while start < end:
        piece = os.pread(file, end - start, start)
        if not piece:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _write_all(file: int, chunks: Iterable[memoryview]) -> None:
    """Write, and let the disk begin meanwhile: without that, half of the time is spent waiting in the fsync behind it.

    One call may take only part: a file-size limit or a nearly full disk does that once before it fails. What the hint
    misses, or a system without it, is left to fsync, which also reports every error.
    """
    written = begun = 0
    for whole in chunks:
        chunk = whole
        while chunk:
            count = os.write(file, chunk[:_AHEAD])
            chunk, written = chunk[count:], written + count
            if _sync_file_range is not None and written - begun >= _AHEAD:
                _sync_file_range(file, begun, written - begun, _BEGIN)
                begun = written


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
