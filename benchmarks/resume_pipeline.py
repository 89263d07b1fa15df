"""The code location of `benchmarks.resume`: one training, made durable by this library or by hand.

Both train the same way and save as often. What differs is who saves, and who finds out that the run is gone. No
postponed annotations here: Dagster inspects the assets.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import torch

from dagster_resilient import EverySteps, ResilientResource, build_recovery_sensor, resilient_executor

FOLDER = Path(os.environ["RESUME_FOLDER"])
OURS = os.environ["RESUME_CODE"] == "ours"
TTL = float(os.environ["RESUME_TTL_SECONDS"])
# The default heartbeat has the same share of the default TTL: 10 s of 45 s.
HEARTBEAT = round(TTL * 10 / 45, 1)
STEP_SECONDS = 0.1
SAVED_EVERY = 5
_STEPS = 1_000_000  # it ends when it is told to
_Parts = tuple[torch.nn.Linear, torch.optim.Optimizer]


def build() -> _Parts:
    """Return a model and its optimizer."""
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters())


def train(parts: _Parts, root: str, run_id: str, steps: Iterator[int]) -> Iterator[int]:
    """Train step by step; yield the number of each that is done and noted down, until the benchmark has seen enough."""
    model, optimizer = parts
    for step in steps:
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        with (FOLDER / f"steps-{root}").open("a") as journal:
            journal.write(f"{run_id} {step} {time.time()}\n")
        yield step
        if (FOLDER / f"enough-{root}").exists():
            return


@dg.asset(code_version="1")
def durable(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
    """Train with our session."""
    model, optimizer = build()
    run = context.run
    with resilient.task(context).training(model=model, optimizer=optimizer, save=EverySteps(SAVED_EVERY)) as session:
        for _ in train((model, optimizer), run.root_run_id or run.run_id, run.run_id, session.steps(_STEPS)):
            pass


@dg.asset
def by_hand(context: dg.AssetExecutionContext) -> None:
    """Train with checkpoints by `torch.save`, under the name of the first run, which re-executions share."""
    model, optimizer = build()
    run = context.run
    root = run.root_run_id or run.run_id
    file, begin = FOLDER / f"checkpoint-{root}", 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["done"]
    for step in train((model, optimizer), root, run.run_id, iter(range(begin, _STEPS))):
        if (step + 1) % SAVED_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
            _replace(file, state)


def _replace(file: Path, state: dict[str, object]) -> None:
    new = file.with_suffix(".new")
    with new.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)


def _ours() -> dg.Definitions:
    """As the documentation has it. Only the TTL, and with it the heartbeat, is another than the default."""
    seconds = os.environ.get("RESUME_SENSOR_SECONDS")
    sensor = build_recovery_sensor(minimum_interval_seconds=int(seconds)) if seconds else build_recovery_sensor()
    resilient = ResilientResource(url=str(FOLDER / "store"), heartbeat_seconds=HEARTBEAT, ttl_seconds=TTL)
    return dg.Definitions(
        assets=[durable],
        jobs=[dg.define_asset_job("training", [durable])],
        executor=resilient_executor,
        sensors=[sensor],
        resources={"resilient": resilient},
    )


defs = _ours() if OURS else dg.Definitions(assets=[by_hand], jobs=[dg.define_asset_job("training", [by_hand])])
