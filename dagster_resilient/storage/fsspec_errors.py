"""What an fsspec filesystem raises, in our tree.

Each filesystem lets the errors of its own client through. They are told apart by builtin class, by errno, by the code
in a botocore response, and by class name where the client need not be installed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dagster_resilient.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)

_SECRET_NAME = re.compile(r"key|secret|token|pass|cred|sas|auth|connection", re.IGNORECASE)
# "PreconditionFailed" is the answer to If-None-Match where an object is; s3fs makes FileExistsError of it only where
# the server also names the condition. 409 says that another conditional write of the key is under way.
_EXISTS = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "OperationAborted"}
_REFUSED = {
    *("AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed", "403", "401"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired", "AllAccessDisabled"),
}
_REFUSED_CLASSES = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("AuthenticationException", "ClientAuthenticationError"),
}
_PASSING_CODES = {
    *("RequestTimeout", "SlowDown", "ServiceUnavailable", "InternalError", "Throttling", "ThrottlingException"),
    *("RequestLimitExceeded", "TooManyRequests", "408", "425", "429"),
}
# Of botocore, aiohttp, paramiko and requests: connections that break, time out or end in the middle.
_PASSING_CLASSES = {
    *("HTTPClientError", "IncompleteReadError", "ResponseStreamingError", "ClientError@aiohttp", "SSHException"),
    *("EndpointConnectionError", "RequestException", "ServiceRequestError", "ServiceResponseError"),
}
_PASSING_ERRNOS = {
    *(errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EREMOTEIO),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH),
}
_SERVER_ERROR = 500
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def translated(error: Exception, verb: str, store: str, key: str, secrets: Iterable[str]) -> StorageError:
    """Return the error of our tree that says what a filesystem's error means.

    Args:
        error: What was raised.
        verb: What was tried: ``read``, ``write``, ``create``, ``list`` or ``delete``.
        store: URL of the store.
        key: The object.
        secrets: Values that must not be shown. Where the error shows one, it is not kept as the cause either.
    """
    kind, reason = _classified(error, verb)
    where = f"{store}/{key}"
    if kind is ObjectNotFoundError:
        message = f"No object at {where}."
    elif kind is ObjectExistsError:
        message = f"An object is already at {where}."
    else:
        message = f"Could not {verb} {where}: {reason}"
    shown = [secret for secret in secrets if any(secret in str(one) for one in _chain(error))]
    for secret in shown:
        message = message.replace(secret, "***")
    made = kind(message, store=store, key=key)
    made.__cause__ = None if shown else error
    made.__suppress_context__ = True
    return made


def secrets_of(options: Mapping[str, Any]) -> list[str]:
    """Return the texts in storage options that look like secrets by their names, at any depth."""
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += secrets_of(value)
        elif isinstance(value, str) and value and _SECRET_NAME.search(name):
            found.append(value)
    return found


def _classified(error: Exception, verb: str) -> tuple[type[StorageError], str]:
    code, status = _answer(error)
    text = f"{type(error).__name__}: {error}"
    if code == "NoSuchBucket":
        return StorageError, "no such bucket. Create it or correct the URL."
    if verb == "create" and (isinstance(error, FileExistsError) or code in _EXISTS):
        return ObjectExistsError, ""
    if isinstance(error, PermissionError) or code in _REFUSED or _is_a(error, _REFUSED_CLASSES):
        return StoragePermissionError, f"permission denied ({code or text}). Check the credentials and their rights."
    if isinstance(error, _ABSENT) and verb in {"read", "delete"}:
        return ObjectNotFoundError, ""
    if code:
        passing = code in _PASSING_CODES or code in _EXISTS or status >= _SERVER_ERROR
    else:
        passing = isinstance(error, (TimeoutError, ConnectionError, EOFError)) or _is_a(error, _PASSING_CLASSES)
        passing = passing or (isinstance(error, OSError) and error.errno in _PASSING_ERRNOS)
    return StoreUnavailableError if passing else StorageError, text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _answer(error: Exception) -> tuple[str, int]:
    """Return code and status of the botocore response behind an error; s3fs keeps it as the cause."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            code = str(response.get("Error", {}).get("Code", ""))
            return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return "", 0


def _is_a(error: Exception, names: set[str]) -> bool:
    """Whether a class of one of these names is in the error's ancestry; ``Name@package`` where the name is common."""
    ancestry = type(error).__mro__
    return any(one.__name__ in names or f"{one.__name__}@{one.__module__.split('.')[0]}" in names for one in ancestry)
