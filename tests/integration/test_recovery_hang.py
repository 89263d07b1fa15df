"""A run that hangs is closed for it and re-executed: single ticks over marks, and real processes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from test_recovery_tick import FAILURE, QUEUE, STARTED, World
from test_reexecution import Deployment

from dagster_resilient import dagster_compat as compat
from dagster_resilient.state.beats import list_beats
from dagster_resilient.state.fences import read_fence
from dagster_resilient.state.hangs import Hang, list_hangs
from dagster_resilient.state.records import Verdict
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import open_store

STEP = "0a"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A fresh instance and store."""
    with dg.instance_for_test(overrides=QUEUE) as instance:
        yield World(instance, str(tmp_path / "store"))


@pytest.fixture
def at(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], str]:
    """Return a function that ticks so many seconds from now by the store's clock, with all heartbeats fresh."""
    begun = datetime.now(UTC)

    def tick(seconds: float) -> str:
        now = begun + timedelta(seconds=seconds)
        fresh = [beat._replace(last_modified=now) for beat in list_beats(world.store)]
        monkeypatch.setattr("dagster_resilient.tick.store_now", lambda *_: now)
        monkeypatch.setattr("dagster_resilient.tick.list_beats", lambda _: fresh)
        return world.tick()

    return tick


def mark(world: World, run_id: str, *, beats: bool = True) -> str:
    """Mark a step of a run as hung; return the key. Its worker beats in any case."""
    progress = {"task": "base", "step": 730}
    hang = Hang(task="base", seconds=1800.0, limit=1800.0, progress=progress, host="h", pid=7)
    world.store.put(keys.live_key(run_id, "worker", "0b"), b"{}")
    if beats:
        world.store.put(keys.live_key(run_id, "step", STEP), b"{}")
    key = keys.hung_key(run_id, "step", STEP)
    world.store.put(key, hang.to_bytes())
    return key


def test_a_mark_must_have_stood_for_two_intervals(world: World, at: Callable[[float], str]) -> None:
    """One that is deleted in time, since a store that was away is back, convicts nobody."""
    run = world.a_run(STARTED)
    key = mark(world, run.run_id)
    for seconds in (0, 1, 1.9):
        assert at(seconds) == "Nothing to recover."
    world.store.delete([key])
    for seconds in (3, 10):
        assert at(seconds) == "Nothing to recover."


def test_a_hung_run_is_fenced_closed_and_re_executed(world: World, at: Callable[[float], str]) -> None:
    """With what hung, for how long, and after which step, in the words of fence, run and verdict."""
    run = world.a_run(STARTED)
    mark(world, run.run_id)
    at(0)
    words = at(3)
    assert "1 hung runs closed" in words
    assert world.instance.get_run_by_id(run.run_id).status is FAILURE
    fence = read_fence(world.records, run.run_id)
    assert fence is not None
    assert fence.failure_class == "hung"
    assert "Hung: its step base made no progress for 1,80" in fence.reason
    assert "s (limit 1,800 s), after step 730" in fence.reason
    for seconds in (13, 23):
        assert "closed" not in at(seconds)
    (child,) = world.children(run)
    verdict = world.verdict(run)
    assert verdict is not None
    assert (verdict.failure_class, verdict.attempt) == ("hung", 1)
    assert "made no progress" in verdict.reason
    assert child.tags["resilient/reason"].startswith("hung: attempt 1 of 3")


def test_a_look_that_was_not_there_before_convicts_nobody(world: World, at: Callable[[float], str]) -> None:
    """An old mark may be about to be deleted where the store has just come back: our own watch must be as long."""
    mark(world, world.a_run(STARTED).run_id)
    assert at(1000) == "Nothing to recover."
    assert at(1002) == "Nothing to recover."
    assert "1 hung" in at(1003)


def test_marks_of_runs_that_are_not_ours_or_have_ended_mean_nothing(world: World, at: Callable[[float], str]) -> None:
    """Of another instance, of a job without our executor, and of a run that has ended."""
    ended = world.a_run(dg.DagsterRunStatus.SUCCESS)
    foreign = world.a_run(STARTED, job="foreign", tags={})
    for run_id in ("elsewhere", ended.run_id, foreign.run_id):
        mark(world, run_id)
    for seconds in (0, 3, 6):
        assert at(seconds) == "Nothing to recover."
    assert world.instance.get_run_by_id(foreign.run_id).status is STARTED
    assert read_fence(world.records, "elsewhere") is None


