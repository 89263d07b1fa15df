"""The sidecar beside parents that hold the GIL or fork, and on stores that are slow, refuse or hang."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sidecar_parent import FAST, LOG, Parent, beat_after, beat_of, eventually, fence, runs
from slow_s3 import BUCKET, SlowS3

from dagster_resilient.state import heartbeat
from dagster_resilient.state.heartbeat import Sidecar, process_identity
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore, open_store

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A local directory."""
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def slow() -> Iterator[SlowS3]:
    """An S3 server that does what it is told."""
    server = SlowS3()
    with server.running():
        yield server


def newest(slow: SlowS3, key: str) -> int:
    """Number of the last beat that the server holds."""
    raw = slow.objects.get(f"p/{key}")
    return int(json.loads(raw)["seq"]) if raw else 0


# ---- parents


def ticks(parent: Parent) -> bytes:
    """What a thread of the parent has written since the last look."""
    assert parent.process.stdout is not None
    os.set_blocking(parent.process.stdout.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        return os.read(parent.process.stdout.fileno(), 1_000_000)
    return b""


def test_a_parent_that_holds_the_gil_beats_on(store: ObjectStore, start_parent: Callable[..., Parent]) -> None:
    """While no other thread of it runs, it still shows that it lives; a fence ends it, though no handler runs."""
    parent = start_parent(store.url, hold_gil=True, sidecar={"fence_grace": 0.1, "term_grace": 0.2})

    def held() -> bool:
        ticks(parent)
        beat_after(store, parent.key, beat_of(store, parent.key).seq + 3)
        return ticks(parent) == b""

    eventually(held)
    beat_after(store, parent.key, beat_of(store, parent.key).seq + 3)
    assert ticks(parent) == b""
    fence(store)
    assert parent.process.wait(30) == -signal.SIGKILL
    eventually(lambda: beat_of(store, parent.key).state == "exited")


def test_the_death_of_a_forked_child_is_not_that_of_its_parent(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """A data loader worker that is killed, with its copy of the pipe, changes nothing."""
    parent = start_parent(store.url, fork_a_holder=True)
    os.kill(parent.children[0], signal.SIGKILL)
    eventually(lambda: not runs(parent.children[0]))
    assert beat_after(store, parent.key, beat_of(store, parent.key).seq + 2).state == "running"
    assert runs(parent.pid)


def test_an_orphan_is_ended_with_its_tree(store: ObjectStore, start_parent: Callable[..., Parent]) -> None:
    """Loader workers in sessions of their own, which ignore SIGTERM, do not outlive the step that lost its worker."""
    worker = start_parent(store.url)
    parent = start_parent(
        store.url, ignore_term=True, children=True, sidecar={"worker": process_identity(worker.pid), "term_grace": 0.2}
    )
    worker.process.kill()
    assert parent.process.wait(30) == -signal.SIGKILL
    eventually(lambda: not any(runs(pid) for pid in [*parent.children, parent.sidecar, worker.sidecar]))


# ---- stores


def test_a_store_slower_than_the_first_limit_gets_beats_and_shows_its_fence(
    slow: SlowS3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first calls are cut off; the limit grows until they go through. One warning tells of it."""
    monkeypatch.setattr(heartbeat, "_STORE_TIMEOUT", 0.1)
    slow.delay = 0.4
    store = open_store(f"s3://{BUCKET}/p", slow.options)
    sidecar = Sidecar(store, **{**FAST, "ttl": 8.0}, fence_grace=60.0)
    sidecar.start()
    eventually(lambda: newest(slow, sidecar.key) >= 3)
    assert slow.cut["put"] > 0
    slow.objects[f"p/{keys.fence_key(FAST['run_id'])}"] = b'{"reason": "declared lost"}'
    assert eventually(sidecar.fenced) == "declared lost"
    slow.delay = 0.0
    sidecar.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "is tried again" in caplog.text


def test_requests_that_hang_do_not_hold_up_the_first_beat_after(slow: SlowS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store hangs for longer than this test; once it is back, a beat lands while the old ones still hang."""
    monkeypatch.setattr(heartbeat, "_STORE_TIMEOUT", 600.0)
    slow.delay = 1000.0
    store = open_store(f"s3://{BUCKET}/p", slow.options)
    sidecar = Sidecar(store, **{**FAST, "interval": 0.3, "ttl": 60.0})
    sidecar.start()
    eventually(lambda: slow.seen["put"] >= 2)
    slow.delay = 0.0
    eventually(lambda: newest(slow, sidecar.key))
    sidecar.close()


@pytest.mark.parametrize("broken", [{"refuses": True}, {"delay": 1000.0}])
def test_a_store_that_fails_ends_nobody(
    slow: SlowS3, start_parent: Callable[..., Parent], broken: dict[str, Any]
) -> None:
    """Failed beats and looks, however many, and a grace of nothing: no signal. Beats go on when it is back."""
    graces = {"fence_grace": 0.0, "term_grace": 0.0}
    url = f"s3://{BUCKET}/p"
    parent = start_parent(url, slow.options, watch=LOG, store_timeout=0.05, sidecar={**graces, "interval": 0.05})
    eventually(lambda: newest(slow, parent.key) and slow.seen["list"])
    for name, value in broken.items():
        setattr(slow, name, value)
    before = slow.seen.copy()
    eventually(lambda: all(slow.seen[verb] - before[verb] >= 6 for verb in ("put", "get", "list")))
    assert parent.process.poll() is None
    last = newest(slow, parent.key)
    slow.delay, slow.refuses = 0.0, False
    eventually(lambda: newest(slow, parent.key) > last + 2)
    assert parent.process.poll() is None


def test_after_an_outage_a_takeover_during_it_is_found(slow: SlowS3, start_parent: Callable[..., Parent]) -> None:
    """What was written while the sidecar could not ask is read when it can, and then ends the zombie."""
    url = f"s3://{BUCKET}/p"
    parent = start_parent(url, slow.options, watch=LOG, store_timeout=0.05, sidecar={"fence_grace": 0.0})
    eventually(lambda: slow.seen["list"])
    slow.refuses = True
    slow.objects[f"p/{LOG}{2:010d}.json"] = b'{"generation": 4}'
    before = slow.seen["list"]
    eventually(lambda: slow.seen["list"] > before + 2)
    assert parent.process.poll() is None
    slow.refuses = False
    assert parent.process.wait(30) == -signal.SIGTERM
