"""`ObjectStore` over obstore (the Rust crate object_store): S3 and what speaks it, Google Cloud Storage, Azure.

obstore carries the bytes. What we add: errors of our tree, keys relative to the root, credentials that are replaced
while the store is in use, and life after a fork, which obstore's runtime does not survive (`forked`).

Only S3 is tested against a real server. For Google Cloud Storage and Azure the translation of options and errors is.
"""

from __future__ import annotations

import bisect
import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import obstore
import obstore.exceptions as obs
from obstore.store import AzureStore, GCSStore, S3Store

from dagster_resilient.errors import ObjectNotFoundError, StorageError, VersionConflictError
from dagster_resilient.storage import credentials, forked, obstore_errors, uploads
from dagster_resilient.storage.credentials import renewing
from dagster_resilient.storage.object_store import (
    Buffer,
    Leftover,
    ObjectInfo,
    ObjectStore,
    as_buffers,
    check_key,
    check_prefix,
)
from dagster_resilient.storage.obstore_options import Settings
from dagster_resilient.storage.obstore_reads import fill, ranges_of

# A silent server is given up after the read timeout. The whole request has a bound of its own, which must leave room
# for a large object: with obstore's 30 s a body of a few gigabytes never arrives.
_CLIENT = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(hours=1),
}
# Our own retries are outside: here only what hides a single dropped connection.
_RETRY = {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}
# For large bodies. The read timeout counts while a body is sent, too, and parts share a line: at 1 MB/s, all that are
# under way need more than 90 s. A part is repeated by itself, or an object of many never arrives where one request in
# five fails.
_SLOWER = 4
_UPLOAD_RETRY = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_LARGE = 1024 * 1024
_GAP = 1024 * 1024  # as in object_store: reading so much too much costs less than a request
_DELETES = 1000  # keys in one request
# Servers take the first for no condition, and the second for "whatever is there".
_NO_VERSIONS = {"", "*"}
_SECRETS = ("service_account_key", "account_key", "sas_key", "client_secret")


