"""A training as a plain script runs it: ``train_script.py URL FOLDER STEPS EVERY [OPERATION HOW]``.

Appends every step to ``FOLDER/journal`` and writes digests of the final state to ``FOLDER/final.json``. With OPERATION
and HOW this process is killed at that operation of its store, before or after the store has done it.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from dagster_resilient import EverySteps, codecs, open_store, open_task
from dagster_resilient.testing import Fault, FaultStore

torch.set_num_threads(1)


def build():
    """Return model, optimizer, schedule and shuffled data, seeded: what every start of the script builds anew."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is what is restored
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    data = torch.utils.data.TensorDataset(torch.arange(130), torch.randn(130, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


def update(model, optimizer, scheduler, inputs):
    """Make one step; return its loss."""
    target = inputs.sum(dim=1, keepdim=True) + random.gauss(0, 0.1) + float(np.random.randn())  # noqa: NPY002 - see build
    loss = (model(inputs) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


def digest(value):
    """Return a digest of a value's exact bytes."""
    parts = codecs.encode(value).parts
    return {role: blake3(b"".join(buffers)).hexdigest() for role, buffers in parts.items()}


def opened(url, arguments):
    """Return the store, which kills this process where the arguments say so."""
    store = open_store(url)
    if not arguments:
        return store
    operation, how = arguments
    return FaultStore(store, {int(operation): Fault(how)})


def main(url, folder, steps, every, *arguments):
    """Train to the end, or to a kill."""
    objects = build()
    loader = objects.pop("loader")
    task = open_task(opened(url, arguments), "toy/model")
    journal = os.open(Path(folder) / "journal", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    with task.training(**objects, loader=loader, save=EverySteps(int(every)), keep=2) as session:
        os.write(journal, f"{json.dumps({'resumed': session.step})}\n".encode())
        for step, (ids, inputs) in session.batches(int(steps)):
            loss = update(**objects, inputs=inputs)
            session.report(loss=loss)
            line = {"step": step, "loss": loss.hex(), "ids": ids.tolist()}
            os.write(journal, f"{json.dumps(line)}\n".encode())
    final = {name: digest(stateful.state_dict()) for name, stateful in objects.items()}
    Path(folder, "final.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main(*sys.argv[1:])
