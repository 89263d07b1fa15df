"""A store as an fsspec filesystem, so that pandas, pyarrow, DuckDB or torch read and write it.

Paths are keys, directories are what keys have in common, and nothing is remembered from an earlier look. What fsspec
does by default and this does not: publish a file whose writing was broken off, take a name to delete for a pattern, and
answer "not there" where the store said "permission denied" or nothing at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile
from fsspec.utils import isfilelike

from dagster_resilient.errors import ConfigurationError, ObjectNotFoundError, StorageError
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore, check_key, open_store
from dagster_resilient.storage.object_writer import ObjectWriter, TextWriter

Info = dict[str, Any]


class StoreFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A view of a store; what is written through it is durable when the file is closed.

    - A file that is open for writing is kept in memory, and becomes an object when it is closed: whole, or not at all
      where its writing was broken off by an exception; see `ObjectWriter`.
    - To look at a directory means to list all below it. An empty directory does not exist; `mkdir` does nothing.
    - `mv` copies and then deletes: between the two, both are there. `cp`, `get` and `put` take patterns as in fsspec;
      `rm` and `mv` take exact names.
    - `created` tells the same as `modified`: an object is never changed, only replaced.
    - Read only what is not being replaced: a file reads its ranges one by one, perhaps from two versions.

    It can be pickled (dask, a process pool) where the URL of the store and the environment are all that opens it.

    Attributes:
        store: The store.
    """

    protocol = "resilient"
    cachable = False

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(use_listings_cache=False)
        self.store = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store.url!r})"

    def __reduce__(self) -> tuple[Callable[[str], StoreFileSystem], tuple[str]]:
        """Refuse to carry credentials, and what another process could not open."""
        if not _opens_by_url(self.store):
            raise ConfigurationError(
                f"The filesystem of {self.store.url} cannot be pickled: only storage options, or only this process, "
                "open the store. Give credentials by the environment, or call store.filesystem() in the other process."
            )
        return _reopened, (self.store.url,)

    @property
    def fsid(self) -> str:
        """The store's URL."""
        return f"{self.protocol}:{self.store.url}"

    # ---- looking

    def info(self, path: str, **_: Any) -> Info:
        """Return what is known of an object or a directory."""
        key = self._strip_protocol(path)
        if not key:
            return _directory("")
        try:
            return _file(self.store.head(key))
        except ObjectNotFoundError:
            if next(self.store.list(f"{key}/"), None) is None:
                raise
            return _directory(key)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return what is directly below a directory, or the object itself."""
        key = self._strip_protocol(path)
        found = [info for name, info in self._below(key).items() if name != key and _depth(key, name) == 1]
        if not found and key:
            found = [_file(self.store.head(key))]
        return found if detail else [info["name"] for info in found]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **_: Any
    ) -> Any:
        """Return all objects below a directory, or the object itself, from one listing."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        key = self._strip_protocol(path)
        found = {
            name: info
            for name, info in self._below(key).items()
            if (withdirs or info["type"] == "file") and (maxdepth is None or _depth(key, name) <= maxdepth)
        }
        if not found and key:
            with contextlib.suppress(ObjectNotFoundError):
                found = {key: _file(self.store.head(key))}
        return found if detail else list(found)

    def walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = None, **options: Any
    ) -> Any:
        """Walk as fsspec does, but with an error where the store fails: by default fsspec would show an empty place."""
        return super().walk(path, maxdepth, topdown, on_error or _raise_unless_absent, **options)

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is an object or a directory. A store that does not answer is an error, not "no"."""
        return self._type(path) is not None

    def isdir(self, path: str) -> bool:
        """Whether there is a directory."""
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Whether there is an object."""
        return self._type(path) == "file"

    def modified(self, path: str) -> datetime:
        """Return when an object was written, by the store's clock."""
        return self.store.head(self._strip_protocol(path)).last_modified

    created = modified

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Do nothing: a directory is there with its first object."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing."""

    def rmdir(self, path: str) -> None:
        """Do nothing: a directory goes with its last object.

        Raises:
            OSError: It is not empty.
        """
        if self.isdir(path) and self._strip_protocol(path):
            raise OSError(f"{path} is not empty.")

    # ---- reading

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return an object, or the part that a slice of it would be."""
        key = self._strip_protocol(path)
        if start is None and end is None:
            return self.store.get(key)
        if start is not None and end is not None and 0 <= start <= end:
            try:
                return self.store.get_ranges(key, [(start, end)])[0]
            except StorageError as error:
                if type(error) is not StorageError:
                    raise  # else the range may end behind the object, which a slice may do
        first, last, _step = slice(start, end).indices(self.store.head(key).size)
        return self.store.get_ranges(key, [(first, max(first, last))])[0]

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        *,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """Return one range of each path; those of one object are read together, and small gaps with them."""
        starts, ends = (n if isinstance(n, (list, tuple)) else [n] * len(paths) for n in (starts, ends))
        found: list[Any] = [None] * len(paths)
        together: dict[str, list[int]] = {}
        for n, path in enumerate(paths):
            together.setdefault(path, []).append(n)
        for path, places in together.items():
            try:
                bodies: Sequence[Any] = self._ranges(path, [(starts[n], ends[n]) for n in places])
            except StorageError as error:
                if on_error != "return":
                    raise
                bodies = [error] * len(places)
            for n, body in zip(places, bodies, strict=True):
                found[n] = body
        return found

    def get_file(
        self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **options: Any
    ) -> None:
        """Copy an object to a local file, block by block, under another name until it is whole."""
        if outfile is not None or isfilelike(lpath) or self.isdir(rpath):
            super().get_file(rpath, lpath, callback=callback, outfile=outfile, **options)
            return
        target = Path(os.fspath(lpath))
        temporary = target.with_name(f"part#{secrets.randbits(63)}")
        try:
            super().get_file(rpath, str(temporary), callback=callback, **options)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    # ---- writing

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        """Write an object; with the mode ``create`` only where none is, decided by the store."""
        (self.store.create if mode == "create" else self.store.put)(self._strip_protocol(path), value)

    def put_file(
        self, lpath: Any, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **_: Any
    ) -> None:
        """Copy a local file to an object."""
        source = Path(os.fspath(lpath))
        if source.is_dir():
            return
        with source.open("rb") as read, self.open(rpath, "xb" if mode == "create" else "wb") as written:
            callback.set_size(os.fstat(read.fileno()).st_size)
            while block := read.read(self.blocksize):
                written.write(block)
                callback.relative_update(len(block))

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy an object. A directory is copied with its objects."""
        source = self._strip_protocol(path1)
        if self.isfile(source):
            self.store.put(self._strip_protocol(path2), self.store.get(source))
        elif not self.isdir(source):
            raise ObjectNotFoundError(f"No object at {self.store.url}/{source}.", store=self.store.url, key=source)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **_: Any) -> None:
        """Copy, then delete. A directory only with `recursive`."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if source == target:
            return
        moved = self._files_at(source, recursive, maxdepth)
        for key in moved:
            self.store.put(f"{target}{key[len(source) :]}", self.store.get(key))
        self.store.delete(moved)

    def rm_file(self, path: str) -> None:
        """Delete exactly this object. One that is not there is no error."""
        self.store.delete([self._strip_protocol(path)])

    _rm = rm_file

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete exactly these objects, no patterns; with `recursive` also all that a listing shows below them."""
        for one in [path] if isinstance(path, str) else path:
            self.store.delete(self._files_at(self._strip_protocol(one), recursive, maxdepth))

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Any = None,
        compression: str | None = None,
        **options: Any,
    ) -> Any:
        """Open an object; see the class for when it is published.

        Raises:
            ConfigurationError: Compression on the way to the store: closing it would not close the file.
        """
        if "r" in mode:
            return super().open(path, mode, block_size, cache_options, compression, **options)
        if compression is not None:
            raise ConfigurationError(
                f"{path}: compress before you write; a compressing file is not closed with its end."
            )
        text = {} if "b" in mode else {name: options.pop(name, None) for name in ("encoding", "errors", "newline")}
        writer = super().open(path, mode if "b" in mode else f"{mode.replace('t', '')}b", **options)
        return TextWriter(writer, **text) if text else writer

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True, **options: Any
    ) -> Any:
        key = check_key(path)
        if mode == "rb":
            size = self.store.head(key).size
            kept = {name: options[name] for name in ("cache_type", "cache_options") if options.get(name) is not None}
            return AbstractBufferedFile(self, key, mode, block_size or "default", size=size, **kept)
        if mode not in {"wb", "xb"}:
            raise NotImplementedError(f"{self.store.url}/{key}: objects cannot be opened with the mode {mode!r}.")
        return ObjectWriter(self.store, key, mode, autocommit=autocommit)

    # ---- parts

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return the key, "" for the root.

        Raises:
            ConfigurationError: It is no key.
        """
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        key = str(os.fspath(path)).removeprefix(f"{cls.protocol}://")
        key = key.rstrip("/")
        return check_key(key) if key else ""

    def _type(self, path: str) -> str | None:
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return None

    def _below(self, key: str) -> dict[str, Info]:
        """Return all that is below a directory by name, in order, with the directories that the keys imply."""
        found: dict[str, Info] = {}
        for info in self.store.list(f"{key}/" if key else ""):
            for cut in _slashes(info.key, len(key) + 1 if key else 0):
                found.setdefault(info.key[:cut], _directory(info.key[:cut]))
            found[info.key] = _file(info)
        if found and key:
            found[key] = _directory(key)
        return dict(sorted(found.items()))

    def _files_at(self, key: str, recursive: bool, maxdepth: int | None) -> list[str]:
        """Return the object of this name, or with `recursive` all objects below the directory."""
        if self.isfile(key):
            return [key]
        below: list[str] = self.find(key, maxdepth)
        if not below:
            raise ObjectNotFoundError(f"No object at {self.store.url}/{key}.", store=self.store.url, key=key)
        if not recursive:
            raise IsADirectoryError(f"{self.store.url}/{key} is a directory; set recursive=True.")
        return below

    def _ranges(self, path: str, ranges: Sequence[tuple[Any, Any]]) -> Sequence[bytes]:
        plain = all(isinstance(start, int) and isinstance(end, int) and 0 <= start <= end for start, end in ranges)
        if plain:
            try:
                return self.store.get_ranges(self._strip_protocol(path), ranges)
            except StorageError as error:
                if type(error) is not StorageError:
                    raise
        return [self.cat_file(path, start, end) for start, end in ranges]


def _file(info: ObjectInfo) -> Info:
    version = {} if info.version is None else {"ETag": info.version}
    moment = info.last_modified
    return {"name": info.key, "size": info.size, "type": "file", "mtime": moment, "LastModified": moment, **version}


def _directory(key: str) -> Info:
    return {"name": key, "size": 0, "type": "directory"}


def _depth(folder: str, name: str) -> int:
    """Return how deep a name lies below a folder: 1 is directly, 0 the folder itself."""
    below = name[len(folder) + 1 :] if folder else name
    return below.count("/") + 1 if below else 0


def _slashes(key: str, start: int) -> Iterator[int]:
    """Yield where the slashes of a key are, from a position on."""
    at = key.find("/", start)
    while at >= 0:
        yield at
        at = key.find("/", at + 1)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _opens_by_url(store: ObjectStore) -> bool:
    """Whether a URL alone opens the same place with the same settings; the environment is the other process's own."""
    if not store.is_shared:
        return False
    try:
        return dict(open_store(store.url).sidecar_config()) == dict(store.sidecar_config())
    except ConfigurationError:
        return False


def _reopened(url: str) -> StoreFileSystem:
    return StoreFileSystem(open_store(url))
