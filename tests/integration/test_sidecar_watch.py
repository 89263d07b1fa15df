"""The sidecar tells, and ends, a process whose task a newer attempt took over; and nobody whose lease ended rightly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sidecar_parent import FAST, LOG, Parent, append, beat_after, beat_of, eventually, fence, runs

from dagster_resilient.state import heartbeat
from dagster_resilient.state.heartbeat import Sidecar
from dagster_resilient.storage.object_store import ObjectStore, open_store

pytestmark = [pytest.mark.slow, pytest.mark.alone]

TAKEN = "a newer attempt took over train (generation 4, ours was 3); what this one computes is not committed"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A local directory, in which generation 3 holds the lease."""
    store = open_store(str(tmp_path / "root"))
    append(store, 1, 3)
    return store


@pytest.fixture
def sidecar(store: ObjectStore) -> Iterator[Sidecar]:
    """A sidecar of this very process, which watches, and ends it a minute after a takeover."""
    sidecar = Sidecar(store, **FAST, fence_grace=60.0)
    sidecar.start()
    sidecar.watch(LOG, 3, task="train")
    yield sidecar
    sidecar.close()


def some_beats(store: ObjectStore, key: str) -> None:
    """Wait for longer than a look takes, by the sidecar's own beats."""
    beat_after(store, key, beat_of(store, key).seq + 5)


def test_a_takeover_is_told_to_the_parent(store: ObjectStore, sidecar: Sidecar) -> None:
    """The parent learns the task and both generations without asking the store; its own entries mean nothing."""
    append(store, 2, 3)
    some_beats(store, sidecar.key)
    assert sidecar.fenced() is None
    append(store, 3, 4)
    assert eventually(sidecar.fenced) == TAKEN


def test_what_is_no_longer_watched_is_not_told(store: ObjectStore, sidecar: Sidecar) -> None:
    """A lease that was given away has rightful successors."""
    beat_of(store, sidecar.key)
    sidecar.unwatch(LOG)
    append(store, 2, 4)
    some_beats(store, sidecar.key)
    assert sidecar.fenced() is None


def test_a_task_that_is_let_go_of_is_no_reason_to_stop_any_more(store: ObjectStore, sidecar: Sidecar) -> None:
    """Whoever gives up the taken task goes on with others; the next lease of the same task is watched anew."""
    append(store, 2, 4)
    eventually(sidecar.fenced)
    sidecar.unwatch(LOG)
    assert sidecar.fenced() is None
    append(store, 3, 5)
    sidecar.watch(LOG, 5, task="train")
    some_beats(store, sidecar.key)
    assert sidecar.fenced() is None
    append(store, 4, 6)
    assert "generation 6, ours was 5" in str(eventually(sidecar.fenced))


def test_a_fence_outlasts_a_takeover(store: ObjectStore, sidecar: Sidecar) -> None:
    """Letting go of a task does not lift the fence of the run."""
    append(store, 2, 4)
    eventually(sidecar.fenced)
    fence(store)
    eventually(lambda: sidecar.fenced() == "declared lost")
    sidecar.unwatch(LOG)
    assert sidecar.fenced() == "declared lost"


def test_a_sidecar_that_takes_over_from_a_killed_one_knows_the_watches(store: ObjectStore, sidecar: Sidecar) -> None:
    """The OOM killer makes no zombie safe: what was to be watched still is."""
    beat_of(store, sidecar.key)
    first = sidecar._child
    assert first is not None
    first.kill()
    append(store, 2, 4)
    assert eventually(sidecar.fenced) == TAKEN
    assert sidecar._child is not first


def test_a_watch_that_cannot_be_taken_back_ends_with_its_sidecar(
    store: ObjectStore, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that reads nothing would end us for a lease that we gave away: another takes its place."""
    monkeypatch.setattr(heartbeat, "_GOODBYE", 0.1)
    beat_of(store, sidecar.key)
    first = sidecar._child
    assert first is not None
    first.send_signal(signal.SIGSTOP)
    eventually(lambda: not sidecar._send(b"{}" * 1000 + b"\n"))
    eventually(lambda: not sidecar._send(b"{}\n"))
    sidecar.unwatch(LOG)
    eventually(lambda: sidecar._child not in {None, first})
    append(store, 2, 4)
    some_beats(store, sidecar.key)
    assert sidecar.fenced() is None
    monkeypatch.undo()


def test_a_process_whose_task_was_taken_over_is_ended(store: ObjectStore, start_parent: Callable[..., Parent]) -> None:
    """After the same grace as with a fence, in the same way, and the heartbeat tells of it."""
    parent = start_parent(store.url, watch=LOG, sidecar={"fence_grace": 0.2, "term_grace": 60.0})
    append(store, 2, 4)
    assert parent.process.wait(30) == -signal.SIGTERM
    eventually(lambda: beat_of(store, parent.key).state == "exited")


def test_a_process_that_stops_by_itself_when_taken_over_is_not_signalled(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """It hears the reason and leaves with its own exit code."""
    parent = start_parent(store.url, watch=LOG, stop_when_fenced=True, sidecar={"fence_grace": 60.0})
    append(store, 2, 4)
    rest, _ = parent.process.communicate(timeout=30)
    assert (rest.strip(), parent.process.returncode) == (TAKEN, 0)


def test_a_stopped_zombie_is_ended_when_it_was_overtaken(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """Stopped, thought lost, and overtaken: it is killed where it stands, and never goes on to write."""
    parent = start_parent(store.url, watch=LOG, sidecar={"fence_grace": 0.1, "term_grace": 0.2})
    beat_of(store, parent.key)
    os.kill(parent.pid, signal.SIGSTOP)
    append(store, 2, 4)
    assert parent.process.wait(30) == -signal.SIGKILL
    eventually(lambda: not runs(parent.sidecar))


@pytest.mark.s3
def test_a_takeover_is_told_on_s3(s3_url: str, s3_options: Mapping[str, Any]) -> None:
    """The same on a real S3 server, from the listing behind the newest number that is known."""
    store = open_store(s3_url, s3_options)
    append(store, 1, 3)
    sidecar = Sidecar(store, **FAST, fence_grace=60.0)
    sidecar.start()
    sidecar.watch(LOG, 3, task="train")
    for n in range(2, 12):
        append(store, n, 3)
    some_beats(store, sidecar.key)
    assert sidecar.fenced() is None
    append(store, 12, 4)
    assert eventually(sidecar.fenced) == TAKEN
    sidecar.close()
