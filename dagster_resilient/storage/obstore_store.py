"""`ObjectStore` over obstore (the Rust crate object_store): S3, local directories, memory.

obstore carries the bytes. What we add: errors of our tree, keys relative to the root, durable local writes (obstore's
local store creates by temporary file and hard link, but syncs nothing), and a client for each process (its runtime does
not survive a fork).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import obstore
import obstore.exceptions as obs
from obstore.store import LocalStore, MemoryStore, S3Store

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage.object_store import Buffer, ObjectInfo, ObjectStore
from dagster_resilient.storage.retry import RetryingStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_REQUEST_TIMEOUT = timedelta(seconds=30)
_S3_OPTIONS = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
_MEMORY: dict[str, MemoryStore] = {}


def open_obstore(url: str, options: Mapping[str, Any]) -> ObjectStore:
    """Open the store at a URL; see `open_store` for the spellings."""
    if "://" not in url:
        return RetryingStore(LocalDirectoryStore(Path(url)))
    parts = urlsplit(url)
    prefix = "/".join(piece for piece in unquote(parts.path).split("/") if piece)
    if parts.scheme == "file":
        return RetryingStore(LocalDirectoryStore(Path("/" + prefix)))
    if parts.scheme == "memory":
        return MemoryObjectStore("/".join(piece for piece in (parts.netloc, prefix) if piece))
    if parts.scheme in {"s3", "s3a"}:
        if not parts.netloc:
            raise ConfigurationError(f"The URL {url!r} names no bucket; write s3://BUCKET/PREFIX.")
        return RetryingStore(S3ObjectStore(parts.netloc, prefix, options))
    raise ConfigurationError(
        f"The URL {url!r} has the scheme {parts.scheme!r}, which is not known. "
        "Use s3://bucket/prefix, file:///path, a plain path, or memory://name."
    )


class ObstoreStore(ObjectStore):
    """What the three backends share. A subclass opens the client and names the store."""

    def __init__(self, url: str, prefix: str = "") -> None:
        self.url = url
        self._root = prefix + "/" if prefix else ""
        self._clients: dict[int, Client] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _open(self) -> Client:
        raise NotImplementedError

    @property
    def _client(self) -> Client:
        pid = os.getpid()
        if pid not in self._clients:
            self._clients[pid] = self._open()
        return self._clients[pid]

    def get(self, key: str) -> bytes:
        with self._errors("read", key):
            return bytes(obstore.get(self._client, self._root + key).bytes())

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._errors("read", key):
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            return [bytes(b) for b in obstore.get_ranges(self._client, self._root + key, starts=starts, ends=ends)]

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        with self._errors("write", key):
            obstore.put(self._client, self._root + key, _body(buffers))

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        with self._errors("create", key):
            whole = b"".join(_chunks(buffers))
            obstore.put(self._client, self._root + key, whole, mode="create", use_multipart=False)

    def head(self, key: str) -> ObjectInfo:
        with self._errors("read", key):
            return self._info(obstore.head(self._client, self._root + key))

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        with self._errors("list", prefix):
            offset = None if start_after is None else self._root + start_after
            found = obstore.list(self._client, self._root + prefix, offset=offset).collect()
        yield from sorted((self._info(meta) for meta in found), key=lambda info: info.key)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._errors("delete", key), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._client, self._root + key)

    def sidecar_config(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def _info(self, meta: Any) -> ObjectInfo:
        return ObjectInfo(meta["path"].removeprefix(self._root), meta["size"], meta["last_modified"])

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Turn what obstore raises into our tree. The detail is its first line: the rest is a debug print."""
        try:
            yield
        except StorageError:
            raise
        except (obs.BaseError, OSError) as error:
            raise self._translated(error, verb, key) from error

    def _translated(self, error: Exception, verb: str, key: str) -> StorageError:
        where = f"{self.url.rstrip('/')}/{key}"
        detail = str(error).strip().split("\n", 1)[0]
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
            return ObjectNotFoundError(f"No object at {where}.", store=self.url, key=key)
        if isinstance(error, (obs.AlreadyExistsError, obs.PreconditionError)):
            return ObjectExistsError(f"An object is already at {where}.", store=self.url, key=key)
        if isinstance(error, (obs.PermissionDeniedError, obs.UnauthenticatedError, PermissionError)):
            message = f"Could not {verb} {where}: permission denied. Check the credentials and their rights. ({detail})"
            return StoragePermissionError(message, store=self.url, key=key)
        if "NoSuchBucket" in str(error):
            return StorageError(f"Could not {verb} {where}: no such bucket. Create it or correct the URL.", store=self.url, key=key)
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return StorageError(f"Could not {verb} {where}: {os.strerror(error.errno)}.", store=self.url, key=key)
        return StoreUnavailableError(f"Could not {verb} {where}: {detail}", store=self.url, key=key)


