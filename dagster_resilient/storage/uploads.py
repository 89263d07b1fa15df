"""Uploads in parts: how an object is cut, and what killed writers left of them on S3."""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dagster_resilient.errors import (
    ConfigurationError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage import credentials
from dagster_resilient.storage.object_store import Leftover

PART, PARTS = 8 * 1024 * 1024, 10_000  # the usual part, and S3's greatest number of parts
_IN_FLIGHT = 512 * 1024 * 1024  # bytes of parts under way at once, where the parts are so large that it matters
_SERVER_ERROR = 500
_REFUSED = {401, 403}


def part_size(size: int) -> int:
    """Return the size of the parts of an object: the usual one, or larger where there would be too many."""
    return max(PART, -(-size // PARTS))


def concurrency(part: int, wanted: int) -> int:
    """Return how many parts may be under way at once."""
    return max(1, min(wanted, _IN_FLIGHT // part))


def pieces(views: Sequence[memoryview], part: int) -> Iterator[memoryview]:
    """Yield views no larger than a part. obstore would send all parts of a larger one at once, on as many sockets."""
    for view in views:
        for start in range(0, view.nbytes, part):
            yield view[start : start + part]


class S3Uploads:
    """The unfinished uploads under a prefix of a bucket. obstore cannot list them, so boto3 does."""

    def __init__(self, url: str, bucket: str, root: str, settings: Mapping[str, Any]) -> None:
        """Prepare.

        Args:
            url: URL of the store, for messages.
            bucket: Its bucket.
            root: Its prefix, with a slash at the end, or "".
            settings: `Settings.as_json` of the store.
        """
        self._url = url
        self._bucket = bucket
        self._root = root
        self._settings = settings

    def found(self) -> list[Leftover]:
        """Return the uploads in progress under the prefix, living ones too."""
        with self._errors("list the unfinished uploads of"), self._opened() as client:
            pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._root)
            uploads = [upload for page in pages for upload in page.get("Uploads") or ()]
        # Some servers take the prefix for a name; what is not ours must never be shown.
        ours = [upload for upload in uploads if upload["Key"].startswith(self._root)]
        return [Leftover(_name(upload), 0, upload["Initiated"]) for upload in ours]

    def discard(self, leftover: Leftover) -> None:
        """Abort an upload. One that is gone, finished or aborted, is no error."""
        key, upload = _parsed(leftover.name)
        if not key.startswith(self._root):
            raise ConfigurationError(f"The unfinished upload of {key} lies outside of {self._url}.")
        with self._errors("discard an unfinished upload of"), self._opened() as client:
            try:
                client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
            except client.exceptions.NoSuchUpload:
                return

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        """A client for one call: it must not outlive a fork, nor its keys."""
        with tempfile.NamedTemporaryFile(suffix=".pem") as trusted:
            trusted.write(self._settings["client"].get("root_certificate", "").encode())
            trusted.flush()
            client = _client(self._bucket, self._settings, trusted.name)
            try:
                yield client
            finally:
                client.close()

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        botocore = importlib.import_module("botocore.exceptions") if _has_boto3() else None
        try:
            yield
        except Exception as error:
            if botocore is None or not isinstance(error, (botocore.ClientError, botocore.BotoCoreError)):
                raise
            raise _translated(error, verb, self._url) from None  # its text may repeat a token


def _has_boto3() -> bool:
    credentials.import_boto3("listing unfinished uploads")
    return True


def _name(upload: Mapping[str, Any]) -> str:
    return json.dumps([upload["Key"], upload["UploadId"]])


def _parsed(name: str) -> tuple[str, str]:
    try:
        key, upload = json.loads(name)
    except ValueError as error:
        raise ConfigurationError(f"{name!r} names no unfinished upload.") from error
    return str(key), str(upload)


def _client(bucket: str, settings: Mapping[str, Any], trusted: str) -> Any:
    boto3 = credentials.import_boto3("listing unfinished uploads")
    botocore = importlib.import_module("botocore")
    config, http = settings["config"], settings["client"]
    virtual = config.get("virtual_hosted_style_request") == "true"
    anonymous = {"signature_version": botocore.UNSIGNED} if config.get("skip_signature") == "true" else {}
    importlib.import_module("botocore.config")
    return boto3.client(
        "s3",
        # obstore wants the bucket in the endpoint where requests are virtual-hosted; boto3 puts it there by itself.
        endpoint_url=config["endpoint"].replace(f"://{bucket}.", "://", int(virtual)) if "endpoint" in config else None,
        region_name=config["region"],
        aws_access_key_id=config.get("access_key_id"),
        aws_secret_access_key=config.get("secret_access_key"),
        aws_session_token=config.get("session_token"),
        verify=False if http.get("allow_invalid_certificates") else trusted if "root_certificate" in http else None,
        config=botocore.config.Config(
            connect_timeout=5,
            read_timeout=30,
            retries={"total_max_attempts": 2},
            s3={"addressing_style": "virtual" if virtual else "path"},
            **anonymous,
        ),
    )


def _translated(error: Any, verb: str, url: str) -> StorageError:
    answer: Mapping[str, Any] = getattr(error, "response", None) or {}
    code = answer.get("Error", {}).get("Code") or type(error).__name__
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", _SERVER_ERROR)
    message = f"Could not {verb} {url}: {code} (status {status})."
    if status in _REFUSED or code in {"ExpiredToken", "InvalidToken", "NoCredentialsError"}:
        return StoragePermissionError(f"{message} Check the credentials and their rights.", store=url)
    kind = StoreUnavailableError if status >= _SERVER_ERROR else StorageError
    return kind(message, store=url)
