"""A parent process for the tests of the sidecar, and how to wait for what it and its sidecar do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dagster_resilient.state.heartbeat import Beat, read_beat
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore

T = TypeVar("T")
RUN = "run-1"
LOG = "tasks/train/log/%-/"
FAST: dict[str, Any] = {"run_id": RUN, "root": RUN, "role": "step", "instance_id": "i", "interval": 0.1, "ttl": 1.0}

# A parent. It reads one JSON line that says how to behave, and prints one when it is ready.
PARENT = """
import ctypes, json, os, signal, subprocess, sys, threading, time
from dagster_resilient.state import heartbeat
from dagster_resilient.state.heartbeat import Sidecar
from dagster_resilient.storage.object_store import open_store

told = json.loads(sys.stdin.readline())
heartbeat._STORE_TIMEOUT = told.get("store_timeout", heartbeat._STORE_TIMEOUT)
sidecar = Sidecar(open_store(told["url"], told.get("options")), **told["sidecar"])
sidecar.start()
sidecar.progress(step=41)
sidecar.progress(step=42)
children = []
if told.get("watch"):
    sidecar.watch(told["watch"], 3, task="train")
if told.get("ignore_term"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if told.get("spawn_on_term"):
    signal.signal(signal.SIGTERM, lambda *_: print(subprocess.Popen(["/bin/sleep", "300"]).pid, flush=True))
if told.get("close_on_term"):

    def leave(*_):
        sidecar.close()
        sys.stdin.readline()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
if told.get("children"):
    # A child in a session of its own, which ignores SIGTERM, and a grandchild.
    code = (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "p = subprocess.Popen(['/bin/sleep', '300']); print(p.pid, flush=True); p.wait()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    children = [child.pid, int(child.stdout.readline())]
if told.get("fork_a_holder"):
    pid = os.fork()  # holds the pipe to the sidecar open, as a forked loader worker does
    if pid == 0:
        time.sleep(300)
        os._exit(0)
    children = [pid]
if told.get("hold_gil"):
    # A handler of Python's runs only between two of its instructions: never again, below.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

    def tick():
        while True:
            os.write(1, b"tick\\n")  # whole: no half of it stands before another line
            time.sleep(0.01)

    threading.Thread(target=tick, daemon=True).start()
print(json.dumps({"key": sidecar.key, "sidecar": sidecar._child.pid, "children": children}), flush=True)
if told.get("hold_gil"):
    sum(range(10**15))  # one instruction, which takes days
if told.get("expect"):
    sidecar.expect("train", told["expect"])
    sidecar.progress(task="train")
if told.get("hang_for"):
    ctypes.PyDLL(None).sleep(told["hang_for"])  # in C, and without letting go of the GIL
    sidecar.progress(task="train", step=43)
    sidecar.relax("train")
if told.get("deadlock"):
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # never returns, is interrupted by no signal, and holds the GIL
while sidecar.fenced() is None or not told.get("stop_when_fenced"):
    time.sleep(0.01)
sidecar.close()
print(sidecar.fenced(), flush=True)
"""


@dataclass
class Parent:
    """A started parent and what it told of itself."""

    process: subprocess.Popen[str]
    key: str
    sidecar: int
    children: list[int]

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid


def eventually(look: Callable[[], T], seconds: float = 30.0) -> T:
    """Return the first true answer; fail where none comes in time."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.02)
    return found


def runs(pid: int) -> bool:
    """Whether a process lives; a zombie that nobody reaps does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False


def beat_of(store: ObjectStore, key: str) -> Beat:
    """Wait for the heartbeat."""
    return eventually(lambda: read_beat(store, key))


def beat_after(store: ObjectStore, key: str, seq: int) -> Beat:
    """Wait for a beat with a higher number."""
    return eventually(lambda: beat if (beat := read_beat(store, key)) is not None and beat.seq > seq else None)


def append(store: ObjectStore, n: int, generation: int) -> None:
    """Write an entry of the log of a task, as far as the sidecar reads it."""
    store.create(f"{LOG}{n:010d}.json", json.dumps({"n": n, "generation": generation}).encode())


def fence(store: ObjectStore, run_id: str = RUN) -> None:
    """Fence a run."""
    store.create(keys.fence_key(run_id), b'{"reason": "declared lost"}')


def start(
    stack: contextlib.ExitStack,
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    sidecar: Mapping[str, Any] | None = None,
    **told: Any,
) -> Parent:
    """Start a parent. What is left of it and its children is killed when the stack closes."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    assert process.stdin is not None
    assert process.stdout is not None
    config = {"url": url, "options": options, "sidecar": {**FAST, **(sidecar or {})}, **told}
    process.stdin.write(json.dumps(config) + "\n")
    process.stdin.flush()
    lines = iter(process.stdout.readline, "")
    parent = Parent(process, **json.loads(next(line for line in lines if line != "tick\n")))
    for pid in parent.children:
        stack.callback(_kill, pid)
    return parent


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
