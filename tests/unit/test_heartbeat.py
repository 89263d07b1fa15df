"""Beats, their names, the pieces of the sidecar that need no second process."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from datetime import UTC
from pathlib import Path

import numpy as np
import pytest

from dagster_resilient.errors import IntegrityError, SchemaVersionError
from dagster_resilient.state import _processes, _sidecar
from dagster_resilient.state._sidecar_pipe import LONGEST_LINE, as_lines
from dagster_resilient.state._sidecar_pipe import plain as as_plain
from dagster_resilient.state._sidecar_registry import Registry
from dagster_resilient.state.heartbeat import (
    Beat,
    LiveName,
    Sidecar,
    ensure_sidecar,
    list_beats,
    process_identity,
    read_beat,
    store_now,
)
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore, open_store


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> ObjectStore:
    """A store of this test alone."""
    return open_store(f"memory://{request.node.nodeid}")


def a_beat(**changes: object) -> Beat:
    """Return a beat that differs from the usual one in some fields."""
    fields = {"process": "0a", "run_id": "Run 1", "root": "Run 1", "role": "step", "instance_id": "i", "host": "h"}
    return Beat.model_validate({**fields, "pid": 1, "seq": 1, "interval": 10.0, "ttl": 45.0, **changes})


def test_a_beat_comes_back_as_it_was_written(memory: ObjectStore) -> None:
    """Every field survives the store, among them the step key and nested progress."""
    beat = a_beat(step_key="train[2026-01]", progress={"step": 7, "metrics": {"loss": 0.5}}, state="exited")
    memory.put("live/x", beat.to_bytes())
    assert read_beat(memory, "live/x") == beat


def test_a_beat_that_is_gone_is_none(memory: ObjectStore) -> None:
    """A process that said goodbye between the listing and the read is no error."""
    assert read_beat(memory, "live/x") is None


@pytest.mark.parametrize(
    ("raw", "error"),
    [(b"{}", IntegrityError), (b"torn", IntegrityError), (b'{"schema_version": 99}', SchemaVersionError)],
)
def test_an_unreadable_beat_raises(memory: ObjectStore, raw: bytes, error: type[Exception]) -> None:
    """What is no beat, or a newer library's, is refused by name and never guessed at."""
    memory.put("live/x", raw)
    with pytest.raises(error, match="live/x"):
        read_beat(memory, "live/x")


def test_listing_tells_run_role_and_process_by_name_alone(memory: ObjectStore) -> None:
    """The bodies are not read: they are not even beats. Other objects under the prefix are left out."""
    memory.put(keys.live_key("Run/1", "step", "0a"), b"no beat")
    memory.put(keys.live_key("Run/2", "worker", "0b"), b"no beat")
    memory.put("live/stray.txt", b"")
    found = {(name.run_id, name.role, name.process) for name in list_beats(memory)}
    assert found == {("Run/1", "step", "0a"), ("Run/2", "worker", "0b")}


def test_a_listed_name_gives_its_key_and_the_time_of_the_object(memory: ObjectStore) -> None:
    """Key and last-modified are the store's own, so that ages are taken by one clock."""
    key = keys.live_key("Run/1", "step", "0a")
    memory.put(key, b"")
    assert list_beats(memory) == [LiveName("Run/1", "step", "0a", memory.head(key).last_modified)]
    assert list_beats(memory)[0].key == key


def test_the_stores_time_is_that_of_an_object_just_written(memory: ObjectStore) -> None:
    """Later probes are never earlier than a beat that was written before them."""
    memory.put("live/x", b"")
    now = store_now(memory, "Sensor A")
    assert now >= memory.head("live/x").last_modified
    assert now.tzinfo is not None
    assert now.astimezone(UTC) == memory.head("probes/%53ensor%20%41.json").last_modified


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (3, 3),
        ("text", "text"),
        (0.5, 0.5),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        ({1: (np.int8(1), [2.5])}, {"1": [1, [2.5]]}),
        (object(), "<object>"),
        (np.zeros(3), "<ndarray>"),
    ],
)
def test_progress_becomes_strict_json(value: object, plain: object) -> None:
    """Numbers of numpy become plain ones; what is no plain value is named by type, never printed."""
    assert as_plain(value) == plain
    json.dumps(as_plain(value), allow_nan=False)


