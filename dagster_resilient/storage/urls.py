"""Which store a URL means. Every spelling of a place opens the same place, and a doubtful one is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.storage.object_store import ObjectStore, check_key
from dagster_resilient.storage.retry import RetryingStore

_KNOWN = "Use s3://bucket/prefix, file:///path, a plain path, or memory://name."
_FSSPEC = "fsspec+"
_CLOUDS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
# A known scheme, or anything before "://" or ":/": "s3:/bucket" is a slip of the pen, not a folder named "s3:".
# fsspec's chains ("simplecache::s3://...") are none either.
_URL = re.compile(
    r"((?:file|s3a?|gc?s|az|abfss?|memory|fsspec\+[^:]*)(?=:)|[A-Z][A-Z0-9+.-]+(?=:/|::.*://)):(.*)",
    re.DOTALL | re.IGNORECASE,
)


def open_url(url: str, options: Mapping[str, Any]) -> ObjectStore:
    """Open the store at a URL; see `object_store.open_store` for the spellings."""
    if not url.strip():
        raise ConfigurationError(f"The URL of the store is empty. {_KNOWN}")
    match = _URL.fullmatch(url)
    if match is None:
        return _open_directory(url)
    scheme, place = match[1].lower(), match[2]
    if scheme in {"file", "local"}:
        return _open_directory(_absolute_path(place))
    if scheme == "memory":
        return _open_memory(_joined(place))
    if scheme in _CLOUDS:
        return _open_cloud(scheme, place, options)
    return _open_fsspec(scheme.removeprefix(_FSSPEC), place, options, prefix=_FSSPEC * scheme.startswith(_FSSPEC))


def _absolute_path(place: str) -> str:
    """Refuse ``file://data``: it may mean a host or a relative path, and a wrong guess writes to a wrong place."""
    path = place.removeprefix("//")
    if not path.startswith("/"):
        raise ConfigurationError(
            f"The URL 'file:{place}' names no absolute path. Write file:///{path}, or a plain path."
        )
    return path


def _joined(place: str) -> str:
    return "/".join(piece for piece in place.split("/") if piece)


def _open_directory(path: str) -> ObjectStore:
    from dagster_resilient.storage.local_store import LocalDirectoryStore  # noqa: PLC0415 - loads only when used

    return RetryingStore(LocalDirectoryStore(Path(path)))


def _open_memory(name: str) -> ObjectStore:
    from dagster_resilient.storage.memory_store import MemoryObjectStore  # noqa: PLC0415 - loads only when used

    return RetryingStore(MemoryObjectStore(name))


def _open_cloud(scheme: str, place: str, options: Mapping[str, Any]) -> ObjectStore:
    from dagster_resilient.storage.clouds import open_cloud  # noqa: PLC0415 - loads only when used

    return RetryingStore(open_cloud(scheme, place, options))


def _open_fsspec(scheme: str, place: str, options: Mapping[str, Any], prefix: str) -> ObjectStore:
    from dagster_resilient.storage.fsspec_store import FsspecStore  # noqa: PLC0415 - loads only when used

    if scheme in {"file", "local"}:
        scheme, spelt = "file", os.path.abspath(_absolute_path(place))  # noqa: PTH100 - see LocalDirectoryStore
    elif scheme == "memory":
        spelt = _joined(place)
    else:
        scheme = {"s3a": "s3"}.get(scheme, scheme)
        spelt = _host_and_path(scheme, place)
    return RetryingStore(FsspecStore(scheme, spelt, options, f"{prefix}{scheme}://{spelt}".rstrip("/")))


def _host_and_path(scheme: str, place: str) -> str:
    """Return host or bucket, and path, without a slash too many; refuse a password, which a log would show."""
    host, _, path = place.removeprefix("//").partition("/")
    if not place.startswith("//") or ":" in host.rpartition("@")[0]:
        raise ConfigurationError(
            f"The URL must read {scheme}://HOST/PATH. A password does not belong there: give it as a storage option."
        )
    if scheme == "s3" and not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise ConfigurationError("The S3 URL has no valid bucket; write fsspec+s3://BUCKET/PREFIX.")
    joined = _joined(path)
    return f"{host}/{check_key(joined)}" if joined else host