def test_a_mark_without_its_process_means_nothing(world: World, at: Callable[[float], str]) -> None:
    """The step that hung has died, and was tried again in the same run: the mark that it left is of the past."""
    run = world.a_run(STARTED)
    mark(world, run.run_id, beats=False)
    for seconds in (0, 3, 6):
        assert at(seconds) == "Nothing to recover."
    assert world.instance.get_run_by_id(run.run_id).status is STARTED


LOCATION = """
import ctypes, os
import dagster as dg
from dagster_resilient import (
    EverySteps, RecoveryPolicy, ResilientIOManager, ResilientResource, build_recovery_sensor, resilient_executor,
)

HERE = os.path.dirname(os.path.abspath(__file__))

@dg.asset
def trained(context, resilient: ResilientResource) -> list:
    with resilient.task(context).training(save=EverySteps(1), hung_after=2) as session:
        for step in session.steps(6):
            with open(os.path.join(HERE, f"journal-{context.run.run_id}"), "a") as file:
                file.write(f"{os.getpid()} {step}\\n")
            if step == 3 and context.run.parent_run_id is None:
                libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
                libc.pthread_mutex_lock(mutex)
                libc.pthread_mutex_lock(mutex)  # in C code, with the GIL held, for ever
            session.user.setdefault("seen", []).append(step)
    return session.user["seen"]

own = ResilientResource(url=os.path.join(HERE, "store"), heartbeat_seconds=1, ttl_seconds=10)
defs = dg.Definitions(
    assets=[trained], executor=resilient_executor, jobs=[dg.define_asset_job("everything")],
    sensors=[build_recovery_sensor(RecoveryPolicy(first_wait=0.0), minimum_interval_seconds=1)],
    resources={"resilient": own, "io_manager": ResilientIOManager(resilient=own)},
)
"""


def _journal(place: Deployment, run_id: str) -> list[tuple[int, int]]:
    """Process and step of each step that a run began."""
    lines = (place.folder / f"journal-{run_id}").read_text().splitlines()
    return [(int(pid), int(step)) for pid, step in (line.split() for line in lines)]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """A daemon with the recovery sensor, as a real process."""
    place = Deployment(tmp_path)
    (tmp_path / "pipeline.py").write_text(LOCATION)
    command = [sys.executable, "-m", "dagster._daemon", "run", "-f", str(tmp_path / "pipeline.py")]
    with (tmp_path / "daemon.log").open("w") as log:
        daemon = subprocess.Popen(command, env=place.env, cwd=tmp_path, stdout=log, stderr=log)
        try:
            yield place
        finally:
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            place.instance.dispose()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_that_hangs_in_c_code_is_ended_and_goes_on_from_its_checkpoint(deployment: Deployment) -> None:
    """It beats for ever and obeys no SIGTERM. Its run fails with the reason; its successor redoes only that step."""
    command = deployment.dagster("job", "launch", "-j", "everything")
    done = subprocess.run(
        command, env=deployment.env, cwd=deployment.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    hung = deployment.ended(deployment.instance.get_runs(limit=1)[0].run_id)
    assert hung.status is FAILURE
    message = next(
        e.message for e in compat.failed_step_errors(deployment.instance, hung.run_id) if "Hung" in e.message
    )
    assert "trained made no progress for" in message
    assert "(limit 2 s), after step 3" in message
    (child,) = deployment.wait(
        lambda: [run for run in deployment.instance.get_runs() if run.parent_run_id == hung.run_id]
    )
    assert deployment.ended(child.run_id).status is dg.DagsterRunStatus.SUCCESS
    assert [step for _, step in _journal(deployment, hung.run_id)] == [0, 1, 2, 3]
    assert [step for _, step in _journal(deployment, child.run_id)] == [3, 4, 5]
    pid = _journal(deployment, hung.run_id)[0][0]
    deployment.wait(lambda: not os.path.exists(f"/proc/{pid}"))  # noqa: PTH110 - asked until it is so
    store = open_store(str(deployment.folder / "store"))
    (launched,) = [info.key for info in store.list("decisions/")]
    verdict = ObjectRecords(store).get(launched, Verdict)
    assert verdict is not None
    assert verdict.failure_class == "hung"
    deployment.wait(lambda: not list_hangs(store))
    assert deployment.instance.get_run_by_id(hung.run_id).status is FAILURE
