"""What a filesystem's error becomes."""

from __future__ import annotations

import errno
from typing import Any

import botocore.exceptions
import pytest

from dagster_resilient.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage.fsspec_errors import secrets_of, translated


def answer(code: str, status: int) -> botocore.exceptions.ClientError:
    """An answer of S3."""
    return botocore.exceptions.ClientError(
        {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"
    )


def wrapped(error: Exception) -> OSError:
    """As s3fs wraps it."""
    outer = OSError(errno.EINVAL, "m")
    outer.__cause__ = error
    return outer


CASES: list[tuple[Exception, str, type[StorageError]]] = [
    (FileExistsError("a"), "create", ObjectExistsError),
    (FileExistsError("a"), "write", StorageError),
    (wrapped(answer("PreconditionFailed", 412)), "create", ObjectExistsError),
    (wrapped(answer("412", 412)), "create", ObjectExistsError),
    (answer("ConditionalRequestConflict", 409), "create", ObjectExistsError),
    (wrapped(answer("OperationAborted", 409)), "write", StoreUnavailableError),
    (FileNotFoundError("a"), "read", ObjectNotFoundError),
    (IsADirectoryError("a"), "read", ObjectNotFoundError),
    (NotADirectoryError("a"), "delete", ObjectNotFoundError),
    (FileNotFoundError("a"), "write", StorageError),
    (wrapped(answer("NoSuchBucket", 404)), "read", StorageError),
    (PermissionError("a"), "read", StoragePermissionError),
    (wrapped(answer("AccessDenied", 403)), "list", StoragePermissionError),
    (wrapped(answer("ExpiredToken", 400)), "read", StoragePermissionError),
    (wrapped(answer("TokenRefreshRequired", 400)), "read", StoragePermissionError),
    (botocore.exceptions.NoCredentialsError(), "read", StoragePermissionError),
    (wrapped(answer("SlowDown", 503)), "read", StoreUnavailableError),
    (wrapped(answer("RequestTimeout", 400)), "write", StoreUnavailableError),
    (answer("Unknown", 500), "write", StoreUnavailableError),
    (answer("MalformedXML", 400), "write", StorageError),
    (botocore.exceptions.EndpointConnectionError(endpoint_url="x"), "read", StoreUnavailableError),
    (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), "read", StoreUnavailableError),
    (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), "read", StoreUnavailableError),
    (botocore.exceptions.ParamValidationError(report="x"), "read", StorageError),
    (TimeoutError(), "read", StoreUnavailableError),
    (ConnectionResetError(), "read", StoreUnavailableError),
    (EOFError(), "read", StoreUnavailableError),
    (OSError(errno.EIO, "x"), "read", StoreUnavailableError),
    (OSError(errno.ENOSPC, "x"), "write", StorageError),
    (NotImplementedError(), "delete", StorageError),
    (TypeError("x"), "read", StorageError),
]


@pytest.mark.parametrize(("error", "verb", "kind"), CASES)
def test_each_error_has_one_meaning(error: Exception, verb: str, kind: type[StorageError]) -> None:
    """Store, key and cause are named, and only what may pass is retried."""
    made = translated(error, verb, "x://y", "k", [])
    assert type(made) is kind
    assert (made.store, made.key, made.__cause__) == ("x://y", "k", error)
    assert "x://y/k" in str(made)


@pytest.mark.parametrize("name", ["ClientError", "ClientPayloadError"])
def test_errors_are_known_without_their_client(name: str) -> None:
    """Classes of aiohttp, which need not be installed, are known by name and package."""
    base = type("ClientError", (Exception,), {"__module__": "aiohttp.client_exceptions"})
    made = translated(type(name, (base,), {})("x"), "read", "x://y", "k", [])
    assert type(made) is StoreUnavailableError


def test_a_secret_in_an_error_is_not_shown() -> None:
    """Neither in the message nor through the cause."""
    secrets = secrets_of(
        {"key": "k-1", "client_kwargs": {"aws_secret_access_key": "s-2"}, "endpoint_url": "u", "port": 1}
    )
    assert secrets == ["k-1", "s-2"]
    made: Any = translated(wrapped(ValueError("signed with s-2")), "read", "x://y", "k", secrets)
    assert made.__cause__ is None
    made = translated(OSError("bad s-2"), "read", "x://y", "k", secrets)
    assert "s-2" not in f"{made} {made.__cause__}"
    assert "***" in str(made)
