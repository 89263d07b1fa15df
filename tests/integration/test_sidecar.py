"""The sidecar with real processes: killed, stopped, orphaned and fenced parents, and stores that go away."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sidecar_parent import FAST, RUN, Parent, beat_after, beat_of, eventually, fence, runs

from dagster_resilient.state.heartbeat import Sidecar, ensure_sidecar, list_beats, process_identity, read_beat
from dagster_resilient.storage.object_store import ObjectStore, open_store

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A local directory."""
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def sidecar(store: ObjectStore) -> Iterator[Sidecar]:
    """A sidecar of this very process, which a fence does not end for a minute."""
    sidecar = Sidecar(store, **FAST, fence_grace=60.0)
    sidecar.start()
    yield sidecar
    sidecar.close()


def test_a_heartbeat_says_who_lives_and_is_listed(store: ObjectStore, sidecar: Sidecar) -> None:
    """The beat names run, process and pid, and the listing finds it by name."""
    beat = beat_of(store, sidecar.key)
    assert (beat.run_id, beat.role, beat.pid, beat.state) == (RUN, "step", os.getpid(), "running")
    assert [name.key for name in list_beats(store)] == [sidecar.key]


def test_progress_appears_in_a_later_beat(store: ObjectStore, sidecar: Sidecar) -> None:
    """What is reported, and the step it belongs to, can be read from outside within an interval."""
    sidecar.progress(step=1, loss=float("nan"), step_key="train")
    sidecar.progress(step=2)
    beat = eventually(lambda: beat if (beat := read_beat(store, sidecar.key)) and beat.progress else None)
    beat = beat_after(store, sidecar.key, beat.seq)
    assert (beat.step_key, beat.progress) == ("train", {"step": 2, "loss": "NaN"})


def test_goodbye_deletes_the_heartbeat_and_ends_the_sidecar(store: ObjectStore, sidecar: Sidecar) -> None:
    """After a clean close nothing is left: no object, no process, no zombie."""
    beat_of(store, sidecar.key)
    assert sidecar._child is not None
    sidecar.close()
    assert read_beat(store, sidecar.key) is None
    assert not Path(f"/proc/{sidecar._child.pid}").exists()


