"""A code location for the browser tests: a value, a loop over partitions, and a value below both.

It writes down what it computes: one line per partition, in a file for each run. The tag `trouble` says what befalls the
root run at the third partition of its range, and never its re-executions.

No postponed annotations: Dagster reads those of assets.
"""

import os
import signal
import time
from pathlib import Path

import dagster as dg

from dagster_resilient import (
    RecoveryPolicy,
    ResilientIOManager,
    ResilientResource,
    build_recovery_sensor,
    resilient_executor,
)

HERE = Path(os.environ["DEPLOYMENT_FOLDER"])
LETTERS = dg.StaticPartitionsDefinition(list("abcdefghijkl"))
WHOLE_RANGE = dg.BackfillPolicy.single_run()

# Three roots and their re-executions on two cores: a step that is forked need not import Dagster again.
FORKED = {
    "execution": {"config": {"start_method": {"forkserver": {"preload_modules": ["dagster_resilient.executor"]}}}}
}


def tell(context: dg.AssetExecutionContext, what: str) -> None:
    """Write down that something is computed."""
    with (HERE / f"computed-{context.run.run_id}").open("a") as file:
        file.write(f"{what}\n")


def meet_trouble(context: dg.AssetExecutionContext) -> None:
    """Fail, die or hang, if the run is to."""
    trouble = context.run.tags.get("trouble") if context.run.parent_run_id is None else None
    if trouble == "fail":
        raise ValueError("on purpose")
    if trouble == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while trouble == "hang":
        time.sleep(0.1)


@dg.asset(code_version="1")
def base(context: dg.AssetExecutionContext) -> int:
    """A value."""
    tell(context, "base")
    return 1


@dg.asset(partitions_def=LETTERS, backfill_policy=WHOLE_RANGE, code_version="1", deps=[base])
def letters(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
    """A value per partition, each saved as it comes."""
    for part in resilient.task(context).partitions():
        if part.key == context.partition_keys[2]:
            meet_trouble(context)
        tell(context, f"letters {part.key}")
        part.save(part.key)


@dg.asset(partitions_def=LETTERS, backfill_policy=WHOLE_RANGE, code_version="1")
def words(context: dg.AssetExecutionContext, base: int, letters: dict[str, str]) -> dict[str, str]:
    """A range of values at once, from all above."""
    tell(context, "words")
    return {key: letter * (base + 1) for key, letter in letters.items()}


resilient = ResilientResource(url=str(HERE / "store"), heartbeat_seconds=1, ttl_seconds=10)
defs = dg.Definitions(
    assets=[base, letters, words],
    jobs=[dg.define_asset_job("everything", config=FORKED)],
    executor=resilient_executor,
    # What raises an error is left to the person at the browser; what is killed is recovered.
    sensors=[
        build_recovery_sensor(
            RecoveryPolicy(max_attempts=dict.fromkeys(RecoveryPolicy().max_attempts, 0) | {"crashed": 3}, first_wait=0),
            minimum_interval_seconds=1,
        )
    ],
    resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
)
