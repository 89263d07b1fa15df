"""A code location whose step trains in small, slow steps and notes each of them in a local file."""

import os
import time
from pathlib import Path

import dagster as dg

from dagster_resilient import (
    EverySteps,
    ResilientIOManager,
    ResilientResource,
    build_recovery_sensor,
    resilient_executor,
)

STEPS = int(os.environ.get("STEADY_STEPS", "400"))
lanes = dg.StaticPartitionsDefinition([f"lane{n}" for n in range(5)])


@dg.asset(partitions_def=lanes, code_version="1")
def steady(context: dg.AssetExecutionContext, resilient: ResilientResource) -> dict:
    """Counts in its user state; each step is one line of the lane's file."""
    notes = Path(os.environ["STEADY_NOTES"]) / context.partition_key
    with resilient.task(context).training(save=EverySteps(5)) as session:
        for step in session.steps(STEPS):
            session.user["sum"] = session.user.get("sum", 0) + step
            with notes.open("a") as file:
                file.write(f"{time.monotonic()} {os.getpid()} {step}\n")
            time.sleep(0.1)
    return dict(session.user)


resilient = ResilientResource(
    url=dg.EnvVar("RESILIENT_URL"),
    heartbeat_seconds=float(os.environ["RESILIENT_HEARTBEAT_SECONDS"]),
    ttl_seconds=float(os.environ["RESILIENT_TTL_SECONDS"]),
)
defs = dg.Definitions(
    assets=[steady],
    jobs=[dg.define_asset_job("steady_job")],
    executor=resilient_executor,
    sensors=[build_recovery_sensor(minimum_interval_seconds=1)],
    resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
)
