"""kill -9 while a value is written: the last committed version loads and verifies, and nothing in part is visible."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from dagster_resilient.state.fences import claim_attempt
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.manifest import get_object, read_manifest, write_manifest, write_objects
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.testing import Fault, FaultStore

Place = tuple[str, dict[str, Any]]

SOAK = os.environ.get("RESILIENT_SOAK") == "1"
SIZES = {"part-0": 300_000, "part-1": 7, "part-2": 150_000}


def content(version: int, role: str) -> bytes:
    """What an object of a version consists of: its version and role can be read from it, and no byte is free."""
    head = f"{version:08d} {role} ".encode()
    noise = hashlib.shake_128(head).digest(SIZES[role])
    return head + noise


def open_task(store: ObjectStore, run_id: str) -> DurableTask:
    """A try of one run, without a host."""
    claim = claim_attempt(ObjectRecords(store), root="root", run_id=run_id, series="root")
    owner = this_process(claim, heartbeat=None, interval=10.0, ttl=45.0)
    return DurableTask(store, ("value",), None, claim, owner, now=lambda: datetime.now(UTC))


def committed(store: ObjectStore) -> int:
    """Load the committed value, check every byte, and return its version; 0 where there is none."""
    task = DurableTask(store, ("value",), None, claim=None, owner=None, now=lambda: datetime.now(UTC))  # type: ignore[arg-type]
    head = task.head()
    if head is None or head.value is None:
        return 0
    manifest = read_manifest(store, head.value.manifest)
    version = manifest.meta["version"]
    assert {role: get_object(store, part) for role, part in manifest.objects.items()} == {
        role: content(version, role) for role in SIZES
    }
    assert isinstance(version, int)
    return version


def write_version(task: DurableTask, version: int) -> None:
    """Write the objects and the manifest of a version, then commit it."""
    parts = {role: [content(version, role)] for role in SIZES}
    prefix = task.data_prefix()
    manifest = write_objects(task.store, prefix, "test/1", parts, {"version": version})
    # Both ways by turns: the manifest in the entry, or an object of its own that the entry names.
    named = manifest if version % 2 else write_manifest(task.store, prefix, manifest)
    task.commit_value(named, prefix)


def write_versions(place: Place, run_id: str) -> None:
    """Say which version is committed, then write one after the other for ever, and say so as each is committed."""
    store = open_store(*place)
    version = committed(store)
    task = open_task(store, run_id)
    print(version, flush=True)
    while True:
        version += 1
        write_version(task, version)
        print(version, flush=True)


def check(store: ObjectStore, acknowledged: int) -> int:
    """Check all that a reader can see; return the committed version.

    It is the acknowledged one, or the one after it, whose acknowledgement was killed. Objects that no manifest names
    may have been left, but whole.
    """
    version = committed(store)
    assert version in {acknowledged, acknowledged + 1}
    for info in store.list("tasks/"):
        role = info.key.rsplit("/", 1)[1]
        if role in SIZES:
            body = store.get(info.key)
            assert body == content(int(body[:8]), role), f"{info.key} is visible in part"
        else:
            assert json.loads(store.get(info.key))["schema_version"] == 1, f"{info.key} is visible in part"
    return version


def killed_writer(place: Place, run_id: str, seconds: float) -> int:
    """Start a writer, kill it after it has been writing for so long, and return the last version it acknowledged.

    That is at least the version that it found: a request of the writer before it may have been applied after its death.
    """
    code = "import json, sys; from test_write_kill import write_versions; p = json.load(sys.stdin)\nwrite_versions(*p)"
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}  # noqa: PTH120
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    guard = threading.Timer(60.0, process.kill)
    guard.start()
    try:
        process.stdin.write(json.dumps([place, run_id]))
        process.stdin.close()
        found = int(process.stdout.readline())
        time.sleep(seconds)  # the point at which it is killed is what this test varies
    finally:
        process.kill()
        guard.cancel()
    lines = process.stdout.read().splitlines()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return int(lines[-1]) if lines else found


@pytest.mark.slow
@pytest.mark.timeout(3600 if SOAK else 300)
def test_a_writer_killed_at_random_points(shared_place: Place) -> None:
    """Real processes, real SIGKILL, again and again on one store: no acknowledged version is ever lost."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    store = open_store(*shared_place)
    version = 0
    full = 500 if shared_place[0].startswith("file:") or "://" not in shared_place[0] else 100
    for kill in range(full if SOAK else 6):
        acknowledged = killed_writer(shared_place, f"run-{kill}", chance.uniform(0.0, 0.25))
        assert acknowledged >= version
        version = check(store, acknowledged)
    assert version > 0


def in_child(work: Callable[[], None]) -> bool:
    """Run work in a forked child; return whether it was killed. Any other end is a failure of the test."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the writer failed by itself; see its output"
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["die_before", "die_after"])
def test_a_writer_killed_at_every_operation(local_url: str, kind: Any) -> None:
    """The same at each single operation on the store, before and after it: the successor goes on from there."""
    store = open_store(local_url)
    version, number, killed = 0, 0, True
    while killed:

        def work(number: int = number, version: int = version) -> None:
            write_version(open_task(FaultStore(store, {number: Fault(kind)}), f"run-{number}"), version + 1)

        killed = in_child(work)
        version = check(store, version)
        number += 1
    assert number > 8
    assert version > 0


SYSTEM_CALLS = ("write", "fsync", "link", "replace", "unlink", "mkdir", "open")


def die_at(number: int, applied: bool) -> None:
    """Arrange that this process is killed at a system call of the local store, counted from now."""
    calls = [0]

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number and not applied:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **kwargs)
            finally:
                if calls[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        return run

    for name in SYSTEM_CALLS:
        setattr(os, name, wrap(getattr(os, name)))


@pytest.mark.slow
@pytest.mark.parametrize("applied", [False, True])
def test_a_writer_killed_at_every_system_call(local_url: str, applied: bool) -> None:
    """The same inside the local store: between the temporary file, its sync, its name, and the sync of the folder."""
    store = open_store(local_url)
    version, number, killed = 0, 1, True
    while killed:

        def work(number: int = number, version: int = version) -> None:
            task = open_task(store, f"run-{number}")
            die_at(number, applied)
            write_version(task, version + 1)

        killed = in_child(work)
        version = check(store, version)
        number += 1
    assert number > 20
    assert version > 0
