"""The sidecar beside a step whose credentials expire: it gets newer ones from its parent, and beats on."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sidecar_parent import FAST, eventually
from slow_s3 import BUCKET, SlowS3

from dagster_resilient.state.heartbeat import Sidecar
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore, open_store

pytestmark = [pytest.mark.slow, pytest.mark.alone]

CANARY = "CANARY-secret-0123456789"


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No log shows a secret, whatever went wrong."""
    caplog.set_level(logging.DEBUG)
    yield
    records = caplog.get_records("call")  # the text is that of the current phase
    assert records
    assert not [record for record in records if CANARY in f"{record.getMessage()}{record.exc_text}"]


@pytest.fixture
def slow() -> Iterator[SlowS3]:
    """An S3 server that does what it is told."""
    server = SlowS3()
    with server.running():
        yield server


class Source:
    """A function for credentials. `fails` is how often it fails before it answers again."""

    def __init__(self) -> None:
        self.key = "OLD"
        self.fails = 0
        self.asked = 0

    def __call__(self) -> dict[str, Any]:
        """Return the keys of now."""
        self.asked += 1
        if self.fails:
            self.fails -= 1
            raise RuntimeError(f"the vault is sealed: {CANARY}")
        secrets = {"secret_access_key": f"{CANARY}-secret", "token": CANARY}
        return {"access_key_id": self.key, **secrets, "expires_at": None}


@pytest.fixture
def source() -> Source:
    """Keys that may change."""
    return Source()


@pytest.fixture
def store(slow: SlowS3, source: Source) -> ObjectStore:
    """The server's bucket, opened with a function for credentials."""
    return open_store(f"s3://{BUCKET}/p", {"endpoint_url": slow.options["endpoint_url"], "credentials": source})


@pytest.fixture
def begin(store: ObjectStore) -> Iterator[Callable[..., Sidecar]]:
    """Start a sidecar of this process."""
    started: list[Sidecar] = []

    def start(**changes: Any) -> Sidecar:
        started.append(Sidecar(store, **{**FAST, "ttl": 60.0, **changes}, fence_grace=60.0))
        started[-1].start()
        return started[-1]

    yield start
    for sidecar in started:
        sidecar.close()


def beats_again(slow: SlowS3, sidecar: Sidecar) -> None:
    """Wait for a beat that is not there yet."""
    slow.objects.pop(f"p/{sidecar.key}", None)
    eventually(lambda: f"p/{sidecar.key}" in slow.objects)


def test_keys_that_expire_are_replaced_without_a_new_process(
    slow: SlowS3, source: Source, begin: Callable[..., Sidecar]
) -> None:
    """Beats go on with the keys that the source gives now, and so does the look for a fence."""
    sidecar = begin()
    beats_again(slow, sidecar)
    process = sidecar.pid
    source.key = "NEW"
    slow.expired.add("OLD")
    beats_again(slow, sidecar)
    slow.objects[f"p/{keys.fence_key(FAST['run_id'])}"] = b'{"reason": "declared lost"}'
    assert eventually(sidecar.fenced) == "declared lost"
    assert sidecar.pid == process


def test_newer_keys_are_tried_at_once(slow: SlowS3, source: Source, begin: Callable[..., Sidecar]) -> None:
    """The next beat is minutes away; the one that was refused is made up for."""
    slow.expired.add("OLD")
    sidecar = begin(interval=600.0, ttl=2000.0)
    eventually(lambda: slow.seen["put"])
    source.key = "NEW"
    sidecar._renewal._pause_until = 0.0
    sidecar._renewal.want(refused=True)
    eventually(lambda: f"p/{sidecar.key}" in slow.objects)


def test_a_source_that_fails_is_asked_until_it_answers(
    slow: SlowS3, source: Source, begin: Callable[..., Sidecar], caplog: pytest.LogCaptureFixture
) -> None:
    """The step learns of it by a warning; when the source is back, so are the beats."""
    sidecar = begin()
    beats_again(slow, sidecar)
    process = sidecar.pid
    source.fails = 3
    source.key = "NEW"
    slow.expired.add("OLD")
    beats_again(slow, sidecar)
    assert source.fails == 0
    assert sidecar.pid == process
    assert [text for text in caplog.messages if "no newer credentials" in text]


def test_a_sidecar_that_is_replaced_asks_no_source(slow: SlowS3, source: Source, begin: Callable[..., Sidecar]) -> None:
    """One that was killed is followed by another with what was known, though the source hangs or fails by then."""
    sidecar = begin()
    beats_again(slow, sidecar)
    process, source.fails = sidecar.pid, 1_000_000
    assert process is not None
    os.kill(process, signal.SIGKILL)
    eventually(lambda: sidecar.pid not in {None, process})
    beats_again(slow, sidecar)
    assert source.fails == 1_000_000


def test_a_step_that_starts_without_credentials_beats_when_it_has_them(
    slow: SlowS3, source: Source, begin: Callable[..., Sidecar]
) -> None:
    """The source fails at the very start: the sidecar waits for what it needs."""
    source.fails = 2
    sidecar = begin()
    eventually(lambda: f"p/{sidecar.key}" in slow.objects)