def test_a_process_is_identified_by_pid_and_start_time() -> None:
    """The identity is stable for a living process, and there is none for one that has ended and been reaped."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = process_identity(child.pid)
    assert identity is not None
    assert identity == process_identity(child.pid)
    assert identity[1] > 0
    child.communicate(b"\n")
    assert process_identity(child.pid) is None


def test_a_recycled_pid_is_a_dead_process() -> None:
    """Same pid, other start time: the process that was meant has ended."""
    identity = process_identity(os.getpid())
    assert identity is not None
    assert not _processes.Watched(*identity).dead()
    assert _processes.Watched(identity[0], identity[1] - 1).dead()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_watched_process_is_dead_once_it_ended(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    """With pidfd and without it, an unreaped zombie counts as dead."""
    if not has_pidfd:
        monkeypatch.setattr(_processes, "_open_pidfd", lambda pid: None)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = process_identity(child.pid)
    assert identity is not None
    watched = _processes.Watched(*identity)
    assert (watched.fd is not None) is has_pidfd
    assert not watched.dead()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert watched.dead()
    child.communicate()


def test_a_process_name_cannot_forge_its_state(tmp_path: Path) -> None:
    """A name with spaces and parentheses does not shift the fields of /proc/PID/stat."""
    program = tmp_path / "x) T 1 (y"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "60"])
    try:
        stat = _processes.read_stat(child.pid)
        assert stat is not None
        assert stat[0] in {"S", "R", "D"}
        assert stat[1] == os.getpid()
    finally:
        child.kill()
        child.wait()


def test_the_inbox_keeps_half_a_line_and_skips_what_is_no_message() -> None:
    """Lines come in pieces; garbage is skipped; end of file is no goodbye."""
    receiver, sender = os.pipe()
    os.set_blocking(receiver, False)
    inbox = _sidecar.Inbox(receiver)
    os.write(sender, b'torn\n5\n{"progress": {"a": 1}}\n{"by')
    assert inbox.read() == [{"progress": {"a": 1}}]
    os.write(sender, b'e": true}\n')
    assert inbox.read() == [{"bye": True}]
    os.close(sender)
    assert inbox.read() == []
    assert inbox.fd is None
    os.close(receiver)


def test_a_long_message_arrives_whole_among_those_of_other_threads() -> None:
    """A configuration with a certificate is longer than a pipe takes at once: its pieces tear nothing, nor are torn."""
    receiver, sender = os.pipe()
    os.set_blocking(receiver, False)
    inbox, found, config = (
        _sidecar.Inbox(receiver),
        list[dict[str, object]](),
        {"store": {"pem": '"\\\n\u00e9' * 40_000}},
    )
    report = b'{"progress": {"a": 1}}\n'
    lines = as_lines(config)
    assert len(lines) > 50
    assert all(len(line) <= LONGEST_LINE for line in lines)
    threads = [threading.Thread(target=lambda: [os.write(sender, report) for _ in range(500)]) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: [os.write(sender, line) for line in lines]))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found += inbox.read()
    found += inbox.read()
    assert found.count({"progress": {"a": 1}}) == 1000
    assert [message for message in found if "progress" not in message] == [config]
    os.close(sender)
    os.close(receiver)


def test_pieces_of_which_some_are_missing_are_no_message() -> None:
    """What does not fit together is skipped, and the next one is read."""
    receiver, sender = os.pipe()
    os.set_blocking(receiver, False)
    inbox, lines = _sidecar.Inbox(receiver), as_lines({"store": {"pem": "x" * 10_000}})
    os.write(sender, b"".join([*lines[1:], *lines]))
    assert inbox.read() == [{"store": {"pem": "x" * 10_000}}]
    os.close(sender)
    os.close(receiver)


def test_a_store_of_one_process_has_no_sidecar(memory: ObjectStore) -> None:
    """Nobody else could see its heartbeat."""
    assert ensure_sidecar(memory, run_id="r", role="step", root="r", instance_id="i") is None


def a_sidecar(tmp_path: Path) -> Sidecar:
    """Return a sidecar on a directory, not started."""
    return Sidecar(open_store(str(tmp_path)), run_id="r", root="r", role="step", instance_id="i", interval=0.1)


def test_progress_never_raises_when_there_is_no_sidecar(tmp_path: Path) -> None:
    """Before the start and after the end, a report is dropped without a word."""
    sidecar = a_sidecar(tmp_path)
    sidecar.progress(step=1)
    sidecar.start()
    sidecar.close()
    sidecar.progress(step=2)
    assert sidecar.fenced() is None


def test_an_overlong_report_is_dropped_and_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line longer than a pipe takes at once would be torn, so it is not sent."""
    sidecar = a_sidecar(tmp_path)
    with caplog.at_level(logging.WARNING):
        sidecar.progress(text="x" * 5000)
        sidecar.progress(text="x" * 5000)
    assert len(caplog.records) == 1
    assert "was dropped" in caplog.text


