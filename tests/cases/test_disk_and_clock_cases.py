"""The cases of ``shared/cases/object-store.md`` on disks and clocks: G11 to G14."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

import dagster_resilient
from dagster_resilient import Task, open_task
from dagster_resilient.errors import TaskHeldError
from dagster_resilient.state.beats import list_beats, store_now
from dagster_resilient.storage.object_store import ObjectStore, open_store

T = TypeVar("T")
Place = tuple[str, dict[str, Any]]
Saved = Callable[[ObjectStore, str], list[int]]


# ---- G11, G12, G13: directories


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, Path]]:
    """What is synced, linked and renamed, in order: the verb, the file or source, the target."""
    calls: list[tuple[str, Path, Path]] = []
    fsync = os.fsync

    def noted_fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        calls.append(("sync", path, path))
        fsync(handle)

    def noted(verb: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(source: Any, target: Any, **kwargs: Any) -> None:
            calls.append((verb, Path(source), Path(target)))
            call(source, target, **kwargs)

        return run

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted("publish", os.link))
    monkeypatch.setattr(os, "replace", noted("publish", os.replace))
    monkeypatch.setattr(os, "rename", noted("publish", os.rename))
    return calls


@pytest.fixture
def _umask_022() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask_022")
def test_g11_temporary_files_lie_beside_their_targets(
    tmp_path: Path, local_url: str, monkeypatch: pytest.MonkeyPatch, published: list[tuple[str, Path, Path]]
) -> None:
    """G11: nothing is made in TMPDIR, so that no rename crosses file systems; files have the mode of the umask."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr("tempfile.tempdir", None)
    open_task(local_url, "a").save({"n": 1})
    moves = [(source.parent, target.parent) for verb, source, target in published if verb == "publish"]
    assert len(moves) > 2
    assert all(source == target for source, target in moves)
    assert list(elsewhere.iterdir()) == []
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and "live" not in path.parts]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}


def test_g12_everything_is_synced_before_it_is_named(
    tmp_path: Path, local_url: str, published: list[tuple[str, Path, Path]]
) -> None:
    """G12: each file before it gets its name, and its folder after. The entry that commits them all comes last."""
    task = open_task(local_url, "a")
    published.clear()
    task.save({"n": 1})
    publishes = [n for n, (verb, _, _) in enumerate(published) if verb == "publish"]
    for n in publishes:
        _, source, target = published[n]
        assert published[n - 1] == ("sync", source, source)
        assert published[n + 1] == ("sync", target.parent, target.parent)
    last = published[publishes[-1]][2].relative_to(tmp_path / "store")
    assert last.as_posix() == "tasks/a/log/%-/0000000001.json"


FULL = """
import errno, os
from pathlib import Path
from dagster_resilient import EverySteps, open_task
from dagster_resilient.testing import FakeClock
root, clock = Path(given), FakeClock()
task = open_task(given, "value")
task.save(b"previous")
filler = root / "filler"
with open_task(given, "train").training(save=EverySteps(1), clock=clock) as session:
    for step in session.steps(4):
        if step == 1:
            filler.write_bytes(bytes(5_000_000))
            session.user["large"] = os.urandom(5_000_000).hex()[:5_000_000]
            try:
                task.save(os.urandom(5_000_000))
            except OSError as error:
                print(error.__cause__.errno == errno.ENOSPC, error)
            print(task.load("value"))
        if step == 3:
            head = open_task(given, "x").attempt.durable(("train",), None).head()
            print([checkpoint.step for checkpoint in head.checkpoints])
            print([path.name for path in root.rglob("part#*")])
            filler.unlink()
            clock.sleep(60.0)
            del session.user["large"]
task.save(b"next")
print(task.load("value"), open_task(given, "train").durable(None).head().checkpoints[-1].step)
"""


