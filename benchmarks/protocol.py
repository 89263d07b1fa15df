"""What the protocol costs: requests of each step, the first heartbeat, and the commit of one partition."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import obstore
import torch

from benchmarks.local import Stateful, opened, sync
from benchmarks.remote import Place
from benchmarks.rounds import OURS, Contender, Recorder, Row, compare
from dagster_resilient import EverySteps, Task, open_store, open_task
from dagster_resilient.state.heartbeat import Sidecar
from dagster_resilient.storage.manifest import put_object
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.testing import FaultStore

REQUESTS, BEAT, PARTITION = "requests", "first heartbeat", "one partition of a loop"
VERBS = ("list", "get", "put", "create", "head", "delete")
_VALUE = {"rows": 1200, "loss": 0.25, "month": "2013-01"}
_BEAT_SECONDS = 30.0


# ---- requests


class _Counting:
    """Counts the requests of one step after another."""

    def __init__(self, recorder: Recorder) -> None:
        self.store = FaultStore(open_store(f"memory://{uuid.uuid4().hex}"))
        self.rows: list[Row] = []
        self._recorder = recorder
        self._before: Counter[str] = Counter()

    def note(self, what: str) -> None:
        """Add a row with the requests since the last one."""
        now = Counter({verb: self.store.count(verb) for verb in VERBS})
        cost = {verb: now[verb] - self._before[verb] for verb in VERBS}
        self._before = now
        self._recorder.write(case=what, requests=cost)
        shown = " ".join(f"{verb.upper()} {count}" for verb, count in cost.items() if count)
        self.rows.append(Row(REQUESTS, what, f"{sum(cost.values())}: {shown}"))


def request_rows(recorder: Recorder) -> list[Row]:
    """Count the requests of a try's life. Counted, not timed: they are the same on every store."""
    counting = _Counting(recorder)
    task = open_task(counting.store, "bench")
    counting.note("begin a try: probe the store, claim the number")
    durable = task.durable(None)
    manifest = put_object(counting.store, "bench/manifest", b"{}")
    counting.note("write an object (data or manifest)")
    durable.acquire()
    durable.commit_checkpoint(1, manifest, keep=3)
    counting.note("protocol: acquire and first commit")
    durable.commit_checkpoint(2, manifest, keep=3)
    counting.note("protocol: each further commit")
    durable.release()
    counting.note("protocol: release")
    _count_saves(counting, task)
    _count_partitions(counting, task)
    return counting.rows


def _count_saves(counting: _Counting, task: Task) -> None:
    """A whole checkpoint is its document, its tensors and its manifest, each written and asked for, and the commit."""
    task = dataclasses.replace(task, asset=("training",))
    model = Stateful({"weight": torch.zeros(4)})
    with task.training(model=model, save=EverySteps(1), keep=3) as session:
        counting.note("enter a training session (nothing to resume)")
        for step in session.steps(6):
            if step == 1:
                counting.note("whole checkpoint")
            if step == 4:
                counting.note("3 whole checkpoints, the first with an old one to delete")
    counting.note("last 2 checkpoints, complete")


def _count_partitions(counting: _Counting, task: Task) -> None:
    task = dataclasses.replace(task, asset=("months",), partition_keys=("2013-01", "2013-02"))
    for part in task.partitions():
        part.save(_VALUE)
        counting.note("partition: look, write the value, commit")
        break
    for part in task.partitions():
        counting.note("partition committed before: look and skip, then look at the next")
        part.save(_VALUE)


# ---- the heartbeat


def beat_rows(folder: Path, rounds: int, recorder: Recorder) -> list[Row]:
    """Time a sidecar from its start to its first beat, against the start of an interpreter that does nothing."""
    store = open_store(str(folder))
    started: list[Sidecar] = []

    def first_beat() -> None:
        sidecar = Sidecar(store, run_id="bench", root="bench", role="step", instance_id="bench")
        started.append(sidecar)
        sidecar.start()
        wait_for(folder / sidecar.key)

    ours = Contender(OURS, first_beat, lambda: started.pop().close())
    bare = Contender("bare python -I -S", lambda: subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True))
    return compare(BEAT, "local directory", [ours, bare], rounds, recorder)


def wait_for(path: Path) -> None:
    """Return as soon as a file is there."""
    deadline = time.monotonic() + _BEAT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"No heartbeat within {_BEAT_SECONDS:g} s; is obstore installed for {sys.executable}?")
        time.sleep(0.0002)


# ---- partitions


def local_partition_rows(folder: Path, rounds: int, recorder: Recorder) -> list[Row]:
    """Time one partition of a loop in a directory, against one file written atomically and durably."""
    folder.mkdir(parents=True)
    target, temporary = folder / "value.json", folder / "value.tmp"

    def write() -> None:
        temporary.write_bytes(b"{}")
        sync(temporary)
        os.replace(temporary, target)
        sync(folder)

    bare = Contender("one file, fsync, rename", write)
    return _partition_rows("local directory", open_store(str(folder / "ours")), bare, rounds, recorder)


def s3_partition_rows(place: Place, rounds: int, recorder: Recorder) -> list[Row]:
    """Time one partition of a loop on S3, against one bare PUT."""
    client = place.client()
    bare = Contender("one bare obstore PUT", lambda: obstore.put(client, "bench/value", b"{}", use_multipart=False))
    store = open_store(f"s3://{place.bucket}/loop", place.options)
    return _partition_rows("S3", store, bare, rounds, recorder)


def _partition_rows(case: str, store: ObjectStore, bare: Contender, rounds: int, recorder: Recorder) -> list[Row]:
    with opened(store, "loop") as task:
        keys = tuple(f"part-{n:05d}" for n in range(rounds + 1))
        parts = dataclasses.replace(task, partition_keys=keys).partitions()
        ours = Contender(OURS, lambda: next(parts).save(_VALUE))
        return compare(PARTITION, case, [ours, bare], rounds, recorder)
