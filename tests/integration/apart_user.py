"""The user's code location, without a sensor: recovery stands in another. It writes down what it computes.

No postponed annotations: Dagster reads those of assets.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import dagster as dg

from dagster_resilient import ResilientIOManager, ResilientResource, resilient_executor

HERE = Path(os.environ["DEPLOYMENT_FOLDER"])
LETTERS = dg.StaticPartitionsDefinition(list("abcdef"))
FORKED = {
    "execution": {"config": {"start_method": {"forkserver": {"preload_modules": ["dagster_resilient.executor"]}}}}
}


def tell(context: dg.OpExecutionContext | dg.AssetExecutionContext, what: str) -> None:
    """Write down that something is computed."""
    with (HERE / f"computed-{context.run.run_id}").open("a") as file:
        file.write(f"{what}\n")


@dg.asset(code_version="1")
def base(context: dg.AssetExecutionContext) -> int:
    """A value."""
    tell(context, "base")
    return 1


@dg.asset(partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run(), code_version="1", deps=[base])
def letters(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
    """A loop, whose machine is gone in the middle of the first run: the step dies, and the worker does nothing more."""
    for part in resilient.task(context).partitions():
        if part.key == "c" and context.run.parent_run_id is None:
            os.kill(int(os.environ["DAGSTER_RESILIENT_RUN_WORKER"].split(":")[0]), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        tell(context, part.key)
        part.save(part.key)


@dg.asset(code_version="1")
def below(context: dg.AssetExecutionContext, letters: dict[str, str]) -> str:
    """All of it together."""
    tell(context, "below")
    return "".join(letters.values())


@dg.asset_check(asset=base)
def base_is_one(context: dg.AssetCheckExecutionContext, base: int) -> dg.AssetCheckResult:
    """A step of its own."""
    tell(context.op_execution_context, "check")
    return dg.AssetCheckResult(passed=base == 1)


@dg.op(out=dg.DynamicOut(int))
def pieces(context: dg.OpExecutionContext) -> Iterator[dg.DynamicOutput[int]]:
    """Three of them."""
    tell(context, "pieces")
    yield from (dg.DynamicOutput(n, mapping_key=str(n)) for n in range(3))


@dg.op
def work(context: dg.OpExecutionContext, n: int) -> int:
    """The second one is killed in the first run."""
    if n == 1 and context.run.parent_run_id is None:
        os.kill(os.getpid(), signal.SIGKILL)
    tell(context, f"work {n}")
    return n


@dg.op
def together(context: dg.OpExecutionContext, found: list[int]) -> int:
    """Their sum."""
    tell(context, f"together {sum(found)}")
    return sum(found)


@dg.job(
    executor_def=resilient_executor,
    config={"execution": {"config": {"max_concurrent": 1, **FORKED["execution"]["config"]}}},
)
def mapped() -> None:
    """Plain ops with dynamic outputs."""
    together(pieces().map(work).collect())


resilient = ResilientResource(url=str(HERE / "store"), heartbeat_seconds=0.5, ttl_seconds=3)
defs = dg.Definitions(
    assets=[base, letters, below],
    asset_checks=[base_is_one],
    jobs=[dg.define_asset_job("everything", config=FORKED), mapped],
    executor=resilient_executor,
    resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
)
