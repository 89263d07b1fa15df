"""What the protocol costs: requests of each step, the first heartbeat, and the commit of one partition."""

from __future__ import annotations

import dataclasses
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
from benchmarks.rounds import OURS, Contender, Row, Run
from dagster_resilient import EverySteps, Task, open_store
from dagster_resilient.state.heartbeat import Sidecar
from dagster_resilient.storage.manifest import put_object
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.testing import FaultStore

REQUESTS, BEAT, PARTITION = "requests", "time to first heartbeat", "commit a partition"
VERBS = ("list", "get", "put", "create", "head", "delete")
_VALUE = {"rows": 1200, "loss": 0.25, "month": "2013-01"}
_BEAT_SECONDS = 30.0


# ---- requests


class _Counting:
    """Counts the requests of one step after another."""

    def __init__(self, run: Run) -> None:
        self.store = FaultStore(open_store(f"memory://{uuid.uuid4().hex}"))
        self.rows: list[Row] = []
        self._run = run
        self._before: Counter[str] = Counter()

    def note(self, what: str) -> None:
        """Add a row with the requests since the last one."""
        cost = self.skip()
        self._run.note(section=REQUESTS, case=what, requests=cost)
        shown = " ".join(f"{verb.upper()} {count}" for verb, count in cost.items() if count)
        self.rows.append(Row(REQUESTS, what, f"{sum(cost.values())}: {shown}"))

    def skip(self) -> dict[str, int]:
        """Return the requests since the last row, and count them no further."""
        now = Counter({verb: self.store.count(verb) for verb in VERBS})
        cost = {verb: now[verb] - self._before[verb] for verb in VERBS}
        self._before = now
        return cost


def request_rows(run: Run) -> list[Row]:
    """Count the requests of a try's life. Counted, not timed: they are the same on every store."""
    counting = _Counting(run)
    with opened(counting.store, "bench") as task:
        counting.note("begin a try in a new store")
        _count_protocol(counting, task)
        _count_saves(counting, dataclasses.replace(task, asset=("training",)))
        _count_partitions(counting, dataclasses.replace(task, asset=("months",), partition_keys=("2013-01",)))
    with opened(counting.store, "bench"):
        counting.note("begin a later try")
    return counting.rows


def _count_protocol(counting: _Counting, task: Task) -> None:
    """Ownership alone: what is committed was written before."""
    durable = task.durable(None)
    manifest = put_object(counting.store, "bench/manifest", b"{}")
    counting.note("write one object")
    durable.acquire()
    durable.commit_checkpoint(1, manifest, keep=3)
    counting.note("acquire and first commit")
    durable.commit_checkpoint(2, manifest, keep=3)
    counting.note("each further commit")
    durable.release()
    counting.note("release")


def _count_saves(counting: _Counting, task: Task) -> None:
    """A whole checkpoint is its document, its tensors and its manifest, each written and asked for, and the commit."""
    with task.training(model=Stateful({"weight": torch.zeros(4)}), save=EverySteps(1), keep=2) as session:
        counting.note("enter a new training")
        for step in session.steps(5):
            if step == 1:
                counting.note("whole checkpoint")
            if step == 3:
                counting.skip()
            if step == 4:
                counting.note("whole checkpoint, old one deleted")
    counting.skip()


def _count_partitions(counting: _Counting, task: Task) -> None:
    for part in task.partitions():
        part.save(_VALUE)
        counting.note("whole partition of a loop")
    for _ in task.partitions():
        raise RuntimeError("A committed partition was asked for again.")
    counting.note("partition committed before")


# ---- the heartbeat


def beat_rows(folder: Path, rounds: int, run: Run) -> list[Row]:
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
    return run.compare(BEAT, "local directory", [ours, bare], rounds)


def wait_for(path: Path) -> None:
    """Return as soon as a file is there."""
    deadline = time.monotonic() + _BEAT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"No heartbeat within {_BEAT_SECONDS:g} s; is obstore installed for {sys.executable}?")
        time.sleep(0.0002)


# ---- partitions


def local_partition_rows(folder: Path, rounds: int, run: Run) -> list[Row]:
    """Time one partition of a loop in a directory, against one file written atomically and durably."""
    folder.mkdir(parents=True)
    target, temporary = folder / "value.json", folder / "value.tmp"

    def write() -> None:
        temporary.write_bytes(b"{}")
        sync(temporary)
        temporary.replace(target)
        sync(folder)

    bare = Contender("one file, fsync, rename", write)
    return _partition_rows("local directory", open_store(str(folder / "ours")), bare, rounds, run)


def s3_partition_rows(place: Place, rounds: int, run: Run) -> list[Row]:
    """Time one partition of a loop on S3, against one bare PUT."""
    client = place.client()
    bare = Contender("one bare obstore PUT", lambda: obstore.put(client, "bench/value", b"{}", use_multipart=False))
    store = open_store(f"s3://{place.bucket}/loop", place.options)
    return _partition_rows("S3", store, bare, rounds, run)


def _partition_rows(case: str, store: ObjectStore, bare: Contender, rounds: int, run: Run) -> list[Row]:
    with opened(store, "loop") as task:
        keys = tuple(f"part-{n:05d}" for n in range(rounds + 1))
        parts = dataclasses.replace(task, partition_keys=keys).partitions()
        ours = Contender(OURS, lambda: next(parts).save(_VALUE))
        return run.compare(PARTITION, case, [ours, bare], rounds)
