"""Retries around a store: finite, exponential, full jitter; and the answer to a lost reply of a conditional create."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import tenacity

from dagster_resilient.errors import (
    CircuitOpenError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreUnavailableError,
    VersionConflictError,
)
from dagster_resilient.storage.breaker import Breaker, UndecidedError, Visit, breaker_of
from dagster_resilient.storage.object_store import Buffer, Leftover, ObjectInfo, ObjectStore, as_buffers

T = TypeVar("T")

DEFAULT_PATIENCE = 60.0
# For a step's values and inputs: an outage of minutes must not fail work of hours.
OUTAGE_PATIENCE = 900.0
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0


def patiently(call: Callable[[], T], patience: float, breaker: Breaker | None = None) -> T:
    """Call, and call again while the store is unavailable, for at most `patience` seconds; see `RetryingStore`.

    The last try is made when the patience ends, not up to a longest wait before it.
    """
    request = call if breaker is None else partial(Visit(breaker, patience), call)
    begun = time.monotonic()
    try:
        # Nearly every call ends here. To build the retries for each would cost as much as a small request.
        return request()
    except StoreUnavailableError as error:
        if not _may_pass(error):
            raise
        first = [error]

    def again() -> T:
        if first:
            raise first.pop()
        return request()

    return _retrying(max(0.0, patience - (time.monotonic() - begun)))(again)


def _retrying(patience: float) -> tenacity.Retrying:
    spread = tenacity.wait_random_exponential(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT)

    def wait(state: tenacity.RetryCallState) -> float:
        return min(spread(state), max(0.0, patience - (state.seconds_since_start or 0.0)))

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_pass), wait=wait, stop=tenacity.stop_after_delay(patience), reraise=True
    )


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, StoreUnavailableError) and not isinstance(error, CircuitOpenError)


class RetryingStore(ObjectStore):
    """A store that tries again while the one inside is unavailable, for at most `patience` seconds.

    Only `StoreUnavailableError` is retried: "permission denied" and "not found" do not change by asking again. The wait
    before retry n, counted from 0, is uniform in [0, min(5 s, 0.1 s x 2^n)] (full jitter: AWS Architecture Blog, 2015).

    All stores on one place in a process share a circuit breaker, whatever their patience (see `breaker`). While it is
    open a call waits for it, and counts that into its patience; one that has less patience than that fails at once.
    """

    def __init__(self, inner: ObjectStore, patience: float = DEFAULT_PATIENCE) -> None:
        self._inner = inner
        self._patience = patience
        self._breaker = breaker_of(inner)
        self.url = inner.url
        self.is_shared = inner.is_shared
        self.checks_bodies = inner.checks_bodies
        self.replaces = inner.replaces

    def __repr__(self) -> str:
        return repr(self._inner)

    def with_patience(self, seconds: float) -> RetryingStore:
        """Return the same store with another bound on the time that one call may spend in retries, in seconds."""
        return RetryingStore(self._inner, seconds)

    def _retry(self, call: Callable[[], T]) -> T:
        return patiently(call, self._patience, self._breaker)

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._retry(lambda: self._inner.get(key))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range."""
        return self._retry(lambda: self._inner.get_ranges(key, ranges))

    def get_into(self, key: str, buffer: bytearray | memoryview, start: int = 0) -> None:
        """Fill a buffer, from its beginning again where the store is unavailable."""
        self._retry(lambda: self._inner.get_into(key, buffer, start))

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object, again and again from the same buffers where the store is unavailable."""
        whole = as_buffers(buffers)
        self._retry(lambda: self._inner.put(key, whole))

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Create once. A refusal by an object that equals ours means that our own reply was lost: that is success."""
        body = b"".join(as_buffers(buffers))
        self._retry(lambda: self._create_once(key, body))

    def _create_once(self, key: str, body: bytes) -> None:
        try:
            self._inner.create(key, body)
        except ObjectExistsError as refused:
            try:
                stored = self._inner.get(key)
            except ObjectNotFoundError:
                # S3 answers 409 while another conditional write of this key is under way: nobody has won yet.
                message = f"A concurrent create of {self.url}/{key} has not been decided."
                raise UndecidedError(message, store=self.url, key=key) from refused
            if stored != body:
                raise

    def replace(self, key: str, buffers: Buffer | Iterable[Buffer], version: str) -> str:
        """Replace once. A refusal by an object that equals ours means that our own reply was lost: that is success."""
        whole = as_buffers(buffers)
        return self._retry(lambda: self._replace_once(key, whole, version))

    def _replace_once(self, key: str, views: Sequence[memoryview], version: str) -> str:
        try:
            return self._inner.replace(key, views, version)
        except VersionConflictError:
            # The version first: if another writer comes between the two, the caller's next replace meets a conflict.
            ours = self._version_of(key, b"".join(views))
            if ours is None:
                raise
            return ours

    def _version_of(self, key: str, body: bytes) -> str | None:
        try:
            info = self._inner.head(key)
            return info.version if self._inner.get(key) == body else None
        except ObjectNotFoundError:
            return None

    def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        return self._retry(lambda: self._inner.head(key))

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Collect before yielding: a listing that breaks in the middle starts again and shows nothing twice."""
        return iter(self._retry(lambda: [*self._inner.list(prefix, start_after)]))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete exactly these keys. A second try meets keys that are gone already, which is no error."""
        doomed = list(keys)
        self._retry(lambda: self._inner.delete(doomed))

    def leftovers(self) -> Iterator[Leftover]:
        """Collect before yielding, as `list` does."""
        return iter(self._retry(lambda: [*self._inner.leftovers()]))

    def discard(self, leftover: Leftover) -> None:
        """Remove a leftover. A second try meets one that is gone already, which is no error."""
        self._retry(lambda: self._inner.discard(leftover))

    def is_made(self) -> bool:
        """Return what the store inside returns."""
        return self._retry(self._inner.is_made)

    def sidecar_config(self) -> Mapping[str, Any]:
        """Return what the store inside returns."""
        return self._inner.sidecar_config()


def hasty(patient: T, seconds: float) -> T:
    """Return the same store or records with that much patience, if they have any.

    For calls whose caller has better things to do, or the opposite.
    """
    with_patience: Callable[[float], T] | None = getattr(patient, "with_patience", None)
    return patient if with_patience is None else with_patience(seconds)
