"""How the sidecar comes by newer credentials: it has a copy, and what is copied may expire before the step ends."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dagster_resilient.errors import ConfigurationError, ObjectNotFoundError, StoragePermissionError
from dagster_resilient.state._sidecar_store import secrets_of, without
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.storage.retry import hasty

_OF_OURS = (ConfigurationError, StoragePermissionError)
_log = logging.getLogger(__name__)


class Renewal:
    """What the sidecar was told of the store last, and the search for something newer when its calls go wrong.

    The search has a thread of its own: a function for credentials asks a service, which may hang, and the thread that
    hears of fences must not wait for that. There is one search at a time, and at most two in an interval.

    Args:
        store: The store of the parent.
        key: Key of the heartbeat.
        interval: Seconds between beats.
        deliver: Passes a new configuration on to the sidecar.
        warn: Warns, once of each kind, with a kind and a text.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        interval: float,
        deliver: Callable[[Mapping[str, Any]], None],
        warn: Callable[[str, str], None],
    ) -> None:
        self.known: dict[str, Any] | None = None
        self._store, self._key, self._interval = store, key, interval
        self._deliver, self._warn = deliver, warn
        self._search: threading.Thread | None = None
        self._pause_until = 0.0

    def begin(self) -> None:
        """Ask the store for the first time. Where it cannot tell, the sidecar will say that it needs to know."""
        try:
            self.known = dict(self._store.sidecar_config())
        except Exception as error:  # noqa: BLE001 - G7: credentials that cannot be had now must not fail the step
            self._failed(error)

    def want(self, *, refused: bool) -> None:
        """Search, if no search is under way or just over. Returns at once.

        Args:
            refused: Whether the store refused what the sidecar was told.
        """
        now = time.monotonic()
        if now < self._pause_until or (self._search is not None and self._search.is_alive()):
            return
        self._pause_until = now + self._interval / 2
        self._search = threading.Thread(target=self._find, args=(refused,), name="sidecar-renewal", daemon=True)
        with contextlib.suppress(RuntimeError):  # the limit of threads is reached: the next failure asks again
            self._search.start()

    def _find(self, refused: bool) -> None:
        try:
            found = dict(self._store.sidecar_config())
            if refused and found == self.known:
                self._provoke()
                found = dict(self._store.sidecar_config())
        except Exception as error:  # noqa: BLE001 - G7: whatever a function for credentials raises, it is asked again
            self._failed(error)
            return
        if found != self.known:
            # Before it is delivered: a sidecar that is started meanwhile begins with it.
            self.known = found
            self._deliver(found)
            _log.info("Heartbeat: the sidecar of %s was given newer credentials.", self._key)

    def _provoke(self) -> None:
        """Read something, as the step would: a store whose keys are refused gets newer ones from their source."""
        with contextlib.suppress(ObjectNotFoundError):
            hasty(self._store, 0.0).get(self._key)

    def _failed(self, error: Exception) -> None:
        """Show the text of what we wrote ourselves. That of a function for credentials may hold what it is to hide."""
        kinds = [type(one).__name__ for one in (error, error.__cause__) if one is not None]
        text = str(error) if isinstance(error, _OF_OURS) else " from ".join(kinds)
        self._warn("renewal", f"no newer credentials for {self._key}: {without(secrets_of(self.known), text)}")
