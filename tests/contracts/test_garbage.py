"""Garbage collection and retirement on memory, a directory and a real S3 server."""

from __future__ import annotations

import os
import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from durable import make_task, with_dead_owner

from dagster_resilient import collect_garbage, retire_task
from dagster_resilient.errors import ConfigurationError, FencedError, TaskHeldError, ValueNotFoundError
from dagster_resilient.state.beats import store_now
from dagster_resilient.state.fences import claim_attempt, read_fence
from dagster_resilient.state.garbage import Collector, GarbageReport
from dagster_resilient.state.retire import retire
from dagster_resilient.state.store import ObjectRecords, open_state
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import write_manifest, write_objects
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.testing import Fault, FaultStore
from dagster_resilient.values import load_value, store_value

LATER = timedelta(days=2)


def collect(store: ObjectStore, *, dry_run: bool = False, later: timedelta = LATER) -> GarbageReport:
    """Collect as if so much time had passed."""
    return Collector(store, dry_run=dry_run, now=lambda: clock(store) + later).run()


def clock(store: ObjectStore) -> datetime:
    """The store's time, without leaving the object that was asked."""
    time = store_now(store, "test")
    store.delete(["probes/test.json"])
    return time


def a_try(store: ObjectStore, run: str | None = None, root: str | None = None) -> DurableTask:
    """A try that has claimed its number, as every process does."""
    run = run or uuid.uuid4().hex
    claim = claim_attempt(ObjectRecords(store), root=root or run, run_id=run, series=root or run)
    return make_task(store, root=claim.root, run=run, attempt=claim.attempt)


def save(task: DurableTask, step: int, keep: int = 1) -> None:
    """Commit a checkpoint with objects, and forget to delete the ones that drop out."""
    prefix = task.data_prefix()
    manifest = write_manifest(task.store, prefix, write_objects(task.store, prefix, "t/1", {"w": [b"x" * step]}, {}))
    task.commit_checkpoint(step, manifest, keep)


def everything(store: ObjectStore) -> set[str]:
    """All keys but the probes that ask for the time."""
    return {info.key for info in store.list("") if not info.key.startswith("probes/")}


def names(report: GarbageReport) -> list[str]:
    """Kinds of what went."""
    return sorted(one.kind for one in report.garbage)


def test_a_replaced_value_goes_and_the_current_one_stays(shared_store: ObjectStore) -> None:
    """After its grace; the value loads as before. The run of the old one is fenced, so that it cannot come back."""
    store = shared_store
    old = a_try(store)
    store_value(old, "old")
    new = a_try(store)
    store_value(new, "new")
    assert collect(store, later=timedelta(hours=1)).garbage == []
    report = collect(store)
    assert names(report) == ["write"]
    assert report.size > 0
    assert report.objects == 1
    assert load_value(store, ("a",), None) == "new"
    assert read_fence(old.records, old.claim.run_id) is not None
    with pytest.raises(FencedError):
        store_value(old, "older")
    assert load_value(store, ("a",), None) == "new"


def test_a_dry_run_changes_nothing(shared_store: ObjectStore) -> None:
    """It tells the same as the real run, and leaves every object, fence and log as it is."""
    store = shared_store
    store_value(a_try(store), "old")
    store_value(a_try(store), "new")
    before = everything(store)
    told = collect(store, dry_run=True)
    assert everything(store) == before
    done = collect(store)
    assert [one.name for one in told.garbage] == [one.name for one in done.garbage]
    assert told.dry_run
    assert not done.dry_run
    assert collect(store).garbage == []


def test_writes_of_killed_tries_go(shared_store: ObjectStore) -> None:
    """Objects that were written and never committed, once a newer try has committed."""
    store = shared_store
    killed = a_try(store, "r1", "r1")
    killed.acquire()
    write_objects(store, killed.data_prefix(), "t/1", {"part": [b"never committed"]}, {})
    taker = a_try(store, "r2", "r1")
    taker.acquire()
    save(taker, 1)
    save(taker, 2)
    report = collect(store)
    # The taker's first checkpoint is of the head's generation: its own run must be fenced or superseded first.
    assert sorted(one.why for one in report.garbage) == ["its run is fenced", "superseded by a newer try"]
    assert len(taker.checkpoints) == 1


