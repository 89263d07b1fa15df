"""Saving and loading a training state in a local directory, against torch.save, torch's DCP and safetensors."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.rounds import OURS, Contender, Recorder, Row, compare
from dagster_resilient import EverySteps, Task, open_task
from dagster_resilient.checkpoint.restore import newest_checkpoint
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.object_store import ObjectStore

SAVE, LOAD = "save a training state, durable", "load a training state, every page touched"
_SIDE = 1024
_NEVER = EverySteps(10**9)
_ALL = 10**9  # checkpoints to keep: nobody's removal of old ones is timed
_PAGE = 4096


@dataclass(frozen=True)
class Stateful:
    """An object with a given state, as a session takes it."""

    tensors: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.tensors

    def load_state_dict(self, state_dict: Any) -> None:
        """Nothing is resumed here."""
        raise NotImplementedError


def training_state(megabytes: int) -> dict[str, dict[str, Any]]:
    """Return the states of a model and its AdamW optimizer: float32 weights of 4 MB each, and two moments for each."""
    torch.manual_seed(0)
    count = max(1, round(megabytes * 1e6 / (3 * 4 * _SIDE * _SIDE)))
    weights = [torch.randn(_SIDE, _SIDE) for _ in range(count)]
    moments = {
        n: {"step": torch.tensor(100.0), "exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        for n, weight in enumerate(weights)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": list(range(count))}
    return {
        "model": {f"layers.{n}.weight": weight for n, weight in enumerate(weights)},
        "optimizer": {"state": moments, "param_groups": [group]},
    }


@contextlib.contextmanager
def opened(store: str | ObjectStore, name: str) -> Iterator[Task]:
    """Open a task, and end its heartbeat with the block, while the store is still there."""
    task = open_task(store, name)
    try:
        yield task
    finally:
        if task.attempt.sidecar is not None:
            task.attempt.sidecar.close()


def size_of(value: Any) -> int:
    """Return the bytes of all tensors of a tree."""
    return sum(tensor.nbytes for tensor in tensors_of(value))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def touch(value: Any) -> int:
    """Read one byte of every page. A memory map that nobody has read is not yet loaded."""
    return sum(int(tensor.reshape(-1).view(torch.uint8)[::_PAGE].sum()) for tensor in tensors_of(value))


def local_rows(folder: Path, sizes: tuple[int, ...], rounds: int, recorder: Recorder) -> list[Row]:
    """Measure saving and loading for each size, in megabytes."""
    rows = []
    for megabytes in sizes:
        state = training_state(megabytes)
        rows += _save_rows(folder / f"save-{megabytes}", state, rounds, recorder)
        rows += _load_rows(folder / f"load-{megabytes}", state, rounds, recorder)
    return sorted(rows, key=lambda row: row.section != SAVE)


# ---- saving


def _save_rows(folder: Path, state: dict[str, Any], rounds: int, recorder: Recorder) -> list[Row]:
    folder.mkdir(parents=True)
    objects = {name: Stateful(tensors) for name, tensors in state.items()}
    with (
        opened(str(folder / "ours"), "bench") as task,
        task.training(**objects, save=_NEVER, keep=_ALL) as session,
    ):
        steps = session.steps(10**9)
        next(steps)

        def save() -> None:
            """Save as a training loop does: the step in progress ends, and its state is committed."""
            session.save()
            next(steps)

        ours = Contender(OURS, save, lambda: _delete_data(task))
        peers = [*_torch_savers(folder / "torch", state), *_dcp_savers(folder / "dcp", state)]
        return compare(SAVE, f"{size_of(state) / 1e6:.0f} MB", [ours, *peers], rounds, recorder)


def _delete_data(task: Task) -> None:
    """Delete the data of all checkpoints but the entries of the log: the next round needs the space, nobody the data."""
    task.store.delete([info.key for info in task.store.list("") if "/data/" in info.key])


def _torch_savers(folder: Path, state: dict[str, Any]) -> list[Contender]:
    folder.mkdir()
    file = folder / "state.pt"

    def saver(checksums: bool) -> Callable[[], None]:
        def save() -> None:
            torch.serialization.set_crc32_options(checksums)
            torch.save(state, file)
            sync(file)
            sync(folder)

        return save

    names = {True: "with CRC-32", False: "without CRC-32"}
    return [
        Contender("torch.save + fsync", saver(checksums), file.unlink, setting) for checksums, setting in names.items()
    ]


def sync(path: Path) -> None:
    """Make a file or a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _dcp_savers(folder: Path, state: dict[str, Any]) -> list[Contender]:
    folder.mkdir()

    def saver(threads: int) -> Callable[[], None]:
        def save() -> None:
            writer = dcp.FileSystemWriter(folder / uuid.uuid4().hex, sync_files=True, thread_count=threads)
            dcp.save(state, storage_writer=writer, no_dist=True)

        return save

    counts = sorted({1, os.cpu_count() or 1})
    return [Contender("DCP", saver(n), lambda: _empty(folder), f"sync_files, threads: {n}") for n in counts]


def _empty(folder: Path) -> None:
    for child in folder.iterdir():
        shutil.rmtree(child)


# ---- loading


def _load_rows(folder: Path, state: dict[str, Any], rounds: int, recorder: Recorder) -> list[Row]:
    folder.mkdir(parents=True)
    try:
        with opened(str(folder / "ours"), "bench") as task, _saved(task, state) as durable:
            contenders = [Contender(OURS, lambda: touch(_verified(durable))), *_loaders(folder, state)]
            return compare(LOAD, f"{size_of(state) / 1e6:.0f} MB", contenders, rounds, recorder)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _saved(task: Task, state: dict[str, Any]) -> Iterator[DurableTask]:
    """Save one checkpoint, and hold the lease, without which none may be read, inside the block."""
    objects = {name: Stateful(tensors) for name, tensors in state.items()}
    with task.training(**objects, save=_NEVER) as session:
        session.save()
    durable = task.durable(None)
    durable.acquire()
    yield durable
    durable.release()


def _verified(durable: DurableTask) -> dict[str, Any]:
    found = newest_checkpoint(durable)
    assert found is not None
    return found.tree


def _loaders(folder: Path, state: dict[str, Any]) -> list[Contender]:
    torch_file, safe_file = folder / "state.pt", folder / "state.safetensors"
    torch.save(state, torch_file)
    flat = {str(n): tensor for n, tensor in enumerate(tensors_of(state))}
    safetensors.torch.save_file(flat, safe_file)

    def torch_load(mmap: bool) -> None:
        touch(torch.load(torch_file, weights_only=True, mmap=mmap))

    return [
        Contender("torch.load, unverified", lambda: torch_load(mmap=False), setting="weights_only"),
        Contender("torch.load, unverified", lambda: torch_load(mmap=True), setting="weights_only, mmap"),
        Contender("safetensors load_file, unverified", lambda: touch(safetensors.torch.load_file(safe_file))),
    ]
