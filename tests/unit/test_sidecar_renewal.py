"""The search for newer credentials of the sidecar: when it asks, what it passes on, and what it survives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dagster_resilient.errors import ConfigurationError, StoragePermissionError, StoreUnavailableError
from dagster_resilient.state._sidecar_renewal import Renewal
from dagster_resilient.storage.memory_store import MemoryObjectStore

CANARY = "CANARY-secret-0123456789"


class Keyed(MemoryObjectStore):
    """A store that tells its keys. A read renews them, as after a refusal."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.key = "old"
        self.renewed = "old"
        self.before: Callable[[], object] = lambda: None
        self.reads = 0

    def sidecar_config(self) -> Mapping[str, Any]:
        """Return the keys of now."""
        self.before()
        return {"kind": "s3", "config": {"access_key_id": self.key, "secret_access_key": CANARY}}

    def get(self, key: str) -> bytes:
        """Read, and be given newer keys."""
        self.reads += 1
        self.key = self.renewed
        return super().get(key)


class Searching:
    """A renewal that has begun, and what came of it."""

    def __init__(self, name: str, interval: float = 0.0) -> None:
        self.store = Keyed(name)
        self.delivered: list[str] = []
        self.warnings: list[tuple[str, str]] = []
        self.renewal = Renewal(
            self.store,
            "live/a",
            interval,
            lambda config: self.delivered.append(config["config"]["access_key_id"]),
            lambda kind, text: self.warnings.append((kind, text)),
        )
        self.renewal.begin()

    def want(self, *, refused: bool) -> None:
        """Search, and wait for the end of it."""
        self.renewal.want(refused=refused)
        assert self.renewal._search is not None
        self.renewal._search.join(30)


@pytest.fixture
def searching(request: pytest.FixtureRequest) -> Searching:
    """A search that may follow the last one at once."""
    return Searching(request.node.nodeid)


def test_newer_keys_are_passed_on_once(searching: Searching) -> None:
    """Where the store has them already, nothing is read; where they are known already, nothing is sent."""
    searching.store.key = "new"
    searching.want(refused=True)
    searching.want(refused=False)
    assert (searching.delivered, searching.store.reads) == (["new"], 0)


def test_keys_that_were_refused_are_renewed_by_use(searching: Searching) -> None:
    """The store knows no newer ones by itself: a read shows it that they are refused. Other trouble is no reason."""
    searching.store.renewed = "new"
    searching.want(refused=False)
    assert (searching.delivered, searching.store.reads) == ([], 0)
    searching.want(refused=True)
    assert (searching.delivered, searching.store.reads) == (["new"], 1)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError(f"vault {CANARY}"), "RuntimeError"),
        (StoreUnavailableError(f"vault {CANARY}"), "StoreUnavailableError"),
        (StoragePermissionError(f"{CANARY}: renew them there"), "(hidden): renew them there"),
        (ConfigurationError("no credentials"), "no credentials"),
    ],
)
def test_a_source_that_fails_is_survived_and_asked_again(
    searching: Searching, error: Exception, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises is a warning without a secret; what was known stays known."""
    caplog.set_level(logging.DEBUG)

    def fail() -> None:
        raise error

    searching.store.before = fail
    searching.want(refused=True)
    assert searching.delivered == []
    assert searching.renewal.known is not None
    [(_, text)] = searching.warnings
    assert text.endswith(shown)
    assert CANARY not in text + caplog.text
    searching.store.before, searching.store.key = lambda: None, "new"
    searching.want(refused=True)
    assert searching.delivered == ["new"]


def test_a_source_that_fails_at_the_start_fails_nobody(request: pytest.FixtureRequest) -> None:
    """The sidecar starts without a store, and gets it once the source answers."""
    searching = Searching(request.node.nodeid)
    searching.renewal.known = None

    def fail() -> None:
        raise StoreUnavailableError("the vault is sealed")

    searching.store.before = fail
    searching.renewal.begin()
    assert searching.renewal.known is None
    searching.store.before = lambda: None
    searching.want(refused=True)
    assert searching.delivered == ["old"]


def test_a_source_that_hangs_is_asked_by_one_thread(searching: Searching) -> None:
    """However often the sidecar complains meanwhile; the one who hears it is not held up."""
    go, asked = threading.Event(), list[int]()
    searching.store.before = lambda: (asked.append(1), go.wait(30))
    for _ in range(5):
        searching.renewal.want(refused=True)
    assert asked == [1]
    go.set()
    searching.want(refused=True)


def test_a_source_is_not_asked_at_each_complaint(request: pytest.FixtureRequest) -> None:
    """Many watched logs are refused within one interval: that is one question."""
    searching = Searching(request.node.nodeid, interval=600.0)
    for _ in range(5):
        searching.want(refused=True)
    assert searching.store.reads == 1
