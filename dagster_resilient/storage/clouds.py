"""The URLs of cloud stores, as fsspec spells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.storage.object_store import check_key
from dagster_resilient.storage.obstore_options import azure_settings, gcs_settings, s3_settings
from dagster_resilient.storage.obstore_store import AzureObjectStore, GCSObjectStore, ObstoreStore, S3ObjectStore

Options = Mapping[str, Any]
# container@account.dfs.core.windows.net: the form of abfs that names the account.
_ACCOUNT = re.compile(r"([a-z0-9]{3,24})\.(?:dfs|blob)\.core\.windows\.net")


def open_cloud(scheme: str, place: str, options: Options) -> ObstoreStore:
    """Open ``s3``, ``gs`` or ``az``, or one of their other names, at what stands behind the scheme and its colon.

    Raises:
        ConfigurationError: No valid bucket is named, or an option is not known.
    """
    return SCHEMES[scheme](place, options)


def _open_s3(place: str, options: Options) -> ObstoreStore:
    bucket, prefix = _bucket_and_prefix("s3", place)
    return S3ObjectStore(bucket, prefix, s3_settings(bucket, options))


def _open_gcs(place: str, options: Options) -> ObstoreStore:
    bucket, prefix = _bucket_and_prefix("gs", place)
    return GCSObjectStore(bucket, prefix, gcs_settings(options))


def _open_azure(place: str, options: Options) -> ObstoreStore:
    host, slash, path = place.removeprefix("//").partition("/")
    container, _, domain = host.partition("@")
    account = _ACCOUNT.fullmatch(domain)
    if account is not None:
        place = f"//{container}{slash}{path}"
    bucket, prefix = _bucket_and_prefix("az", place)
    return AzureObjectStore(bucket, prefix, azure_settings(options, account[1] if account else None))


def _bucket_and_prefix(scheme: str, place: str) -> tuple[str, str]:
    if not place.startswith("//") or "@" in place.split("/")[2]:
        # Not echoed: what stands before an @ may be a secret.
        raise ConfigurationError(
            f"The {scheme.upper()} URL has no valid bucket; write {scheme}://BUCKET/PREFIX, and credentials as options."
        )
    bucket, _, prefix = "/".join(piece for piece in place.split("/") if piece).partition("/")
    if not re.fullmatch(r"\$?[A-Za-z0-9._-]+", bucket) or place.startswith("///"):
        raise ConfigurationError(f"The URL '{scheme}:{place}' names no bucket; write {scheme}://BUCKET/PREFIX.")
    return bucket, check_key(prefix) if prefix else ""


SCHEMES: dict[str, Callable[[str, Options], ObstoreStore]] = {
    **dict.fromkeys(("s3", "s3a"), _open_s3),
    **dict.fromkeys(("gs", "gcs"), _open_gcs),
    **dict.fromkeys(("az", "abfs", "abfss"), _open_azure),
}