def test_a_killed_parent_is_reported_with_its_last_progress(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """A kill -9 leaves one last beat that says so, with what the parent reported just before, and no sidecar."""
    parent = start_parent(store.url, sidecar={"interval": 600.0})
    parent.process.kill()
    beat = eventually(lambda: beat if (beat := read_beat(store, parent.key)) and beat.state == "exited" else None)
    assert beat.progress == {"step": 42}
    eventually(lambda: not runs(parent.sidecar))


def test_a_forked_child_that_holds_the_pipe_does_not_hide_the_death(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """The parent's death is seen by its pidfd: the pipe stays open in a child that it forked."""
    parent = start_parent(store.url, fork_a_holder=True)
    parent.process.kill()
    eventually(lambda: beat_of(store, parent.key).state == "exited")
    assert runs(parent.children[0])


def test_a_stopped_parent_does_not_beat(
    store: ObjectStore, sidecar: Sidecar, start_parent: Callable[..., Parent]
) -> None:
    """While another process beats on, a stopped one is silent; it beats again when it goes on."""
    parent = start_parent(store.url)
    beat_of(store, parent.key)
    os.kill(parent.pid, signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{parent.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    beat_after(store, sidecar.key, beat_of(store, sidecar.key).seq + 2)  # a beat that was under way has arrived
    silent = beat_of(store, parent.key).seq
    beat_after(store, sidecar.key, beat_of(store, sidecar.key).seq + 5)
    assert beat_of(store, parent.key).seq == silent
    os.kill(parent.pid, signal.SIGCONT)
    assert beat_after(store, parent.key, silent).state == "running"


def test_a_fence_is_told_to_the_parent(store: ObjectStore, sidecar: Sidecar) -> None:
    """The parent learns the reason without asking the store."""
    beat_of(store, sidecar.key)
    assert sidecar.fenced() is None
    fence(store)
    assert eventually(sidecar.fenced) == "declared lost"


def test_the_fence_of_another_run_means_nothing(store: ObjectStore, sidecar: Sidecar) -> None:
    """Only the own run's fence counts."""
    fence(store, "run-2")
    beat_after(store, sidecar.key, beat_of(store, sidecar.key).seq + 2)
    assert sidecar.fenced() is None


def test_a_fenced_parent_that_stops_by_itself_is_not_signalled(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """Within its grace it leaves with its own exit code, and its heartbeat is gone."""
    parent = start_parent(store.url, stop_when_fenced=True, sidecar={"fence_grace": 60.0})
    fence(store)
    rest, _ = parent.process.communicate(timeout=30)
    assert (rest.strip(), parent.process.returncode) == ("declared lost", 0)
    assert read_beat(store, parent.key) is None


def test_a_fenced_parent_that_goes_on_is_terminated(store: ObjectStore, start_parent: Callable[..., Parent]) -> None:
    """After the grace comes SIGTERM, and the heartbeat tells of the end."""
    parent = start_parent(store.url, sidecar={"fence_grace": 0.2, "term_grace": 60.0})
    fence(store)
    assert parent.process.wait(30) == -signal.SIGTERM
    eventually(lambda: beat_of(store, parent.key).state == "exited")


def test_a_parent_that_ignores_sigterm_is_killed_with_its_tree(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """Children in sessions of their own and grandchildren go too; the sidecar reports, then ends."""
    parent = start_parent(
        store.url, ignore_term=True, children=True, sidecar={"fence_grace": 0.1, "term_grace": 0.2, "interval": 0.2}
    )
    assert len(parent.children) == 2
    fence(store)
    assert parent.process.wait(30) == -signal.SIGKILL
    eventually(lambda: not any(runs(pid) for pid in [*parent.children, parent.sidecar]))
    assert beat_of(store, parent.key).state == "exited"


def test_a_child_that_was_born_after_sigterm_is_killed_too(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """A parent that answers SIGTERM by starting more processes takes them along."""
    parent = start_parent(store.url, spawn_on_term=True, sidecar={"fence_grace": 0.1, "term_grace": 2.0})
    fence(store)
    assert parent.process.stdout is not None
    child = int(parent.process.stdout.readline())
    assert runs(child)
    assert parent.process.wait(30) == -signal.SIGKILL
    eventually(lambda: not runs(child))


def test_a_parent_that_says_goodbye_after_sigterm_is_not_killed(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """Told to leave, it saves, closes, and takes longer to exit than the grace: its exit code is its own."""
    parent = start_parent(store.url, close_on_term=True, sidecar={"fence_grace": 0.1, "term_grace": 0.2})
    fence(store)
    eventually(lambda: not runs(parent.sidecar))
    assert parent.process.stdin is not None
    parent.process.stdin.write("leave\n")
    parent.process.stdin.flush()
    assert parent.process.wait(30) == 0


def test_what_a_terminated_parent_leaves_running_is_killed(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """The parent obeys SIGTERM; its children, by then init's, are remembered and ended after the grace."""
    parent = start_parent(store.url, children=True, sidecar={"fence_grace": 0.1, "term_grace": 0.5})
    fence(store)
    assert parent.process.wait(30) == -signal.SIGTERM
    eventually(lambda: not any(runs(pid) for pid in [*parent.children, parent.sidecar]))


def test_an_orphan_is_ended_when_its_run_worker_dies(store: ObjectStore, start_parent: Callable[..., Parent]) -> None:
    """A step whose run worker was killed does not go on writing."""
    with subprocess.Popen(["/bin/sleep", "300"]) as worker:
        parent = start_parent(
            store.url, ignore_term=True, sidecar={"worker": process_identity(worker.pid), "term_grace": 0.2}
        )
        beat_of(store, parent.key)
        assert parent.process.poll() is None
        worker.kill()
        assert parent.process.wait(30) == -signal.SIGKILL
    assert eventually(lambda: beat_of(store, parent.key).state == "exited")


def test_a_run_worker_that_died_before_the_start_is_seen(
    store: ObjectStore, start_parent: Callable[..., Parent]
) -> None:
    """Another process that has its pid by now does not stand in for it."""
    me = process_identity(os.getpid())
    assert me is not None
    parent = start_parent(store.url, sidecar={"worker": (me[0], me[1] - 1), "term_grace": 60.0})
    assert parent.process.wait(30) == -signal.SIGTERM


def test_a_store_that_goes_away_harms_nobody(
    tmp_path: Path, store: ObjectStore, sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """No beat, no fence, no signal while it is away, one warning; beats and fences work when it is back."""
    before = beat_of(store, sidecar.key)
    assert sidecar._child is not None
    (tmp_path / "root").rename(tmp_path / "away")
    eventually(lambda: "tried again" in caplog.text)
    assert not (tmp_path / "root").exists()
    assert sidecar._child.poll() is None
    (tmp_path / "away").rename(tmp_path / "root")
    beat_after(store, sidecar.key, before.seq + 2)
    assert sidecar.fenced() is None
    fence(store)
    assert eventually(sidecar.fenced) == "declared lost"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_fence_is_seen_though_beats_cannot_be_written(tmp_path: Path, store: ObjectStore, sidecar: Sidecar) -> None:
    """A store that refuses writes, as a full disk does, still shows its fences."""
    beat_of(store, sidecar.key)
    (tmp_path / "root" / "live").rename(tmp_path / "root" / "was_live")
    (tmp_path / "root" / "live").write_text("not a folder")
    fence(store)
    assert eventually(sidecar.fenced) == "declared lost"


def test_ctrl_c_leaves_the_sidecar_running(store: ObjectStore, sidecar: Sidecar) -> None:
    """Signals of the terminal reach the whole group: what they mean is the parent's to decide."""
    before = beat_of(store, sidecar.key).seq
    assert sidecar._child is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        sidecar._child.send_signal(number)
    beat_after(store, sidecar.key, before + 2)
    assert sidecar._child.poll() is None


def test_signals_are_blocked_from_the_sidecars_first_instant(store: ObjectStore) -> None:
    """A Ctrl-C while the sidecar is starting does not end it, and the parent's own mask is as before."""
    sidecar = Sidecar(store, **FAST)
    sidecar.start()
    assert sidecar._child is not None
    first = sidecar._child
    first.send_signal(signal.SIGINT)
    assert beat_of(store, sidecar.key).seq >= 1
    assert first.poll() is None
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    sidecar.close()


def test_a_killed_sidecar_is_started_again(
    store: ObjectStore, sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """A process whose sidecar falls to the OOM killer is not taken for lost; the log tells of it."""
    beat_of(store, sidecar.key)
    first = sidecar._child
    assert first is not None
    first.kill()
    eventually(lambda: sidecar._child not in {None, first})
    store.delete([sidecar.key])
    assert beat_of(store, sidecar.key).state == "running"
    assert "ended with code -9" in caplog.text


def test_sidecars_that_always_die_are_given_up(store: ObjectStore, sidecar: Sidecar) -> None:
    """Restarts are finite, and progress and close go on working without one."""
    assert sidecar._reader is not None
    killed = set()
    while sidecar._reader.is_alive():
        if (child := sidecar._child) is not None:
            child.kill()
            killed.add(child.pid)
        sidecar._reader.join(0.01)
    assert len(killed) == 4
    sidecar.progress(step=1)
    sidecar.close()


def test_others_see_no_configuration_and_hold_no_pipe_of_the_parent(store: ObjectStore, sidecar: Sidecar) -> None:
    """The configuration, which may hold credentials, is in no argument; stderr is not the parent's."""
    beat_of(store, sidecar.key)
    assert sidecar._child is not None
    proc = Path(f"/proc/{sidecar._child.pid}")
    arguments = (proc / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert arguments[1:3] == [b"-I", b"-S"]
    assert len(arguments) == 4
    assert RUN.encode() not in (proc / "environ").read_bytes()
    assert (proc / "fd" / "2").readlink() == Path("/dev/null")
    assert (proc / "cwd").readlink() == Path("/")


def test_a_thread_may_start_it_and_end(store: ObjectStore) -> None:
    """The end of the thread that started it is not the end of the process."""
    sidecar = Sidecar(store, **FAST)
    thread = threading.Thread(target=sidecar.start)
    thread.start()
    thread.join()
    beat = beat_of(store, sidecar.key)
    assert beat_after(store, sidecar.key, beat.seq + 2).state == "running"
    sidecar.close()


def _work(url: str, answers: Any, go: Any) -> None:
    sidecar = ensure_sidecar(open_store(url), **FAST)
    assert sidecar is not None
    answers.put(sidecar.key)
    go.wait(60)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_daemonic_process_beats_and_says_goodbye_at_its_end(store: ObjectStore, method: str) -> None:
    """Daemonic processes may start it; a forked one, which skips atexit, says goodbye as well."""
    context = multiprocessing.get_context(method)
    answers, go = context.Queue(), context.Event()
    child = context.Process(target=_work, args=(store.url, answers, go), daemon=True)
    child.start()
    key = answers.get(timeout=60)
    assert beat_of(store, key).pid == child.pid
    go.set()
    child.join(60)
    assert child.exitcode == 0
    assert read_beat(store, key) is None


@pytest.mark.s3
def test_beats_fences_and_goodbye_on_s3(s3_url: str, s3_options: Mapping[str, Any]) -> None:
    """The same on a real S3 server, through obstore."""
    store = open_store(s3_url, s3_options)
    sidecar = Sidecar(store, **FAST, fence_grace=60.0)
    sidecar.start()
    sidecar.progress(step=1)
    beat = beat_of(store, sidecar.key)
    assert beat_after(store, sidecar.key, beat.seq).progress == {"step": 1}
    fence(store)
    assert eventually(sidecar.fenced) == "declared lost"
    sidecar.close()
    assert read_beat(store, sidecar.key) is None


@pytest.mark.s3
def test_a_killed_parent_is_reported_on_s3(
    s3_url: str, s3_options: Mapping[str, Any], start_parent: Callable[..., Parent]
) -> None:
    """The last beat needs no living parent, and the secret key is in no argument of the sidecar."""
    store = open_store(s3_url, s3_options)
    parent = start_parent(s3_url, s3_options)
    beat_of(store, parent.key)
    secret = str(s3_options["secret"]).encode()
    assert secret not in Path(f"/proc/{parent.sidecar}/cmdline").read_bytes()
    assert secret not in Path(f"/proc/{parent.sidecar}/environ").read_bytes()
    parent.process.kill()
    eventually(lambda: beat_of(store, parent.key).state == "exited")
