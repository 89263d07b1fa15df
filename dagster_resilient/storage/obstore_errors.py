"""What a failure of obstore means in our tree. Status and code stand only in the text that it gives."""

from __future__ import annotations

import re
from collections.abc import Iterable

import obstore.exceptions as obs

from dagster_resilient.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
    VersionConflictError,
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}
_CREDENTIAL_CODES = {
    *_EXPIRED,
    *("AccessDenied", "InvalidAccessKeyId", "RequestTimeTooSkewed", "SignatureDoesNotMatch"),
    *("AuthenticationFailed", "AuthorizationFailure", "InvalidAuthenticationInfo"),  # Azure
}
_REFUSED = 4  # the hundreds of a status that asking again does not change, but for:
_PASSING_STATUS = {408, 409, 425, 429}
# Too slow; or the body was changed on the way. Or an upload was aborted by a clean-up, which a new one gets over.
_PASSING_CODES = {"RequestTimeout", "BadDigest", "XAmzContentSHA256Mismatch", "NoSuchUpload"}
_BAD_REQUEST, _CONFLICT, _NO_SUCH_RANGE = 400, 409, 416
_ADVICE = {
    "NoSuchBucket": "no such bucket. Create it or correct the URL.",
    "ContainerNotFound": "no such container. Create it or correct the URL.",
    "incorrectly configured region": "the bucket is in another region. Name it by client_kwargs={'region_name': ...}.",
}
# Where a server does not know, or needs another, check of a request.
_CHECKSUM_CODES = {"InvalidDigest", "MissingContentMD5", "NotImplemented", "InvalidArgument", "InvalidRequest"}
_CHECKSUM_ADVICE = (
    "If the server knows no checksums in headers, set the storage option "
    "config_kwargs={'request_checksum_calculation': 'when_required'}"
)
_INSTANCE_ROLE = "169.254.169.254"  # asked for credentials where none are given
_PROVIDER = "External AWS credential provider: "
_HIDDEN = "(hidden)"
_SHORTEST = 4  # a "secret" of fewer letters would hide half of the text


def scrub(error: Exception, secrets: Iterable[str]) -> None:
    """Take secrets out of the text of an error: S3 repeats an expired token in its answer, Azure's URL holds a key."""
    hidden = [secret for secret in secrets if len(secret) >= _SHORTEST]
    error.args = tuple(_without(arg, hidden) if isinstance(arg, str) else arg for arg in error.args)


def _without(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return text


def translated(error: Exception, verb: str, store: str, key: str, source: str) -> StorageError:
    """Return the error of our tree.

    Args:
        error: What obstore raised.
        verb: What was tried, as in "could not <verb>".
        store: URL of the store.
        key: Key of the object.
        source: Where the credentials come from, in words.
    """
    kind, reason = classified(error, verb, source)
    where = f"{store}/{key}"
    messages = {
        ObjectNotFoundError: f"No object at {where}.",
        ObjectExistsError: f"An object is already at {where}.",
        VersionConflictError: f"{where} was changed or deleted since its version was read.",
    }
    return kind(messages.get(kind, f"Could not {verb} {where}: {reason}"), store=store, key=key)


def classified(error: Exception, verb: str, source: str) -> tuple[type[StorageError], str]:
    """Return the class of our tree and the reason."""
    text = str(error).strip()
    status, code = _STATUS.search(text), _CODE.search(text)
    number, name = int(status[1]) if status else 0, code[1] if code else ""
    for sign, advice in _ADVICE.items():
        if sign in text:
            return StorageError, advice
    if number == _NO_SUCH_RANGE:
        return StorageError, "a range ends beyond the object."
    condition = None if name in _PASSING_CODES else _of_condition(error, verb, number)
    if condition is not None:
        return condition, "another writer is at work on it."
    if _is_refusal(error, number, name):
        return StoragePermissionError, _refusal(text, name or str(number or ""), source)
    permanent = number // 100 == _REFUSED and number not in _PASSING_STATUS and name not in _PASSING_CODES
    # The detail is the first line: the rest is a debug print.
    detail = " ".join(filter(None, [name, text.split("\n", 1)[0]]))
    if name in _CHECKSUM_CODES and verb != "read":
        more = "; if it cannot delete many keys at once, bulk_delete=False." if verb == "delete" else "."
        detail = f"{detail} {_CHECKSUM_ADVICE}{more}"
    return StorageError if permanent else StoreUnavailableError, detail


def _of_condition(error: Exception, verb: str, status: int) -> type[StorageError] | None:
    """What a condition in the request, or its object, was answered; None where it was another failure.

    On 409 nobody has won yet: another conditional write of the key is under way. For a create, the caller finds out by
    reading; a replace is tried again.
    """
    if status == _CONFLICT and verb != "create":
        return StoreUnavailableError
    if verb == "replace" and isinstance(error, (FileNotFoundError, obs.AlreadyExistsError, obs.PreconditionError)):
        return VersionConflictError
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError
    if verb == "read" and isinstance(error, obs.PreconditionError):
        return StoreUnavailableError  # replaced between two requests for it
    if isinstance(error, (obs.AlreadyExistsError, obs.PreconditionError)):
        return ObjectExistsError
    return None


def _is_refusal(error: Exception, status: int, code: str) -> bool:
    """The answer to a HEAD has no body, so that expired credentials are a 400 without a reason."""
    bare = status == _BAD_REQUEST and not code and "method: HEAD" in str(error)
    refused = isinstance(error, (obs.PermissionDeniedError, obs.UnauthenticatedError, PermissionError))
    return bare or refused or status in {401, 403} or code in _CREDENTIAL_CODES


def _refusal(text: str, reason: str, source: str) -> str:
    if _PROVIDER in text:
        return f"no credentials from {source}: {text.split(_PROVIDER, 1)[1].split(chr(10), 1)[0]}"
    if _INSTANCE_ROLE in text:
        return "no credentials are given, and this machine has no role to ask. Give the options key and secret."
    if reason in _EXPIRED:
        return (
            f"the credentials from {source} have expired ({reason}), and there are no newer ones. Renew them there; "
            "the storage option credentials takes a function that always returns fresh ones."
        )
    if reason == str(_BAD_REQUEST):
        return f"refused without a reason (400), as S3 does where the credentials from {source} have expired."
    return f"permission denied ({reason}). Check the credentials from {source}, and their rights."