class ObstoreStore(ObjectStore):
    """A prefix of a bucket, whoever keeps it. What differs between services stands in the subclasses.

    Attributes:
        kind: Name of the service, for `sidecar_config`.
        scheme: Scheme of the URL.
        credentials: Where keys come from.
    """

    kind: ClassVar[str]
    scheme: ClassVar[str]
    replaces = True

    def __init__(self, bucket: str, prefix: str, settings: Settings) -> None:
        self.url = f"{self.scheme}://{bucket}/{prefix}".rstrip("/")
        self.checks_bodies = settings.checks_bodies
        self.credentials = settings.credentials
        self._bucket = bucket
        self._root = prefix + "/" if prefix else ""
        self._settings = settings
        self._opened: dict[bool, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def _open(self, options: Any, retry: Any) -> Any:
        """Return obstore's client, with these options for HTTP."""

    @property
    def _client(self) -> Any:
        return self._client_for(0)

    def _client_for(self, size: int) -> Any:
        """Return the client for a body of this size."""
        large = size > _LARGE
        if large not in self._opened:
            forked.note_use()
            addresses = [self._settings.config.get(name, "") for name in ("endpoint", "base_url")]
            plain_http = any(address.startswith("http://") for address in addresses)
            silence = _CLIENT["read_timeout"] * (_SLOWER if large else 1)
            options = {**_CLIENT, "read_timeout": silence, **self._settings.client, "allow_http": plain_http}
            self._opened[large] = self._open(options, _UPLOAD_RETRY if large else _RETRY)
        return self._opened[large]

    def reopen(self) -> None:
        """Use the credentials that the source has now."""
        self._opened = {}

    @renewing
    @forked.safe
    def get(self, key: str) -> bytes:
        """Return the whole object."""
        with self._errors("read", key):
            return obstore.get(self._client, self._path(key)).bytes().to_bytes()

    @renewing
    @forked.safe
    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range, neighbours in one request. An empty range is none: it would be refused."""
        blocks = _merged([(start, end) for start, end in ranges if start < end])
        with self._errors("read", key):
            bodies = ranges_of(self._client, self._path(key), blocks, self._settings.max_concurrency)
        if any(body.nbytes != end - start for body, (start, end) in zip(bodies, blocks, strict=True)):
            raise self._too_short(key)
        return [_cut(bodies, [start for start, _ in blocks], one) for one in ranges]

    @renewing
    def get_into(self, key: str, buffer: bytearray | memoryview, start: int = 0) -> None:
        """Fill a buffer as the bytes arrive."""
        view = memoryview(buffer).cast("B")
        if forked.is_lost() or not view.nbytes:
            super().get_into(key, view, start)
            return
        with self._errors("read", key):
            missing = fill(self._client, self._path(key), view, start)
        if missing:
            raise self._too_short(key)

    def _too_short(self, key: str) -> StorageError:
        message = f"Could not read {self.url}/{key}: a range ends beyond the object."
        return StorageError(message, store=self.url, key=key)

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object: in one request where it is small, else in parts whose size grows with it."""
        self._put(key, as_buffers(buffers))

    @renewing
    @forked.safe
    def _put(self, key: str, views: Sequence[memoryview]) -> None:
        size = _size(views)
        part, client = uploads.part_size(size), self._client_for(size)
        with self._errors("write", key):
            if size <= part:
                obstore.put(client, self._path(key), _joined(views), use_multipart=False)
                return
            obstore.put(
                client,
                self._path(key),
                (obstore.Bytes(piece) for piece in uploads.pieces(views, part)),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=uploads.concurrency(part, self._settings.max_concurrency),
            )

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key."""
        self._create(key, as_buffers(buffers))

    @renewing
    @forked.safe
    def _create(self, key: str, views: Sequence[memoryview]) -> None:
        with self._errors("create", key):
            client = self._client_for(_size(views))
            obstore.put(client, self._path(key), _joined(views), mode="create", use_multipart=False)

    def replace(self, key: str, buffers: Buffer | Iterable[Buffer], version: str) -> str:
        """Overwrite an object only if it is still the one of this version."""
        if version in _NO_VERSIONS:
            message = f"{self.url}/{key} has no version {version!r}; take it from `head`."
            raise VersionConflictError(message, store=self.url, key=check_key(key))
        return self._replace(key, as_buffers(buffers), version)

    @renewing
    @forked.safe
    def _replace(self, key: str, views: Sequence[memoryview], version: str) -> str:
        with self._errors("replace", key):
            client, mode = self._client_for(_size(views)), self._condition(version)
            written: Any = obstore.put(client, self._path(key), _joined(views), mode=mode, use_multipart=False)
        return self._version(written) or self.head(key).version or ""

    @renewing
    @forked.safe
    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        with self._errors("read", key):
            return self._info(obstore.head(self._client, self._path(key)))

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix."""
        return iter(self._listed(check_prefix(prefix), start_after))

    @renewing
    @forked.safe
    def _listed(self, prefix: str, start_after: str | None) -> Sequence[ObjectInfo]:
        with self._errors("list", prefix):
            offset = None if start_after is None else self._root + start_after
            whole = self._root + prefix
            found = obstore.list(self._client, whole, offset=offset).collect()
            infos = [self._info(meta) for meta in found if meta["path"].startswith(whole)]
            return sorted((one for one in infos if one.size or self._is_there(one.key)), key=lambda info: info.key)

    def _is_there(self, key: str) -> bool:
        """Whether an empty object has this very name: obstore cuts the slash off the folder markers of other tools."""
        try:
            obstore.head(self._client, self._path(key))
        except FileNotFoundError:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys, a thousand in a request where the store can do that."""
        self._delete(list(keys))

    @renewing
    @forked.safe
    def _delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        for first in range(0, len(paths), _DELETES):
            batch = paths[first : first + _DELETES]
            with contextlib.suppress(ObjectNotFoundError), self._errors("delete", batch[0].removeprefix(self._root)):
                obstore.delete(self._client, batch)

    def sidecar_config(self) -> Mapping[str, Any]:
        """Return bucket, prefix and configuration, with the credentials as they are now."""
        return {"kind": self.kind, "bucket": self._bucket, "root": self._root, **self._settings.as_json()}

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _info(self, meta: Any) -> ObjectInfo:
        key = meta["path"].removeprefix(self._root)
        return ObjectInfo(key, meta["size"], meta["last_modified"], self._version(meta))

    def _version(self, meta: Mapping[str, Any]) -> str | None:
        version: str | None = meta.get("e_tag")
        return version

    def _condition(self, version: str) -> Any:
        return {"e_tag": version}

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (obs.BaseError, OSError) as error:
            obstore_errors.scrub(error, self._secrets())
            raise obstore_errors.translated(error, verb, self.url, key, self.credentials.source) from error

    def _secrets(self) -> Sequence[str]:
        """What no error may show. Of a signed URL, also each part."""
        config = self._settings.config
        whole = [*(config[name] for name in _SECRETS if name in config), *self.credentials.secrets()]
        return [*whole, *(piece.partition("=")[2] for one in whole for piece in one.split("&") if "sig=" in piece)]

    @classmethod
    def reopened(cls, config: Mapping[str, Any]) -> Self:
        """Open what `sidecar_config` describes."""
        keys = {name: config["config"][name] for name in credentials.CONFIG_KEYS if name in config["config"]}
        rest = {name: value for name, value in config["config"].items() if name not in keys}
        settings = Settings(rest, credentials.given(keys), config["client"], config["max_concurrency"])
        return cls(config["bucket"], config["root"].rstrip("/"), settings)


class S3ObjectStore(ObstoreStore):
    """A prefix of an S3 bucket, or of a server that speaks S3 and honours conditional writes."""

    kind = "s3"
    scheme = "s3"

    def _open(self, options: Any, retry: Any) -> S3Store:
        config: Any = self._settings.config
        # By a function, or obstore would combine a key with a session token that stands in the environment.
        provider: Any = self._provided if self.credentials.current() else None
        return S3Store(
            self._bucket, config=config, client_options=options, retry_config=retry, credential_provider=provider
        )

    def _provided(self) -> Mapping[str, Any]:
        return {"token": None, "expires_at": None, **self.credentials.current()}

    def leftovers(self) -> Iterator[Leftover]:
        """Yield the uploads in parts that were begun under this prefix and neither completed nor aborted.

        Raises:
            ConfigurationError: boto3 is not installed; the extra ``aws`` brings it.
        """
        yield from self._uploads_found()

    @renewing
    def _uploads_found(self) -> Sequence[Leftover]:
        return self._uploads().found()

    @renewing
    def discard(self, leftover: Leftover) -> None:
        """Abort an upload that `leftovers` told of."""
        self._uploads().discard(leftover)

    def _uploads(self) -> uploads.S3Uploads:
        return uploads.S3Uploads(self.url, self._bucket, self._root, self._settings.as_json())


class GCSObjectStore(ObstoreStore):
    """A prefix of a Google Cloud Storage bucket. Not tested against the real service: see the module.

    Unfinished uploads are not listed; set the bucket's rule ``AbortIncompleteMultipartUpload``.
    """

    kind = "gcs"
    scheme = "gs"

    def _open(self, options: Any, retry: Any) -> GCSStore:
        config: Any = self._settings.config
        return GCSStore(self._bucket, config=config, client_options=options, retry_config=retry)

    def _version(self, meta: Mapping[str, Any]) -> str | None:
        """Its condition is on the generation."""
        version: str | None = meta.get("version")
        return version

    def _condition(self, version: str) -> Any:
        return {"version": version}


class AzureObjectStore(ObstoreStore):
    """A prefix of an Azure Blob container. Not tested against the real service: see the module.

    Unfinished uploads are not listed; the service drops uncommitted blocks after a week.
    """

    kind = "azure"
    scheme = "az"

    def _open(self, options: Any, retry: Any) -> AzureStore:
        config: Any = self._settings.config
        return AzureStore(self._bucket, config=config, client_options=options, retry_config=retry)


_KINDS: dict[str, type[ObstoreStore]] = {one.kind: one for one in (S3ObjectStore, GCSObjectStore, AzureObjectStore)}


def reopened(config: Mapping[str, Any]) -> ObstoreStore:
    """Open what `ObstoreStore.sidecar_config` describes, in another process."""
    return _KINDS[config["kind"]].reopened(config)


def _size(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def _joined(views: Sequence[memoryview]) -> Any:
    """Return one buffer. A single one is not copied."""
    return obstore.Bytes(views[0]) if len(views) == 1 else b"".join(views)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges with small gaps. object_store would do the same, but panics where such a block ends short."""
    blocks: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if blocks and start - blocks[-1][1] <= _GAP:
            blocks[-1] = (blocks[-1][0], max(end, blocks[-1][1]))
        else:
            blocks.append((start, end))
    return blocks


def _cut(bodies: Sequence[memoryview], starts: Sequence[int], wanted: tuple[int, int]) -> bytes:
    start, end = wanted
    if start >= end:
        return b""
    block = bisect.bisect_right(starts, start) - 1
    return bytes(bodies[block][start - starts[block] : end - starts[block]])
