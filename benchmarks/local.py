"""Saving and loading a training state in a local directory, against torch.save, torch's DCP and safetensors."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.rounds import OURS, Contender, Row, Run
from dagster_resilient import EverySteps, Task, open_task
from dagster_resilient.checkpoint.restore import newest_checkpoint
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.object_store import ObjectStore

SAVE, LOAD = "save a training state", "load it into live tensors"
TORCH_LOAD, SAFETENSORS = "torch.load, unverified", "safetensors, unverified"
_SIDE = 1024
_NEVER = EverySteps(10**9)
_ALL = 10**9  # checkpoints to keep: nobody's removal of old ones is timed


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


def flat(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a tree by their paths."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if not isinstance(value, dict):
        return {}
    found: dict[str, torch.Tensor] = {}
    for name, item in value.items():
        found |= flat(item, f"{path}/{name}")
    return found


def size_of(state: dict[str, Any]) -> str:
    """Return the size of all tensors, as a case is named."""
    return f"{sum(tensor.nbytes for tensor in flat(state).values()) / 1e6:.0f} MB"


def local_rows(folder: Path, sizes: tuple[int, ...], rounds: int, run: Run) -> list[Row]:
    """Measure saving and loading for each size, in megabytes."""
    rows = []
    for megabytes in sizes:
        state = training_state(megabytes)
        rows += _save_rows(folder / f"save-{megabytes}", state, rounds, run)
        rows += _load_rows(folder / f"load-{megabytes}", state, rounds, run)
    return sorted(rows, key=lambda row: row.section != SAVE)


# ---- saving


def _save_rows(folder: Path, state: dict[str, Any], rounds: int, run: Run) -> list[Row]:
    folder.mkdir(parents=True)
    objects = {name: Stateful(tensors) for name, tensors in state.items()}
    with opened(str(folder / "ours"), "bench") as task, task.training(**objects, save=_NEVER, keep=_ALL) as session:
        steps = session.steps(10**9)
        next(steps)

        def save() -> None:
            """Save as a training loop does: the step in progress ends, and its state is committed."""
            session.save()
            next(steps)

        ours = Contender(OURS, save, lambda: _delete_data(task.store))
        peers = [*_torch_savers(folder / "torch", state), *_dcp_savers(folder / "dcp", state)]
        return run.compare(SAVE, size_of(state), [ours, *peers], rounds)


def _delete_data(store: ObjectStore) -> None:
    """Delete the data of all checkpoints, and leave the log: the next round needs the space, and nobody the data."""
    store.delete([info.key for info in store.list("") if "/data/" in info.key])


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

    names = {True: "CRC-32", False: "no CRC-32"}
    return [Contender("torch.save + fsync", saver(on), file.unlink, setting) for on, setting in names.items()]


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
            writer = FileSystemWriter(folder / uuid.uuid4().hex, sync_files=True, thread_count=threads)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp_save(state, storage_writer=writer, no_dist=True)

        return save

    counts = sorted({1, os.cpu_count() or 1})
    return [Contender("DCP, sync_files", saver(n), lambda: _empty(folder), f"threads: {n}") for n in counts]


def _empty(folder: Path) -> None:
    for child in folder.iterdir():
        shutil.rmtree(child)


# ---- loading


def _load_rows(folder: Path, state: dict[str, Any], rounds: int, run: Run) -> list[Row]:
    folder.mkdir(parents=True)
    live = {name: tensor.clone() for name, tensor in flat(state).items()}
    with opened(str(folder / "ours"), "bench") as task, _saved(task, state) as durable:
        ours = Contender(OURS, lambda: _copy(flat(_verified(durable)), live))
        rows = run.compare(LOAD, size_of(state), [ours, *_loaders(folder, state, live)], rounds)
    shutil.rmtree(folder)
    return rows


def _copy(loaded: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> None:
    """Copy into the tensors of a model, as its `load_state_dict` does. Until then a memory map has read nothing."""
    for name, tensor in live.items():
        tensor.copy_(loaded[name])


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
    return {"model": found.tree["model"], "optimizer": found.tree["optimizer"]}


def _loaders(folder: Path, state: dict[str, Any], live: dict[str, torch.Tensor]) -> list[Contender]:
    torch_file, safe_file = folder / "state.pt", folder / "state.safetensors"
    torch.save(state, torch_file)
    safetensors.torch.save_file(flat(state), safe_file)

    def torch_load(mmap: bool) -> None:
        _copy(flat(torch.load(torch_file, weights_only=True, mmap=mmap)), live)

    return [
        Contender(TORCH_LOAD, lambda: torch_load(mmap=False), setting="no mmap"),
        Contender(TORCH_LOAD, lambda: torch_load(mmap=True), setting="mmap"),
        Contender(SAFETENSORS, lambda: _copy(safetensors.torch.load_file(safe_file), live)),
    ]
