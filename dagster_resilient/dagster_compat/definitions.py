"""What a code location's jobs compute, and with what."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetNode
from dagster._core.definitions.output import OutputDefinition
from dagster._core.types.dagster_type import DagsterTypeKind

from dagster_resilient.errors import ConfigurationError


def job_of(repository_def: dg.RepositoryDefinition, job_name: str) -> dg.JobDefinition:
    """Return a job of the code location; `__ASSET_JOB` is the implicit one.

    Raises:
        ConfigurationError: The code location has no such job.
    """
    if not repository_def.has_job(job_name):
        raise ConfigurationError(
            f"The code location's repository {repository_def.name!r} has no job {job_name!r}, so its runs cannot be "
            "planned or re-executed here; put the recovery sensor into the code location that defines the job."
        )
    return repository_def.get_job(job_name)


def belongs_to(context: dg.SensorEvaluationContext, run: dg.DagsterRun) -> bool:
    """Return whether a run is one of the sensor's own code location.

    A run of the command line names no location; it belongs where its job is.

    Private: `DagsterRun.remote_job_origin` and `SensorEvaluationContext.code_location_origin`.
    """
    if context.repository_def is None or not context.repository_def.has_job(run.job_name):
        return False
    if run.remote_job_origin is None or context.code_location_origin is None:
        return True
    origin = run.remote_job_origin.repository_origin
    here = (context.code_location_origin.location_name, context.repository_name)
    return (origin.code_location_origin.location_name, origin.repository_name) == here


def job_of_run(repository_def: dg.RepositoryDefinition, run: dg.DagsterRun) -> dg.JobDefinition:
    """Return the run's job cut down to the ops, assets and checks that the run selected.

    Private: `JobDefinition.get_subset` and the selections of `DagsterRun`, which the run worker itself applies.
    """
    ops = sorted(run.resolved_op_selection) if run.resolved_op_selection else run.op_selection
    return job_of(repository_def, run.job_name).get_subset(
        op_selection=ops, asset_selection=run.asset_selection, asset_check_selection=run.asset_check_selection
    )


def job_executor_name(repository_def: dg.RepositoryDefinition, job_name: str) -> str:
    """Return the name of the executor that runs a job: its own, that of the definitions, or Dagster's default.

    Private: `JobDefinition.executor_def`.
    """
    return job_of(repository_def, job_name).executor_def.name


def node_of(repository_def: dg.RepositoryDefinition, asset_key: dg.AssetKey) -> AssetNode:
    """Return the asset's node in the graph. Private: `RepositoryDefinition.asset_graph`."""
    return repository_def.asset_graph.get(asset_key)


def upstream_keys(repository_def: dg.RepositoryDefinition, asset_key: dg.AssetKey) -> set[dg.AssetKey]:
    """Return the direct upstream assets, external ones included, itself left out.

    Private: `AssetNode.parent_keys`.
    """
    return set(node_of(repository_def, asset_key).parent_keys) - {asset_key}


def assets_of_step(repository_def: dg.RepositoryDefinition, asset_key: dg.AssetKey) -> set[dg.AssetKey]:
    """Return the assets that must run together with an asset: all of a multi-asset that cannot be subset.

    Private: `AssetNode.execution_set_asset_keys`.
    """
    return set(node_of(repository_def, asset_key).execution_set_asset_keys)


def step_key_of(repository_def: dg.RepositoryDefinition, job_name: str, asset_key: dg.AssetKey) -> str | None:
    """Return the key of the step whose output is the asset, or None where the job does not compute it.

    Private: `JobDefinition.asset_layer`, which alone knows the op behind an asset (the last one of a graph asset).
    """
    return job_step_key(job_of(repository_def, job_name), asset_key)


def job_step_key(job: dg.JobDefinition, asset_key: dg.AssetKey) -> str | None:
    """Return the key of the step of a job whose output is the asset. Private: as `step_key_of`."""
    if asset_key not in _asset_keys(job):
        return None
    return str(job.asset_layer.get_op_output_handle(asset_key).node_handle)


