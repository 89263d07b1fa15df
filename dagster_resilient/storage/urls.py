"""Which store a URL means. Every spelling of a place opens the same place, and a doubtful one is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.storage.object_store import ObjectStore, check_key
from dagster_resilient.storage.retry import RetryingStore

_KNOWN = "Use s3://bucket/prefix, file:///path, a plain path, or memory://name."
# A known scheme, or anything before "://" or ":/": "s3:/bucket" is a slip of the pen, not a folder named "s3:".
_URL = re.compile(r"((?:file|s3a?|memory)(?=:)|[A-Z][A-Z0-9+.-]+(?=:/)):(.*)", re.DOTALL | re.IGNORECASE)


def open_url(url: str, options: Mapping[str, Any]) -> ObjectStore:
    """Open the store at a URL; see `object_store.open_store` for the spellings."""
    if not url.strip():
        raise ConfigurationError(f"The URL of the store is empty. {_KNOWN}")
    match = _URL.fullmatch(url)
    if match is None:
        return _open_directory(url)
    scheme, place = match[1].lower(), match[2]
    if scheme == "file":
        return _open_directory(_absolute_path(place))
    if scheme == "memory":
        return _open_memory(_joined(place))
    if scheme in {"s3", "s3a"}:
        return _open_s3(place, options)
    raise ConfigurationError(f"The store URL has the scheme {scheme!r}, which is not known. {_KNOWN}")


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


def _open_s3(place: str, options: Mapping[str, Any]) -> ObjectStore:
    from dagster_resilient.storage.obstore_store import S3ObjectStore, s3_config  # noqa: PLC0415 - loads only when used

    if not place.startswith("//") or "@" in place.split("/")[2]:
        # Not echoed: what stands before an @ may be a secret.
        raise ConfigurationError(
            "The S3 URL has no valid bucket; write s3://BUCKET/PREFIX, and credentials as options."
        )
    bucket, _, prefix = _joined(place).partition("/")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket) or place.startswith("///"):
        raise ConfigurationError(f"The URL 's3:{place}' names no bucket; write s3://BUCKET/PREFIX.")
    return RetryingStore(S3ObjectStore(bucket, check_key(prefix) if prefix else "", s3_config(options)))