def test_a_running_try_is_left_alone(shared_store: ObjectStore) -> None:
    """A run with a heartbeat is not fenced, and what it wrote stays, however long it takes to commit."""
    store = shared_store
    task = a_try(store)
    prefix = task.data_prefix()
    manifest = write_objects(store, prefix, "t/1", {"part": [b"long computed"]}, {})
    store_value(a_try(store), "somebody else's")
    collector = Collector(store, dry_run=False, now=lambda: clock(store) + LATER)
    assert collector._beating == set()
    collector._beating = {task.claim.run_id}  # a beat that is as young as the time that we pretend
    report = collector.run()
    assert report.garbage == []
    assert report.kept["writer may live"] == 1
    task.commit_value(manifest, prefix)
    assert read_fence(task.records, task.claim.run_id) is None


def test_what_was_replaced_lately_may_still_be_read(shared_store: ObjectStore) -> None:
    """A reader that found the value before it was replaced gets an hour."""
    store = shared_store
    store_value(a_try(store), "old")
    store_value(a_try(store), "new")
    collector = Collector(store, dry_run=False, now=lambda: clock(store) + timedelta(minutes=59))
    collector._grace = timedelta(0)
    report = collector.run()
    assert report.garbage == []
    assert report.kept["in use"] == 2


def test_nothing_is_judged_where_a_manifest_cannot_be_read(store: ObjectStore) -> None:
    """What it would have named is not known."""
    task = a_try(store)
    task.acquire()
    save(task, 1)
    save(task, 2, keep=1)
    named = task.checkpoints[0].manifest
    body = store.get(named.key)
    store.put(named.key, body[:-1])
    before = everything(store)
    report = collect(store)
    assert report.garbage == []
    assert report.kept["unreadable manifest"] == 2
    assert everything(store) == before


def test_only_names_of_ours_are_touched(store: ObjectStore) -> None:
    """Foreign objects beside our data, other folders, logs, fences, tries: all stay."""
    store_value(a_try(store), "value")
    foreign = ["tasks/a/data/%-/notes/readme.txt", "tasks/a/data/loose", "tasks/a/other/x/y", "elsewhere/data/x", "x"]
    for key in foreign:
        store.put(key, b"mine")
    before = everything(store)
    assert collect(store).garbage == []
    assert everything(store) == before