def _asset_keys(job: dg.JobDefinition) -> set[dg.AssetKey]:
    """Return what a job computes. Cut down to ops, a job keeps its whole asset layer: only its nodes tell."""
    nodes = {node.name for node in job.nodes}
    return {key for data in job.asset_layer.data if data.node_handle.name in nodes for key in data.assets_def.keys}


def run_asset_keys(repository_def: dg.RepositoryDefinition, run: dg.DagsterRun) -> list[dg.AssetKey]:
    """Return the assets that a run computes, upstream first. Empty for a job of plain ops.

    Private: `AssetLayer.data`, `AssetGraph.toposorted_asset_keys`, `DagsterRun.step_keys_to_execute`.
    """
    return jobs_asset_keys(repository_def, job_of_run(repository_def, run), run)


def jobs_asset_keys(
    repository_def: dg.RepositoryDefinition, job: dg.JobDefinition, run: dg.DagsterRun
) -> list[dg.AssetKey]:
    """Return the same, where the run's `job_of_run` is at hand."""
    keys = _asset_keys(job)
    if run.step_keys_to_execute is not None:
        keys = {key for key in keys if job_step_key(job, key) in run.step_keys_to_execute}
    return [key for key in repository_def.asset_graph.toposorted_asset_keys if key in keys]


def output_is_nothing(repository_def: dg.RepositoryDefinition, asset_key: dg.AssetKey) -> bool:
    """Return whether an asset never hands a value to an IO manager: `-> None`, or given by specs alone.

    A function that returns `MaterializeResult` may put a value into it, so the answer for it is no.

    Private: `JobDefinition.asset_layer` of the implicit job, `JobDefinition.get_node`, `DagsterType.is_nothing`.
    """
    return bool(_output(repository_def.get_implicit_global_asset_job_def(), asset_key).dagster_type.is_nothing)


def output_may_be_absent(repository_def: dg.RepositoryDefinition, asset_key: dg.AssetKey) -> bool:
    """Return whether an asset may end without handing over a value: nothing, or a type that is not declared.

    A `MaterializeResult` with and without a value looks the same beforehand; Dagster gives it the type Any.

    Private: as above, and `DagsterType.kind`.
    """
    kind = _output(repository_def.get_implicit_global_asset_job_def(), asset_key).dagster_type.kind
    return kind in (DagsterTypeKind.NOTHING, DagsterTypeKind.ANY)


def declared_outputs(job: dg.JobDefinition, cls: type[Any]) -> Iterator[tuple[dg.AssetKey, Any]]:
    """Yield the assets that a job stores through an IO manager of class `cls`, with the annotations of their outputs.

    Private: `JobDefinition.asset_layer`, `DagsterType.typing_type`.
    """
    for asset_key in job.asset_layer.selected_asset_keys:
        output = _output(job, asset_key)
        if _is_configured_from(job.resource_defs.get(output.io_manager_key or "io_manager"), cls):
            yield asset_key, output.dagster_type.typing_type


def _output(job: dg.JobDefinition, asset_key: dg.AssetKey) -> OutputDefinition:
    handle = job.asset_layer.get_op_output_handle(asset_key)
    return job.get_node(handle.node_handle).definition.output_def_named(handle.output_name)


def io_manager_is(
    repository_def: dg.RepositoryDefinition, job_name: str, asset_key: dg.AssetKey, cls: type[Any]
) -> bool:
    """Return whether the IO manager of an asset in a job is configured from `cls` or a subclass.

    Private: `AssetNode.io_manager_key`, `configurable_resource_cls` of the definition that a pydantic resource makes.
    """
    definition = job_of(repository_def, job_name).resource_defs.get(node_of(repository_def, asset_key).io_manager_key)
    return _is_configured_from(definition, cls)


def _is_configured_from(definition: object, cls: type[Any]) -> bool:
    found = getattr(definition, "configurable_resource_cls", None)
    return isinstance(found, type) and issubclass(found, cls)
