"""The circuit breaker of a store: while it does not answer, one request at a time asks whether it answers again.

Without one, every thread asks a dead store on its own, and a caller that has better things to do waits for a timeout
each time only to learn what is known already.

It is our own, since the libraries do not fit: pybreaker (1.4) holds one lock during each call, so that no two requests
run at once, and compares wall clocks; circuitbreaker (2.1) and purgatory (3.0) count without a lock and let any number
of calls probe at once; in none of them the open time grows or is spread.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from dagster_resilient.errors import CircuitOpenError, StorageError, StoreUnavailableError
from dagster_resilient.storage.object_store import ObjectStore

T = TypeVar("T")
Place = tuple[str, ...]

_FAILURES = 5
_FIRST_OPEN, _LONGEST_OPEN = 1.0, 5.0
_LOOK = 0.25  # seconds between two looks at whether a probe has come back

_log = logging.getLogger(__name__)


class UndecidedError(StoreUnavailableError):
    """The store answered that another write of the same key is under way. To be asked again, and no outage."""


class Breaker:
    """Counts requests in a row that the store did not answer, and says when the next one may be sent.

    Closed, all may. After `failures` in a row it is open for a time that is uniform in [0, min(longest, first x 2^n)]
    seconds, n being how often it opened in a row. Then it is half-open: one request goes, the probe. Its failure opens
    the circuit again, and any answer of the store closes it, be it "not found". A probe that hangs for `longest`
    seconds no longer keeps others from probing: else one silent connection, or one large write, would delay all work
    after the outage has ended.

    The longest time is that of the longest wait between two tries, so that a breaker never makes work go on later.
    """

    def __init__(
        self, place: Place, *, failures: int = _FAILURES, first: float = _FIRST_OPEN, longest: float = _LONGEST_OPEN
    ) -> None:
        self._place = place
        self._limit, self._first, self._longest = failures, first, longest
        self.renew()

    def __reduce__(self) -> tuple[Callable[[Place], Breaker], tuple[Place]]:
        """A copy in another process is that process's breaker of the same place."""
        return _shared, (self._place,)

    def renew(self) -> None:
        """Forget everything, the lock included: in a forked process a thread that is not there may hold it."""
        self._lock = threading.RLock()  # a signal handler may use the store within a call of the same thread
        self._failures = self._openings = 0
        self._until = self._probe_ends = 0.0
        self._probe: object | None = None
        self._since = self._reason = ""

    def turn(self) -> tuple[float, object | None]:
        """Return the seconds to wait, or 0 and the token of a probe, which is None where no probe is needed."""
        with self._lock:
            now = time.monotonic()
            if not self._openings or now < self._until:
                return max(0.0, self._until - now) if self._openings else 0.0, None
            if self._probe is not None and now < self._probe_ends:
                return min(_LOOK, self._probe_ends - now), None
            self._probe, self._probe_ends = object(), now + self._longest
            return 0.0, self._probe

    def failed(self, token: object | None, error: StoreUnavailableError) -> None:
        """Note that a request was not answered. While the circuit is open only the probe counts, not a straggler."""
        with self._lock:
            self._reason = str(error)
            self._failures += 1
            if self._openings and (token is None or token is not self._probe):
                return
            if self._failures >= self._limit:
                self._open()

    def _open(self) -> None:
        if not self._openings:
            self._since = datetime.now(UTC).isoformat(timespec="seconds")
            _log.warning("%s did not answer %d times in a row: %s", self._place[0], self._failures, self._reason)
        longest = min(self._longest, self._first * 2 ** min(self._openings, 10))  # 2^1024 is no float
        self._until = time.monotonic() + random.uniform(0.0, longest)  # noqa: S311 - spreads load, keeps no secret
        self._openings += 1
        self._probe = None

    def answered(self) -> None:
        """Note that the store answered."""
        if not self._failures:
            return
        with self._lock:
            if self._openings:
                _log.warning("%s answers again; it did not since %s", self._place[0], self._since)
            self._failures = self._openings = 0
            self._probe = None

    def abandon(self, token: object | None) -> None:
        """Note that a request ended for a reason that says nothing about the store, such as Ctrl-C."""
        with self._lock:
            if token is not None and token is self._probe:
                self._probe = None

    def refusal(self, wait: float) -> CircuitOpenError:
        """Return the error for a caller that cannot wait."""
        url = self._place[0]
        message = (
            f"Did not ask {url}: its circuit is open since {self._since}, after {self._failures} requests in a row "
            f"without an answer; the last: {self._reason.rstrip('.')}. It is asked again in {wait:.1f} s."
        )
        return CircuitOpenError(message, store=url)


class Visit:
    """One call of a patient or hasty caller, with all its tries."""

    def __init__(self, breaker: Breaker, patience: float) -> None:
        self._breaker = breaker
        self._deadline = time.monotonic() + patience
        self._may_refuse = True

    def __call__(self, request: Callable[[], T]) -> T:
        """Send one request when its turn has come, and note how it went.

        Raises:
            CircuitOpenError: The circuit is open for longer than the patience of the call, and this is its first try.
        """
        token = self._wait()
        try:
            result = request()
        except UndecidedError:
            self._breaker.answered()
            raise
        except StoreUnavailableError as error:
            self._breaker.failed(token, error)
            raise
        except StorageError:
            self._breaker.answered()
            raise
        except BaseException:
            self._breaker.abandon(token)
            raise
        self._breaker.answered()
        return result

    def _wait(self) -> object | None:
        """Wait for a turn. Who has waited asks once more when the patience ends, whatever the state.

        To give up then without asking would turn an outage that has just ended into a failure.
        """
        while True:
            wait, token = self._breaker.turn()
            left = self._deadline - time.monotonic()
            if self._may_refuse and wait > max(left, 0.0):
                raise self._breaker.refusal(wait)
            self._may_refuse = False
            if wait <= 0 or left <= 0:
                return token
            time.sleep(min(wait, left))


_SHARED: WeakValueDictionary[Place, Breaker] = WeakValueDictionary()
_lock = threading.Lock()


def breaker_of(store: ObjectStore) -> Breaker:
    """Return the breaker of a store: one for each kind, URL and endpoint in this process."""
    endpoint: Any = getattr(store, "endpoint", "")
    return _shared((store.url, type(store).__name__, str(endpoint)))


def _shared(place: Place) -> Breaker:
    with _lock:
        found = _SHARED.get(place)
        if found is None:
            found = _SHARED[place] = Breaker(place)
    return found


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - the old one may be held for ever
    _lock = threading.Lock()
    for breaker in list(_SHARED.values()):
        breaker.renew()


os.register_at_fork(after_in_child=_after_fork)