class S3ObjectStore(ObstoreStore):
    """A prefix of an S3 bucket, or of a server that speaks S3 and honours conditional writes."""

    def __init__(self, bucket: str, prefix: str, options: Mapping[str, Any]) -> None:
        super().__init__(f"s3://{bucket}/{prefix}".rstrip("/"), prefix)
        self._bucket = bucket
        self._config = s3_config(options)

    def _open(self) -> Client:
        plain_http = str(self._config.get("endpoint", "")).startswith("http://")
        return S3Store(
            self._bucket,
            config=self._config,  # type: ignore[arg-type]
            client_options={"timeout": _REQUEST_TIMEOUT, "connect_timeout": timedelta(seconds=5), "allow_http": plain_http},
            # Our own retries are outside: here only what hides a single dropped connection.
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=10)},
        )

    def sidecar_config(self) -> Mapping[str, Any]:
        return {"kind": "s3", "bucket": self._bucket, "root": self._root, "config": self._config}


def s3_config(options: Mapping[str, Any]) -> dict[str, str]:
    """Translate fsspec's options for S3 to obstore's; the environment fills what is not given.

    Raises:
        ConfigurationError: An option that is not known: a misspelt credential must not fall back to another one.
    """
    rest = dict(options)
    client = dict(rest.pop("client_kwargs", None) or {})
    config = {ours: str(rest.pop(theirs)) for theirs, ours in _S3_OPTIONS.items() if rest.get(theirs) is not None}
    endpoint = rest.pop("endpoint_url", None) or client.pop("endpoint_url", None)
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = rest.pop("region", None) or client.pop("region_name", None)
    if rest.pop("anon", False):
        config["skip_signature"] = "true"
    unknown = sorted([*(key for key, value in rest.items() if value is not None), *client])
    if unknown:
        known = "key, secret, token, endpoint_url, region, anon, client_kwargs (region_name, endpoint_url)"
        raise ConfigurationError(f"Storage option(s) {', '.join(unknown)} are not known; known are {known}.")
    if endpoint:
        config["endpoint"] = str(endpoint).rstrip("/")
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    config["region"] = str(region)
    return config


class MemoryObjectStore(ObstoreStore):
    """Objects in this process's memory, shared by all who open the same name. For tests and notebooks."""

    is_shared = False

    def __init__(self, name: str) -> None:
        super().__init__(f"memory://{name}")
        self._name = name

    @property
    def _client(self) -> Client:
        return _MEMORY.setdefault(self._name, MemoryStore())

    def sidecar_config(self) -> Mapping[str, Any]:
        raise ConfigurationError(f"{self.url} exists in one process only; no second process can open it.")


class LocalDirectoryStore(ObstoreStore):
    """A directory. A write is a temporary file, fsync, then a link (create) or rename (put), then fsync of the folder.

    The temporary name ends in ``#`` and digits: object_store's local store skips such names when it lists, so a file
    that a killed process left behind is never seen. It is made beside its target, since a rename works only within one
    file system.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps "..", resolve follows links
        super().__init__(f"file://{self._path}")

    def _open(self) -> Client:
        self._make_folder(self._path)
        return LocalStore(self._path)

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        with self._errors("write", key):
            self._write(key, buffers, Path.replace)

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        with self._errors("create", key):
            try:
                self._write(key, buffers, lambda temporary, target: target.hardlink_to(temporary))
            except FileExistsError as error:
                raise ObjectExistsError(f"An object is already at {self.url}/{key}.", store=self.url, key=key) from error

    def _write(self, key: str, buffers: Buffer | Iterable[Buffer], publish: Any) -> None:
        target = self._path / key
        self._make_folder(target.parent)
        temporary = target.with_name(f"{target.name}#{secrets.randbits(63)}")
        try:
            with temporary.open("wb", buffering=0) as file:
                for chunk in _chunks(buffers):
                    _write_all(file, chunk)
                os.fsync(file.fileno())
            publish(temporary, target)
            _sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents; sync each parent, or a power loss forgets the whole branch."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        _sync_folder(folder.parent)

    def sidecar_config(self) -> Mapping[str, Any]:
        return {"kind": "local", "path": str(self._path)}


def _write_all(file: Any, chunk: Buffer) -> None:
    """An unbuffered write may take only part: a file-size limit or a nearly full disk does that once before it fails."""
    view = memoryview(chunk).cast("B")
    while view:
        view = view[file.write(view) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _chunks(buffers: Buffer | Iterable[Buffer]) -> Iterable[Buffer]:
    return (buffers,) if isinstance(buffers, (bytes, bytearray, memoryview)) else buffers


def _body(buffers: Buffer | Iterable[Buffer]) -> Any:
    """What obstore takes: one buffer as it is, several as an iterator. It refuses a memoryview unless wrapped."""
    if isinstance(buffers, (bytes, bytearray, memoryview)):
        return obstore.Bytes(buffers)
    return iter([obstore.Bytes(chunk) for chunk in buffers])
