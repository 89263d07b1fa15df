"""A real parent that hangs in C code, with the GIL held, is marked; and is not any more once it gets on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sidecar_parent import FAST, Parent, beat_after, beat_of, eventually, fence, runs

from dagster_resilient.state.hangs import Hang, list_hangs, read_hang
from dagster_resilient.state.heartbeat import Sidecar, read_beat
from dagster_resilient.storage.object_store import ObjectStore, open_store

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A local directory."""
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def sidecar(store: ObjectStore) -> Iterator[Sidecar]:
    """A sidecar of this very process, from which nothing is expected yet."""
    sidecar = Sidecar(store, **FAST)
    sidecar.start()
    beat_of(store, sidecar.key)
    yield sidecar
    sidecar.close()


def the_hang(store: ObjectStore) -> Hang | None:
    """The only mark, if there is one."""
    names = list_hangs(store)
    return read_hang(store, names[0].key) if names else None


def test_a_parent_that_hangs_in_c_code_is_marked_until_it_goes_on(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """It beats all the while. When the call returns, the mark goes."""
    parent = start_parent(store.url, expect=1.0, hang_for=4)
    hang = eventually(lambda: the_hang(store))
    assert (hang.task, hang.limit, hang.pid, hang.progress["step"]) == ("train", 1.0, parent.pid, 42)
    assert hang.seconds >= 1.0
    assert list_hangs(store)[0].key.removeprefix("hung/") == parent.key.removeprefix("live/")
    beat_after(store, parent.key, beat_of(store, parent.key).seq + 2)
    eventually(lambda: not list_hangs(store))
    assert runs(parent.pid)


def test_a_hang_that_is_fenced_is_ended_whatever_the_parent_does(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """No signal handler of Python's runs in it: SIGKILL does. No mark stays behind."""
    graces = {"fence_grace": 0.1, "term_grace": 0.2}
    parent = start_parent(store.url, expect=1.0, deadlock=True, close_on_term=True, sidecar=graces)
    eventually(lambda: the_hang(store))
    fence(store)
    assert parent.process.wait(30) == -signal.SIGKILL
    eventually(lambda: not runs(parent.sidecar))
    assert list_hangs(store) == []
    assert beat_of(store, parent.key).state == "exited"


def test_what_is_not_expected_to_progress_is_not_marked(store: ObjectStore, sidecar: Sidecar) -> None:
    """An expectation that was taken back counts no more; the next one does, and goodbye takes its mark along."""
    sidecar.expect("first", 0.3)
    sidecar.relax("first")
    sidecar.expect("second", 0.3)
    hang = eventually(lambda: the_hang(store))
    assert hang.task == "second"
    sidecar.close()
    assert list_hangs(store) == []
    assert read_beat(store, sidecar.key) is None


def test_a_stopped_parent_is_not_marked(
    store: ObjectStore, sidecar: Sidecar, start_parent: Callable[..., Parent]
) -> None:
    """It cannot progress. A step that is paused for an hour has not hung when it goes on."""
    parent = start_parent(store.url, expect=1.5)
    os.kill(parent.pid, signal.SIGSTOP)
    sidecar.expect("meanwhile", 3.0)
    (mark,) = eventually(lambda: list_hangs(store))
    assert mark.process == sidecar.process
    os.kill(parent.pid, signal.SIGCONT)
    eventually(lambda: len(list_hangs(store)) == 2)


def test_what_is_expected_survives_the_sidecar(store: ObjectStore, sidecar: Sidecar) -> None:
    """The one that takes its place judges anew; a mark that the first one left is deleted."""
    sidecar.expect("train", 600.0)
    sidecar.relax("train")
    sidecar.expect("train", 2.0)
    key = eventually(lambda: list_hangs(store))[0].key
    first = sidecar._child
    assert first is not None
    first.kill()
    eventually(lambda: sidecar._child not in {None, first})
    eventually(lambda: not list_hangs(store))
    assert eventually(lambda: list_hangs(store))[0].key == key
    sidecar.progress(task="train", step=1)
    eventually(lambda: not list_hangs(store))


def test_a_store_that_is_away_convicts_nobody(tmp_path: Path, store: ObjectStore, sidecar: Sidecar) -> None:
    """A step that waits for it does not hang: the time does not count, and nothing is marked when it is back."""
    (tmp_path / "root").rename(tmp_path / "away")
    eventually(lambda: "trouble" in sidecar._warned)
    sidecar.expect("train", 2.0)
    with pytest.raises(AssertionError, match="did not come"):
        eventually(lambda: False, seconds=3.0)
    (tmp_path / "away").rename(tmp_path / "root")
    beat_after(store, sidecar.key, beat_of(store, sidecar.key).seq + 2)
    assert list_hangs(store) == []
    assert eventually(lambda: the_hang(store)).task == "train"