def test_a_full_pipe_drops_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sidecar that does not read never blocks a training step."""
    sidecar = a_sidecar(tmp_path)
    stuck = subprocess.Popen(["/bin/sleep", "60"], stdin=subprocess.PIPE, bufsize=0)
    assert stuck.stdin is not None
    os.set_blocking(stuck.stdin.fileno(), False)
    sidecar._child = stuck
    for step in range(200):
        sidecar.progress(text="x" * 1000, step=step)
    stuck.kill()
    stuck.wait()
    stuck.stdin.close()
    assert [record.message for record in caplog.records] == [
        "Heartbeat: a progress report was dropped, since the sidecar did not take it."
    ]


def test_a_sidecar_that_cannot_be_started_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No heartbeat is no reason to fail a step."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    sidecar = a_sidecar(tmp_path)
    sidecar.start()
    sidecar.progress(step=1)
    sidecar.close()
    assert "could not be started" in caplog.text


def test_a_worker_that_is_the_process_itself_is_not_watched(tmp_path: Path) -> None:
    """With the in-process executor the run worker runs the step: it is no orphan of itself."""
    store = open_store(str(tmp_path))
    me = process_identity(os.getpid())
    assert Sidecar(store, run_id="r", root="r", role="step", instance_id="i", worker=me)._worker is None


def test_one_sidecar_per_store_run_and_role(tmp_path: Path) -> None:
    """A second call returns the first sidecar; after its close a new one is started."""
    store = open_store(str(tmp_path))
    first = ensure_sidecar(store, run_id="r", role="step", root="r", instance_id="i")
    assert first is not None
    assert ensure_sidecar(open_store(str(tmp_path)), run_id="r", role="step", root="r", instance_id="i") is first
    first.close()
    second = ensure_sidecar(store, run_id="r", role="step", root="r", instance_id="i")
    assert second is not None
    second.close()
    assert second.process != first.process


def test_threads_that_ask_at_once_share_one_sidecar(tmp_path: Path) -> None:
    """Resources and IO managers are set up side by side; the process still beats once."""
    store = open_store(str(tmp_path))
    found: list[Sidecar | None] = []
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        found.append(ensure_sidecar(store, run_id="r", role="step", root="r", instance_id="i"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert found[0] is not None
    found[0].close()


def _close_inherited(sidecar: Sidecar) -> None:
    sidecar.progress(step=99)
    sidecar.close()


def test_a_forked_child_cannot_close_the_sidecar_of_its_parent(tmp_path: Path) -> None:
    """A data loader worker that cleans up what it inherited does not silence the step."""
    sidecar = a_sidecar(tmp_path)
    sidecar.start()
    child = multiprocessing.get_context("fork").Process(target=_close_inherited, args=(sidecar,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert sidecar._child is not None
    assert sidecar._child.poll() is None
    sidecar.close()


class Closed:
    """A sidecar whose end is noted."""

    def __init__(self, registry: Registry[Closed]) -> None:
        self.registry = registry

    def close(self) -> None:
        """Leave the registry, as a sidecar does."""
        self.registry.forget(self)


def test_one_may_be_closed_by_a_thread_for_which_the_start_of_another_one_waits() -> None:
    """The garbage collector closes a dropped one in any thread: also in the one that `start` has just begun."""
    registry: Registry[Closed] = Registry()
    dropped = registry.get(("store", "run", "step"), lambda: Closed(registry))
    ended: list[bool] = []

    def started() -> Closed:
        thread = threading.Thread(target=dropped.close, daemon=True)
        thread.start()
        thread.join(10)
        ended.append(not thread.is_alive())
        return Closed(registry)

    registry.get(("store", "other run", "step"), started)
    assert ended == [True]
    assert registry.get(("store", "run", "step"), lambda: Closed(registry)) is not dropped


def test_the_sidecar_loads_nothing_heavy() -> None:
    """Its start must not wait for pydantic, Dagster or torch."""
    code = (
        "import runpy, sys; sys.path.append(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='sidecar'); "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    root = str(Path(_processes.SIDECAR).parents[2])
    command = [sys.executable, "-I", "-S", "-c", code, _processes.SIDECAR, root]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "json" in loaded
    assert not {"pydantic", "dagster", "torch", "obstore", "psutil", "blake3", "asyncio"} & set(loaded)