def test_a_store_without_heartbeats_keeps_what_only_silence_would_prove() -> None:
    """Where no run could beat, silence says nothing: only what the log proves goes."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store_value(a_try(store), "old")
    store_value(a_try(store), "new")
    assert collect(store).garbage == []
    tries = [a_try(store, root="r") for _ in range(2)]
    for one in tries:
        store_value(one, "again")
    assert [one.why for one in collect(store).garbage] == ["superseded by a newer try"]


def test_old_heartbeats_and_probes_go(store: ObjectStore) -> None:
    """Those of processes that could not say goodbye."""
    store.put(keys.live_key("run", "step", "ab"), b"{}")
    store.put(keys.hung_key("run", "step", "ab"), b"{}")
    store.put("probes/sensor-x.json", b"{}")
    store.put("probes/create-if-absent", b"kept")
    report = collect(store)
    assert names(report)[:3] == ["heartbeat", "heartbeat", "probe"]
    assert everything(store) == set()
    assert [info.key for info in store.list("probes/")] == ["probes/create-if-absent"]


def test_a_short_grace_is_refused() -> None:
    """A minute would hit readers and writers that are merely slow."""
    with pytest.raises(ConfigurationError, match="too short"):
        collect_garbage("memory://short", grace=timedelta(minutes=1))


# ---- retirement


def test_a_retired_task_holds_nothing_and_its_numbers_go_on(shared_store: ObjectStore) -> None:
    """Its value is not found, its data is garbage, its log has a tombstone; a new value begins a new life."""
    store = shared_store
    store_value(a_try(store), "old")
    assert retire_task(store, "a")
    with pytest.raises(ValueNotFoundError, match="a is not materialized"):
        load_value(store, ("a",), None)
    assert names(collect(store)) == ["write"]
    store_value(a_try(store), "new")
    assert load_value(store, ("a",), None) == "new"
    head = a_try(store).head()
    assert head is not None
    assert head.n > 2
    assert head.generation == 1


def test_a_training_is_refused_behind_a_tombstone(store: ObjectStore) -> None:
    """Its next checkpoint would be of a life that was given up."""
    task = a_try(store)
    task.acquire()
    save(task, 1)
    retire(task.records, ("a",), None, by="test", force=True)
    with pytest.raises(FencedError):
        save(task, 2)


def test_a_held_task_is_not_retired_by_mistake(store: ObjectStore) -> None:
    """Not while its owner may live; at once where it is known to be dead."""
    task = a_try(store)
    task.acquire()
    with pytest.raises(TaskHeldError, match=f"held by run {task.claim.run_id}"):
        retire_task(store, ["a"])
    dead = with_dead_owner(a_try(store, root=task.claim.root))
    dead.acquire()
    assert retire_task(store, ["a"])
    assert retire_task(store, ["a"])


def test_a_task_that_never_was_is_not_retired(store: ObjectStore) -> None:
    """No tombstone is written for it."""
    assert not retire_task(store, "never", "2026-01-01")
    assert everything(store) == set()


def test_writes_of_another_state_are_not_judged(local_url: str, sqlite_url: str) -> None:
    """Numbers of tries begin again in a database: by those of the old log, current values would seem superseded."""
    store = open_store(local_url)
    for number in range(3):
        store_value(a_try(store, root="r"), f"old {number}")
    records = open_state(sqlite_url, store)
    assert records is not None
    claim = claim_attempt(records, root="r", run_id="new", series="r")
    store_value(make_task(store, root="r", run="new", attempt=claim.attempt, records=records), "new")
    report = collect(store)
    assert report.kept["other state"] == 1
    assert load_value(store, ("a",), None) == "old 2"
    Collector(store, records, dry_run=False, now=lambda: clock(store) + LATER).run()
    assert load_value(store, ("a",), None, records=records) == "new"
    assert load_value(store, ("a",), None) == "old 2"


def test_a_damaged_log_keeps_its_own_data_alone(shared_store: ObjectStore) -> None:
    """The others are collected, and the report says how much was not judged."""
    store = shared_store
    for asset in ("a", "b"):
        for number in range(2):
            task = a_try(store)
            store_value(DurableTask(store, (asset,), None, task.claim, task.owner, now=task.now), number)
    entry = max(info.key for info in store.list("tasks/a/log/"))
    store.put(entry, store.get(entry)[:-2])
    report = collect(store)
    assert [one.name.split("/")[1] for one in report.garbage] == ["b"]
    assert report.kept["unreadable log"] == 2


def test_a_full_store_is_collected_all_the_same(local_url: str) -> None:
    """The time cannot be asked where nothing can be written: the newest object tells one that is not later."""
    store = open_store(local_url)
    for number in range(2):
        store_value(a_try(store, root="r"), number)
    full = FaultStore(store, lambda _, operation: Fault("no_space") if operation.verb == "put" else None)
    for path in Path(local_url.removeprefix("file://")).rglob("*"):
        if path.is_file():
            os.utime(path, (0, 0))
    store.put("newest", b"")
    assert Collector(full, dry_run=False).run().objects == 1


@pytest.mark.parametrize("wrong", [{"grace": 3600}, {"dry_run": "false"}, {"dry_run": None}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """A text that means no must not delete, and a number has no unit."""
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        collect_garbage("memory://wrong", **wrong)
