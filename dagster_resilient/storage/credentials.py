"""Where a store's credentials come from, and how new ones take their place while the store is in use.

obstore would read the environment by itself, once; and it would combine a key that is given with a token that stands
there. So keys are always handed to it by a function. Roles (web identity, container, instance) are obstore's own: it
asks for them again before they expire.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from dagster_resilient.errors import ConfigurationError, StoragePermissionError, StoreUnavailableError

P = ParamSpec("P")
T = TypeVar("T")

# What a slip in a function raises, and no service: to ask again changes nothing.
_SLIPS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(SyntaxError, TypeError),
)

# What a function for credentials returns: access_key_id, secret_access_key, token (or None), expires_at (or None).
CredentialFunction = Callable[[], Mapping[str, Any]]
CONFIG_KEYS = ("access_key_id", "secret_access_key", "session_token")
_NAMES = {"access_key_id": "access_key_id", "secret_access_key": "secret_access_key", "token": "session_token"}
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
}
_MARGIN = 300.0  # seconds before their end from which credentials are asked for anew; obstore does the same
# boto3 renews what has less than 10 to 15 minutes left whenever it is asked; so it must be asked that often.
_BOTO3_VALID = timedelta(minutes=10)


class Credentials:
    """Keys from one source. Threads need no lock: two that ask at once both get valid keys, and the later stay.

    Attributes:
        source: What a person would call the source, for messages.
    """

    def __init__(self, source: str, read: CredentialFunction) -> None:
        self.source = source
        self._read = read
        self._known: Mapping[str, Any] | None = None
        self._until: float | None = None
        self._given: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r})"

    def current(self) -> Mapping[str, Any]:
        """Return the credentials, empty where there are none and obstore looks for a role."""
        known = self._known
        if known is None or (self._until is not None and time.monotonic() > self._until):
            known = self._ask()
        return known

    def renew(self, refused: Mapping[str, Any]) -> bool:
        """Ask the source again. Return whether it has other keys than those that were refused."""
        return _keys(self._ask()) != _keys(refused)

    def config(self) -> dict[str, str]:
        """Return the keys as obstore's configuration names them."""
        return _keys(self.current())

    def secrets(self) -> set[str]:
        """Return every secret that was ever in use here: an error may repeat one that has been replaced since."""
        return set(self._given)

    def _ask(self) -> Mapping[str, Any]:
        known = self._read()
        self._given |= {str(known[name]) for name in ("secret_access_key", "token") if known.get(name)}
        expires_at = known.get("expires_at")
        if expires_at is not None:
            self._until = time.monotonic() + (expires_at - datetime.now(UTC)).total_seconds() - _MARGIN
        self._known = known
        return known


def _keys(credentials: Mapping[str, Any]) -> dict[str, str]:
    return {ours: str(credentials[name]) for name, ours in _NAMES.items() if credentials.get(name)}


class _Renewable(Protocol):
    """A store whose credentials can be renewed."""

    @property
    def credentials(self) -> Credentials:
        """Where its keys come from."""

    def reopen(self) -> None:
        """Use the keys that the source has now."""


S = TypeVar("S", bound=_Renewable)


def renewing(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let a method of a store try once more where it was refused and its credentials have been replaced since.

    Any refusal counts: the answer to a HEAD has no body, so that it never says "expired".
    """

    @functools.wraps(method)
    def call(store: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        used = store.credentials.current()
        try:
            return method(store, *args, **kwargs)
        except StoragePermissionError:
            if not store.credentials.renew(used):
                raise
        store.reopen()
        return method(store, *args, **kwargs)

    return call


def given(config: Mapping[str, str]) -> Credentials:
    """Return credentials that were given as options, in obstore's names. They never change."""
    fixed = {name: config.get(ours) for name, ours in _NAMES.items()} if config else {}
    return Credentials("the storage options", lambda: fixed)


def from_environment() -> Credentials:
    """Return the keys in ``AWS_ACCESS_KEY_ID`` and its siblings, read anew when they are refused; else a role's."""

    def read() -> Mapping[str, Any]:
        found = {ours: os.environ.get(name) for name, ours in _ENVIRONMENT.items()}
        if not (found["access_key_id"] and found["secret_access_key"]):
            return {}
        return {name: found[ours] for name, ours in _NAMES.items()}

    return Credentials("the environment (AWS_ACCESS_KEY_ID, ...) or the machine's role", read)


def from_profile(name: str) -> Credentials:
    """Return the credentials of a profile in the AWS configuration files, read by boto3."""
    boto3 = import_boto3("a profile")
    botocore = importlib.import_module("botocore.exceptions")
    try:
        session = boto3.Session(profile_name=name)
    except botocore.BotoCoreError as error:
        raise ConfigurationError(f"The AWS profile {name!r} cannot be used: {error}") from error
    return Credentials(f"the AWS profile {name!r}", functools.partial(_called, boto3_credentials(session)))


def from_function(function: Any) -> Credentials:
    """Return the credentials that a function gives whenever it is asked."""
    if not callable(function):
        raise ConfigurationError(
            "The storage option credentials must be a function without arguments, such as "
            f"`boto3_credentials(session)`; this is {type(function).__name__}."
        )

    def read() -> Mapping[str, Any]:
        known = _called(function)
        if not (isinstance(known, Mapping) and known.get("access_key_id") and known.get("secret_access_key")):
            raise ConfigurationError(
                "The function in the storage option credentials must return a mapping with access_key_id, "
                "secret_access_key, token and expires_at (the last two may be None)."
            )
        return known

    return Credentials("the function in the storage option credentials", read)


def _called(function: CredentialFunction) -> Any:
    """Call the function. It asks a service, so most of what it raises may pass: it is tried again, as a store would be.

    The text of what it raised is not repeated, since it may hold a secret; the error is chained.
    """
    try:
        return function()
    except ConfigurationError:
        raise
    except Exception as error:
        message = f"The function for credentials raised {type(error).__name__}; its text is not repeated here."
        if isinstance(error, _SLIPS):
            raise ConfigurationError(f"{message} Correct the function.") from error
        raise StoreUnavailableError(f"{message} Look at the service that it asks.") from error


def boto3_credentials(session: Any) -> CredentialFunction:
    """Return a function for the storage option ``credentials`` that asks a boto3 session.

    boto3 renews what expires: assumed roles, SSO, profiles. A dagster-aws `S3Resource` or any other code that makes a
    session can lend it.

    Args:
        session: A `boto3.Session` (or botocore's).

    Raises:
        ConfigurationError: When called: the session finds no credentials.
    """

    def ask() -> Mapping[str, Any]:
        found = session.get_credentials()
        if found is None:
            raise ConfigurationError("The boto3 session has no credentials. Configure a profile, keys or a role.")
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _BOTO3_VALID,
        }

    return ask


def import_boto3(purpose: str) -> Any:
    """Return the module boto3.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        return importlib.import_module("boto3")
    except ImportError as error:
        raise ConfigurationError(
            f"{purpose[0].upper()}{purpose[1:]} needs boto3: pip install 'dagster-resilient[aws]'."
        ) from error
