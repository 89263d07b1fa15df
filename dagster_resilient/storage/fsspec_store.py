"""`ObjectStore` over any other fsspec filesystem: what fsspec promises, and no more.

Traps that this survives, each measured: listings answered from a cache after another process wrote; `rm` taking a name
for a pattern; an exception inside ``open(..., "wb")`` publishing what was written so far; `mv` putting a file into a
folder that has the new name; `walk` reading "permission denied" as "empty"; instances that do not survive a fork.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.dircache import DirCache

from dagster_resilient.errors import ConfigurationError, ObjectNotFoundError, StorageError, StoreUnavailableError
from dagster_resilient.storage.fsspec_errors import secrets_of, translated
from dagster_resilient.storage.object_store import (
    Buffer,
    Leftover,
    ObjectInfo,
    ObjectStore,
    as_buffers,
    check_key,
    check_prefix,
    open_store,
)

_S3 = {"s3", "s3a"}
_LOCAL = {"file", "local"}
_MEMORY = {"memory"}
_RENAMING = _LOCAL | {"sftp", "ssh"}
_PART, _PARTS = 50 * 2**20, 10_000  # s3fs's part size, and S3's greatest number of parts
_TEMPORARY = re.compile(r"part#\d+")
# In what order a filesystem's times are asked for; `created` serves where objects are never changed, only replaced.
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "last_write_time", "created")


class FsspecStore(ObjectStore):
    """A place in an fsspec filesystem.

    A write goes to a temporary name and is renamed (local, sftp, and others that can rename), or is one upload (object
    storage). `create` exists only where the filesystem decides it: S3, local files and memory. Elsewhere task state
    belongs in a database, and only the data here. A read asks for the size too: a short body is an error.

    Killed writers leave temporary files where writes are renamed, which `leftovers` shows. Uploads in parts that a
    killed process left in S3 are shown by the native store on the same place.

    Args:
        scheme: As fsspec knows it.
        place: What follows ``scheme://``, in its one spelling.
        options: The filesystem's own options.
        url: How the store is called.
    """

    checks_bodies = False

    def __init__(self, scheme: str, place: str, options: Mapping[str, Any], url: str) -> None:
        self.url = url
        self._class = _filesystem_class(scheme)
        self._scheme = scheme
        self._renames = _renames(scheme, self._class)
        self._root = str(self._class._strip_protocol(f"{scheme}://{place}")).rstrip("/")  # noqa: SLF001 - fsspec's own
        self._options = {**self._class._get_kwargs_from_urls(f"{scheme}://{place}"), **options}  # noqa: SLF001 - same
        self._secrets = secrets_of(options)
        self.is_shared = scheme not in _MEMORY
        # A filesystem with an event loop serves all threads; of others, each thread needs one of its own.
        shared = issubclass(self._class, AsyncFileSystem) or scheme in _LOCAL | _MEMORY
        self._opened: Any = SimpleNamespace() if shared else threading.local()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        with self._errors("read", key):
            size = self._stat(key).size
            # Alone s3fs would read a large object in several requests, which may meet two versions of it.
            one_request = {"max_concurrency": 1} if self._scheme in _S3 else {}
            body = bytes(self._fs.cat_file(self._path(key), **one_request))
        if len(body) < size:
            message = f"Could not read {self.url}/{key}: {len(body)} of {size} bytes came."
            raise StoreUnavailableError(message, store=self.url, key=key)
        return body

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        size = self.head(key).size
        if any(end > size for _, end in ranges):
            message = f"Could not read {self.url}/{key}: a range ends beyond its {size} bytes."
            raise StorageError(message, store=self.url, key=key)
        wanted = [(start, end) for start, end in ranges if start < end]
        starts, ends = [start for start, _ in wanted], [end for _, end in wanted]
        with self._errors("read", key):
            fs = self._fs
            bodies = fs.cat_ranges([self._path(key)] * len(wanted), starts, ends, on_error="raise") if wanted else []
        if any(len(body) != end - start for body, (start, end) in zip(bodies, wanted, strict=True)):
            message = f"Could not read {self.url}/{key}: a range came short."
            raise StoreUnavailableError(message, store=self.url, key=key)
        rest = iter(bodies)
        return [bytes(next(rest)) if start < end else b"" for start, end in ranges]

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object atomically."""
        views = as_buffers(buffers)  # outside: what their source raises is the caller's
        with self._errors("write", key):
            if self._renames:
                self._write_aside(key, views, self._rename)
            else:
                self._upload(key, b"".join(views), "overwrite")

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key.

        Raises:
            ConfigurationError: The filesystem does not decide it.
        """
        views = as_buffers(buffers)
        with self._errors("create", key):
            if self._scheme in _LOCAL:
                self._write_aside(key, views, os.link)
            elif self._scheme in _MEMORY:
                self._add_to_memory(key, b"".join(views))
            elif self._scheme in _S3:
                self._upload(key, b"".join(views), "create")
            else:
                raise ConfigurationError(
                    f"{self.url} cannot create an object only if absent: fsspec's {self._scheme} does not decide it, "
                    "and two runs could own one task. Keep the state in PostgreSQL or SQLite, and only the data here."
                )

    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        with self._errors("read", key):
            return self._stat(key)

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix. What is no key is left out: folder markers, and the prefix itself."""
        with self._errors("list", check_prefix(prefix)):
            found = self._flat(prefix) if self._scheme in _S3 else self._walk(self._fs, prefix)
            infos = sorted((self._info(name, at) for name, at in found if _is_key(name)), key=lambda info: info.key)
        yield from (info for info in infos if start_after is None or info.key > start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys."""
        for key in keys:
            with contextlib.suppress(ObjectNotFoundError), self._errors("delete", key):
                if self._scheme not in _S3:
                    self._stat(key)  # some filesystems would remove an empty folder of this name
                self._fs.rm_file(self._path(key))

    def leftovers(self) -> Iterator[Leftover]:
        """Yield the temporary files that killed writers left."""
        if not self._renames:
            return
        with self._errors("list", ""):
            found = [(name, at) for name, at in self._walk(self._fs, "") if _TEMPORARY.fullmatch(name.split("/")[-1])]
        for name, at in found:
            yield Leftover(name, int(at["size"]), self._info(name, at).last_modified)

    def discard(self, leftover: Leftover) -> None:
        """Remove a temporary file."""
        with contextlib.suppress(ObjectNotFoundError), self._errors("delete", leftover.name):
            self._fs.rm_file(f"{self._root}/{leftover.name}")

    def sidecar_config(self) -> Mapping[str, Any]:
        """Return what obstore needs for the same place.

        Raises:
            ConfigurationError: obstore does not know the filesystem, or one of its options.
        """
        if self._scheme in _LOCAL:
            return {"kind": "local", "path": self._root}
        if self._scheme in _S3:
            return open_store(f"s3://{self._root}", self._options).sidecar_config()
        raise ConfigurationError(f"{self.url} cannot be opened by a heartbeat process, which has no fsspec.")

    @property
    def _fs(self) -> Any:
        """The filesystem of this process (and thread), without anything remembered."""
        opened: dict[int, Any] = self._opened.__dict__
        fs = opened.get(os.getpid())
        if fs is None:
            # What a fork has inherited stays referenced: to drop it would say goodbye on its parent's connection.
            fs = opened[os.getpid()] = self._open()
        fs.invalidate_cache()
        return fs

    def _open(self) -> Any:
        try:
            fs = self._class(**{**self._options, "skip_instance_cache": True})
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigurationError(
                f"{self.url} could not be opened: fsspec's {self._scheme} refuses its options ({type(error).__name__})."
            ) from None  # its text may hold one
        fs.dircache = DirCache(use_listings_cache=False)
        return fs

    def _path(self, key: str) -> str:
        if "?versionId=" in check_key(key):
            raise ConfigurationError(f"{key!r} is no key for {self.url}: fsspec takes ?versionId= for a version.")
        return f"{self._root}/{key}"

    def _stat(self, key: str) -> ObjectInfo:
        fs, path = self._fs, self._path(key)
        at = fs.info(path)
        if at["type"] == "directory" and not (self._scheme in _MEMORY and fs.isfile(path)):
            raise ObjectNotFoundError(f"No object at {self.url}/{key}.", store=self.url, key=key)
        return self._info(key, at)

    def _info(self, key: str, at: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(key, int(at["size"]), self._time(key, at))

    def _time(self, key: str, at: Mapping[str, Any]) -> datetime:
        for name in _TIMES:
            moment = _moment(at.get(name))
            if moment is not None:
                return moment
        try:
            moment = _moment(self._fs.modified(f"{self._root}/{key}"))
        except NotImplementedError:
            moment = None
        if moment is None:
            raise ConfigurationError(f"{self.url} has no times: fsspec's {self._scheme} does not tell when {key} came.")
        return moment

    def _walk(self, fs: Any, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield name and entry of all that is below a prefix. What is deleted meanwhile is left out."""
        folder = f"{self._root}/{prefix}".rstrip("/") or "/"
        try:
            entries = fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for at in entries:
            path = at["name"].rstrip("/")
            name = path.rpartition("/")[2]
            if not name or path.strip("/") == folder.strip("/"):
                continue  # a folder's marker, or the object of the prefix's own name
            kind = at["type"]
            if kind not in {"file", "directory"}:
                kind = fs.info(path)["type"]  # follows a link
            if kind == "directory":
                yield from self._walk(fs, f"{prefix}{name}/")
            else:
                yield prefix + name, at

    def _flat(self, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the same from one listing, where the filesystem has no folders."""
        top = f"{self._root}/{prefix}"
        for name, at in self._fs.find(top.rstrip("/"), detail=True).items():
            if name.startswith(top) and at["type"] != "directory":
                yield name[len(self._root) + 1 :], at

    def _upload(self, key: str, body: bytes, mode: str) -> None:
        options: dict[str, Any] = {}
        if self._scheme in _S3:
            options = {"mode": mode, "chunksize": max(_PART, len(body) // _PARTS + 1)}
        self._fs.pipe_file(self._path(key), body, **options)

    def _add_to_memory(self, key: str, body: bytes) -> None:
        """One operation on a dict, which is atomic between threads; fsspec's own mode looks first and then writes."""
        from fsspec.implementations.memory import MemoryFile  # noqa: PLC0415 - loads only when used

        path = self._path(key)
        new = MemoryFile(self._fs, path, body)
        if self._fs.store.setdefault(path, new) is not new:
            raise FileExistsError(path)

    def _write_aside(self, key: str, views: Sequence[memoryview], publish: Callable[[str, str], object]) -> None:
        """Write a temporary file beside the target, since a rename works only within one file system."""
        fs, target = self._fs, self._path(key)
        folder = target.rpartition("/")[0] or "/"
        temporary = f"{folder.rstrip('/')}/part#{secrets.randbits(63)}"
        _make_folders(fs, folder)
        try:
            self._write_whole(fs, temporary, views)
            if fs.info(temporary)["size"] != sum(view.nbytes for view in views):
                raise StoreUnavailableError(f"{self.url} kept only part of {key}.", store=self.url, key=key)
            publish(temporary, target)
            if self._scheme in _LOCAL:
                _sync_folder(folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(temporary)

    def _write_whole(self, fs: Any, path: str, views: Sequence[memoryview]) -> None:
        with fs.open(path, "wb") as file:
            for view in views:
                file.write(view)
            if self._scheme in _LOCAL:
                file.flush()
                os.fsync(file.fileno())

    def _rename(self, temporary: str, target: str) -> None:
        """Replace the target. Not fsspec's `mv` on local files: it moves into a folder of the target's name."""
        if self._scheme in _LOCAL:
            os.replace(temporary, target)  # noqa: PTH105 - both are strings
        else:
            self._fs.mv(temporary, target)

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, ConfigurationError):
            raise
        except Exception as error:  # noqa: BLE001 - a filesystem raises what its client raises, of any class
            raised = translated(error, verb, self.url, key, self._secrets)
            raise raised from raised.__cause__


def _filesystem_class(scheme: str) -> Any:
    """Return fsspec's class for a scheme, if objects can be written and deleted there.

    Raises:
        ConfigurationError: There is none, its package is not installed, or it cannot do so.
    """
    try:
        found = fsspec.get_filesystem_class(scheme or "(none)")
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"The store URL has the scheme {scheme!r}, which is not known here: {error}"
        ) from error
    deletes = _overrides(found, "rm_file", "_rm", "_rm_file")
    writes = scheme in _RENAMING | _S3 | _MEMORY or _overrides(found, "pipe_file", "_pipe_file", "mv")
    if not (deletes and writes):
        raise ConfigurationError(
            f"fsspec's {scheme} can hold no store: it cannot write an object whole, by one upload or by a rename, or "
            "cannot delete one."
        )
    return found


def _renames(scheme: str, found: Any) -> bool:
    return scheme in _RENAMING or (
        scheme not in _S3 | _MEMORY and not _overrides(found, "pipe_file", "_pipe_file") and _overrides(found, "mv")
    )


def _overrides(found: Any, *names: str) -> bool:
    """Whether a filesystem has one of these methods itself: fsspec's own are made of others, or not there."""
    bases = (fsspec.AbstractFileSystem, AsyncFileSystem)
    return any(getattr(found, name, None) not in [getattr(base, name, None) for base in bases] for name in names)


def _is_key(name: str) -> bool:
    try:
        check_key(name)
    except ConfigurationError:
        return False
    return True


def _moment(value: Any) -> datetime | None:
    """Return a time with time zone of what a filesystem tells. A number counts seconds; without zone, UTC is meant."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, (int, float)):
        return datetime.fromtimestamp(value, UTC)
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def _make_folders(fs: Any, folder: str) -> None:
    """Some filesystems look before they make each folder, and fail where another writer was faster."""
    try:
        fs.makedirs(folder, exist_ok=True)
    except FileExistsError as error:
        if not fs.isdir(folder):  # there is an object of that name
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from error
    except OSError:
        if not fs.isdir(folder):
            raise


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
