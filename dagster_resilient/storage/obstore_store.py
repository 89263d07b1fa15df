"""`ObjectStore` over obstore (the Rust crate object_store): S3, and servers that speak it.

obstore carries the bytes. What we add: errors of our tree, keys relative to the root, and life after a fork, which
obstore's runtime does not survive (`forked`).
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import obstore
import obstore.exceptions as obs
from obstore.store import S3Store

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage import forked
from dagster_resilient.storage.object_store import Buffer, ObjectInfo, ObjectStore, as_buffers, check_key, check_prefix

_S3_OPTIONS = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
# A silent server is given up after the read timeout. The whole request has a bound of its own, which must leave room
# for a large object: with obstore's 30 s a body of a few gigabytes never arrives.
_CLIENT = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(hours=1),
}
# Our own retries are outside: here only what hides a single dropped connection.
_RETRY = {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}
_PART, _PARTS = 5 * 1024 * 1024, 10_000  # S3's smallest part and greatest number of parts
_GAP = 1024 * 1024  # as in object_store: reading so much too much costs less than a request
_DELETES = 1000  # keys in one request

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CREDENTIAL_CODES = {
    *("AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired"),
}
_REFUSED = 4  # the hundreds of a status that asking again does not change, but for:
_PASSING_STATUS = {408, 409, 425, 429}
_ADVICE = {
    "NoSuchBucket": "no such bucket. Create it or correct the URL.",
    "incorrectly configured region": "the bucket is in another region. Name it by client_kwargs={'region_name': ...}.",
}
_INSTANCE_ROLE = "169.254.169.254"  # asked for credentials where none are given


class S3ObjectStore(ObjectStore):
    """A prefix of an S3 bucket, or of a server that speaks S3 and honours conditional writes."""

    def __init__(self, bucket: str, prefix: str, config: Mapping[str, str]) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._root = prefix + "/" if prefix else ""
        self._config = dict(config)
        self._opened: S3Store | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def _client(self) -> S3Store:
        if self._opened is None:
            forked.note_use()
            plain_http = self._config.get("endpoint", "").startswith("http://")
            self._opened = S3Store(
                self._bucket,
                config=self._config,  # type: ignore[arg-type]
                client_options={**_CLIENT, "allow_http": plain_http},  # type: ignore[arg-type]
                retry_config=_RETRY,  # type: ignore[arg-type]
            )
        return self._opened

    @forked.safe
    def get(self, key: str) -> bytes:
        """Return the whole object."""
        with self._errors("read", key):
            return bytes(obstore.get(self._client, self._path(key)).bytes())

    @forked.safe
    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range, neighbours in one request. An empty range is none: it would be refused."""
        blocks = _merged([(start, end) for start, end in ranges if start < end])
        with self._errors("read", key):
            starts, ends = [start for start, _ in blocks], [end for _, end in blocks]
            bodies = [
                memoryview(body) for body in obstore.get_ranges(self._client, self._path(key), starts=starts, ends=ends)
            ]
        if any(len(body) != end - start for body, (start, end) in zip(bodies, blocks, strict=True)):
            message = f"Could not read {self.url}/{key}: a range ends beyond the object."
            raise StorageError(message, store=self.url, key=key)
        return [_cut(bodies, starts, one) for one in ranges]

    @forked.safe
    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object: in one request where it is small, else in parts whose size grows with it."""
        many = as_buffers(buffers)
        size = sum(one.nbytes for one in many)
        with self._errors("write", key):
            if size <= _PART:
                obstore.put(self._client, self._path(key), b"".join(many), use_multipart=False)
            else:
                body = iter([obstore.Bytes(one) for one in many])
                part = max(_PART, size // _PARTS + 1)
                obstore.put(self._client, self._path(key), body, use_multipart=True, chunk_size=part)

    @forked.safe
    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object only if none has this key."""
        with self._errors("create", key):
            whole = b"".join(as_buffers(buffers))
            obstore.put(self._client, self._path(key), whole, mode="create", use_multipart=False)

    @forked.safe
    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        with self._errors("read", key):
            return self._info(obstore.head(self._client, self._path(key)))

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix."""
        return iter(self._listed(check_prefix(prefix), start_after))

    @forked.safe
    def _listed(self, prefix: str, start_after: str | None) -> Sequence[ObjectInfo]:
        with self._errors("list", prefix):
            offset = None if start_after is None else self._root + start_after
            found = obstore.list(self._client, self._root + prefix, offset=offset).collect()
        return sorted((self._info(meta) for meta in found), key=lambda info: info.key)

    @forked.safe
    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys, a thousand in a request."""
        paths = [self._path(key) for key in keys]
        for first in range(0, len(paths), _DELETES):
            batch = paths[first : first + _DELETES]
            with contextlib.suppress(ObjectNotFoundError), self._errors("delete", batch[0].removeprefix(self._root)):
                obstore.delete(self._client, batch)

    def sidecar_config(self) -> Mapping[str, Any]:
        """Return bucket, prefix and configuration, with the credentials."""
        return {"kind": "s3", "bucket": self._bucket, "root": self._root, "config": self._config}

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _info(self, meta: Any) -> ObjectInfo:
        return ObjectInfo(meta["path"].removeprefix(self._root), meta["size"], meta["last_modified"])

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (obs.BaseError, OSError) as error:
            raise self._translated(error, verb, key) from error

    def _translated(self, error: Exception, verb: str, key: str) -> StorageError:
        kind, reason = _classified(error)
        where = f"{self.url}/{key}"
        if kind is ObjectNotFoundError:
            message = f"No object at {where}."
        elif kind is ObjectExistsError:
            message = f"An object is already at {where}."
        else:
            message = f"Could not {verb} {where}: {reason}"
        return kind(message, store=self.url, key=key)


def _classified(error: Exception) -> tuple[type[StorageError], str]:
    """Return the class of our tree and the reason. Status and code stand only in the text that obstore gives."""
    text = str(error).strip()
    status, code = _STATUS.search(text), _CODE.search(text)
    number, name = int(status[1]) if status else 0, code[1] if code else ""
    for sign, advice in _ADVICE.items():
        if sign in text:
            return StorageError, advice
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError, ""
    if isinstance(error, (obs.AlreadyExistsError, obs.PreconditionError)):
        return ObjectExistsError, ""
    refused = isinstance(error, (obs.PermissionDeniedError, obs.UnauthenticatedError, PermissionError))
    if refused or number in {401, 403} or name in _CREDENTIAL_CODES:
        return StoragePermissionError, _refusal(text, name or str(number))
    permanent = number // 100 == _REFUSED and number not in _PASSING_STATUS and name != "RequestTimeout"
    # The detail is the first line: the rest is a debug print.
    detail = " ".join(filter(None, [name, text.split("\n", 1)[0]]))
    return StorageError if permanent else StoreUnavailableError, detail


def _refusal(text: str, reason: str) -> str:
    if _INSTANCE_ROLE in text:
        return "no credentials are given, and this machine has no role to ask. Give the options key and secret."
    return f"permission denied ({reason}). Check the credentials and their rights."


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