def in_small_tmpfs(folder: Path) -> list[str]:
    """A command that runs Python where a folder is a disk of 8 MB; the disk goes with the process."""
    unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    mount = 'mount -t tmpfs -o size=8m tmpfs "$1" && shift && exec "$@"'
    return [*unshare, "sh", "-c", mount, "sh", str(folder), sys.executable, "-c"]


def test_g13_a_full_disk(tmp_path: Path) -> None:
    """G13: the error names target and cause, what was saved loads, nothing stays of the half, and then all goes on."""
    if shutil.which("unshare") is None or subprocess.run([*in_small_tmpfs(tmp_path), ""], check=False).returncode:
        pytest.skip("no right to mount a small disk")
    code = f"given = {str(tmp_path)!r}\n{FULL}"
    done = subprocess.run([*in_small_tmpfs(tmp_path), code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    refused, previous, kept, parts, after = done.stdout.splitlines()
    assert refused.startswith(f"True Could not write file://{tmp_path}/tasks/value/data/")
    assert "No space left on device" in refused
    assert (previous, kept, parts, after) == ("b'previous'", "[1]", "[]", "b'next' 4")
    assert "No space left on device" in done.stderr  # the training's own warning


# ---- G14: clocks

OFF = """
import datetime, json, sys, time
hours, url, options = json.load(sys.stdin)
real = time.time
time.time = lambda: real() + 3600 * hours
class Off(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = Off
from dagster_resilient.state import owner
owner.boot_id = lambda: "another machine"  # so that its heartbeat alone tells whether it lives
from dagster_resilient import EverySteps, open_task
task = open_task(url, "train", storage_options=options, heartbeat_seconds=0.2, ttl_seconds=1.0)
with task.training(save=EverySteps(1)) as session:
    for step in session.steps(9):
        if step == 3:
            print("ready", flush=True)
            time.sleep(60)
"""


@contextlib.contextmanager
def trainer_whose_clock_is_off(hours: int, place: Place) -> Iterator[subprocess.Popen[str]]:
    """A process that has saved three steps, holds the lease, and beats."""
    with subprocess.Popen(
        [sys.executable, "-c", OFF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([hours, *place]))
            process.stdin.close()
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def by_the_deadline(look: Callable[[], T | None]) -> T:
    """What a look returns, as soon as there is something."""
    deadline = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def resumed_from(task: Task) -> int | None:
    """The step from which a training resumes; None while another process holds the task."""
    try:
        with task.training() as session:
            return session.resumed_from
    except TaskHeldError:
        return None


@pytest.mark.parametrize(
    ("shared_place", "hours"),
    [("local", 1), pytest.param("s3", -1, marks=pytest.mark.s3)],
    indirect=["shared_place"],
)
def test_g14_a_process_whose_clock_is_an_hour_off(shared_place: Place, hours: int, saved: Saved) -> None:
    """G14: its steps are found, its beats have the store's time, and its lease holds as long as it lives, no longer."""
    store = open_store(*shared_place)
    with trainer_whose_clock_is_off(hours, shared_place) as process:
        assert saved(store, "train") == [1, 2, 3]
        (beat,) = by_the_deadline(lambda: list_beats(store))
        assert abs(store_now(store, "test") - beat.last_modified) < timedelta(minutes=30)
        task = open_task(store, "train", heartbeat_seconds=0.2, ttl_seconds=1.0)
        assert resumed_from(task) is None
        process.kill()
        process.wait()
        assert by_the_deadline(lambda: resumed_from(task)) == 3


WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


@pytest.mark.parametrize("layer", ["state", "checkpoint", "recovery", "task.py", "values.py"])
def test_g14_no_decision_asks_the_wall_clock(layer: str) -> None:
    """G14: these layers know the clock of the store, and how long something takes."""
    home = Path(dagster_resilient.__file__).parent / layer
    files = [home] if home.is_file() else sorted(home.rglob("*.py"))
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    assert calls
    assert [name for name in (ast.unparse(call.func) for call in calls) if name in WALL_CLOCKS] == []
