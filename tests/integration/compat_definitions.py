"""A code location with one asset of each kind, for the tests of the private calls into Dagster."""

from collections.abc import Iterator
from typing import Any

import dagster as dg

MONTHS = ["2024-01", "2024-02", "2024-03", "2024-04"]
JOB = "everything"


class TablesIOManager(dg.ConfigurableIOManager):
    """Stands for an IO manager of ours."""

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Store nothing."""

    def load_input(self, context: dg.InputContext) -> Any:
        """Load nothing."""


monthly = dg.StaticPartitionsDefinition(MONTHS)
grid = dg.MultiPartitionsDefinition(
    {"size": dg.StaticPartitionsDefinition(["small", "big"]), "month": dg.StaticPartitionsDefinition(MONTHS)}
)


@dg.asset
def raw() -> int:
    """Unpartitioned."""
    return 1


@dg.asset(partitions_def=monthly, io_manager_key="tables", backfill_policy=dg.BackfillPolicy.single_run())
def features(raw: int) -> int:
    """Partitioned, stored by the manager under test."""
    return 1


@dg.asset(deps=[features])
def trained() -> None:
    """Hands over nothing."""


@dg.asset(deps=[raw])
def reported() -> dg.MaterializeResult[Any]:
    """Reports its materialization itself."""
    return dg.MaterializeResult()


@dg.multi_asset(specs=[dg.AssetSpec("left", deps=[raw]), dg.AssetSpec("right", deps=[raw])])
def pair() -> Iterator[dg.MaterializeResult[Any]]:
    """Cannot be subset."""
    yield dg.MaterializeResult("left")
    yield dg.MaterializeResult("right")


@dg.op
def one() -> int:
    """First op of a graph asset."""
    return 1


@dg.op
def plus(number: int) -> int:
    """Last op of a graph asset."""
    return number + 1


@dg.graph_asset
def chained() -> int:
    """Two ops."""
    return plus(one())


@dg.asset(partitions_def=grid)
def cells() -> None:
    """Partitioned in two dimensions."""


@dg.asset(partitions_def=dg.DynamicPartitionsDefinition(name="files"))
def files() -> None:
    """Partitioned as the instance says."""


@dg.op
def boom() -> None:
    """Fail."""
    raise ValueError("the inner cause")


@dg.job
def plain_ops() -> None:
    """No asset at all."""
    boom()


@dg.executor(name="ours")
def our_executor(init_context: dg.InitExecutorContext) -> dg.Executor:
    """Has a name to be recognised by."""
    return dg.in_process_executor.executor_creation_fn(init_context)


ASSETS = [raw, features, trained, reported, pair, chained, cells, files]
REPOSITORY = dg.Definitions(
    assets=ASSETS,
    jobs=[
        dg.define_asset_job(JOB, selection=["raw", "features", "trained", "left", "right"]),
        dg.define_asset_job("own_executor", selection=["raw"], executor_def=dg.in_process_executor),
        plain_ops,
    ],
    executor=our_executor,
    resources={"tables": TablesIOManager(), "io_manager": dg.mem_io_manager},
).get_repository_def()


def key(name: str) -> dg.AssetKey:
    """Return an asset key."""
    return dg.AssetKey(name)


def a_run(job_name: str = JOB, **fields: Any) -> dg.DagsterRun:
    """Return a run as the instance would, not stored anywhere."""
    return dg.DagsterRun(job_name=job_name, **fields)
