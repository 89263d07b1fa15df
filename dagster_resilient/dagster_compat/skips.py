"""What the run worker of a resuming run leaves out, and what Dagster's "from asset failure" would drop."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import dagster as dg
from dagster._core.events import DagsterEvent, EngineEventData
from dagster._core.execution.api import create_execution_plan
from dagster._core.execution.context.system import PlanOrchestrationContext
from dagster._core.execution.plan.outputs import StepOutput, StepOutputHandle
from dagster._core.execution.plan.plan import ExecutionPlan
from dagster._core.execution.plan.step import ExecutionStep
from dagster._core.storage import tags as dagster_tags

from dagster_resilient.dagster_compat.runs import successful_steps

UNFINISHED_CHECK = "resilient_step_succeeded"


@dataclass(frozen=True)
class PlannedStep:
    """One step of an execution plan.

    Attributes:
        key: Its key.
        optional: Assets whose output it may leave out and yet succeed.
        is_plain: Whether its outputs are assets and ops' values alone: no asset checks, no dynamic outputs, nothing
            that is mapped over or collected from those.
    """

    key: str
    optional: frozenset[dg.AssetKey]
    is_plain: bool


def worker_repository(plan_context: PlanOrchestrationContext) -> dg.RepositoryDefinition:
    """Return the definitions from which a run worker runs. Private: `PlanOrchestrationContext.reconstructable_job`."""
    return plan_context.reconstructable_job.repository.get_definition()


def planned_steps(execution_plan: ExecutionPlan) -> list[PlannedStep]:
    """Return the steps that a plan executes. Private: `ExecutionPlan.get_step_by_key`, the properties of outputs."""
    return [_planned(execution_plan, key) for key in execution_plan.step_keys_to_execute]


def _planned(execution_plan: ExecutionPlan, key: str) -> PlannedStep:
    step = execution_plan.step_dict_by_key.get(key)
    outputs = () if step is None else tuple(step.step_outputs)
    return PlannedStep(
        key=key,
        optional=frozenset(asset for one in outputs if not one.is_required and (asset := _asset(one)) is not None),
        is_plain=isinstance(step, ExecutionStep) and not any(_is_special(output) for output in outputs),
    )


def _asset(output: StepOutput) -> dg.AssetKey | None:
    return output.properties.asset_key


def _is_special(output: StepOutput) -> bool:
    return output.properties.asset_check_key is not None or output.properties.is_dynamic


def with_inner_steps(execution_plan: ExecutionPlan, finished: Collection[str]) -> set[str]:
    """Add to finished steps the ops whose values only these take: the inner ops of a graph that computes an asset.

    Private: `ExecutionPlan.get_all_step_deps` and what `planned_steps` reads.
    """
    below: dict[str, set[str]] = defaultdict(set)
    for key, above in execution_plan.get_all_step_deps().items():
        for one in above:
            below[one].add(key)
    left_out = set(finished)
    wanted = set(execution_plan.step_keys_to_execute)
    for step in reversed(execution_plan.get_all_steps_in_topo_order()):
        takers = below[step.key] & wanted
        is_inner = not any(_asset(output) or _is_special(output) for output in step.step_outputs)
        if step.key in wanted and is_inner and takers and takers <= left_out:
            left_out.add(step.key)
    return left_out


def without_steps(
    plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan, left_out: Collection[str]
) -> ExecutionPlan:
    """Return a plan without some of its steps, whose outputs count as there: the steps below them load as ever.

    Private: `create_execution_plan`, and the `ready_outputs` of `KnownExecutionState`, which say to a step that it need
    not wait for an output or look for it in the parent run's log.
    """
    state = execution_plan.known_state
    ready = {
        StepOutputHandle(key, output.name)
        for key in left_out
        for output in execution_plan.get_step_by_key(key).step_outputs
    }
    return create_execution_plan(
        plan_context.job,
        run_config=plan_context.run_config,
        step_keys_to_execute=[key for key in execution_plan.step_keys_to_execute if key not in left_out],
        known_state=state._replace(ready_outputs=state.ready_outputs | ready),
        repository_load_data=execution_plan.repository_load_data,
    )


def tell_run(plan_context: PlanOrchestrationContext, message: str) -> dg.DagsterEvent:
    """Log an event of the run itself. Private: `DagsterEvent.engine_event`, the one that an executor may yield."""
    return DagsterEvent.engine_event(plan_context, message, EngineEventData())


def is_from_asset_failure(run: dg.DagsterRun) -> bool:
    """Return whether Dagster chose the run's assets by "from asset failure". Private: the tag's name."""
    return run.tags.get(dagster_tags.ASSET_RESUME_RETRY_TAG) == "true"


def mark_asset_resume(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Tie a run's mark of "from asset failure" to its parent: Dagster copies it to a later "re-execute all" of the run.

    Private: the tag's name, and `DagsterInstance.add_run_tags`.
    """
    if is_from_asset_failure(run) and run.parent_run_id is not None:
        instance.add_run_tags(run.run_id, {dagster_tags.ASSET_RESUME_RETRY_TAG: run.parent_run_id})


def taken_for_done(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dict[dg.AssetKey, int]:
    """Return the assets that Dagster takes for done although their step did not succeed, with their logged partitions.

    "From asset failure" leaves out each asset with one materialization in the run. A range logs one per partition, so
    that nothing is lost when it dies: it would be left out with whatever is missing of it.

    Private: `DagsterInstance.get_execution_plan_snapshot` and `get_asset_partitions_for_run`, which Dagster reads for
    its choice as well.
    """
    unfinished = _unfinished(instance, run)
    if not unfinished:
        return {}
    of_type = dg.DagsterEventType.ASSET_MATERIALIZATION
    logged = instance.get_asset_partitions_for_run(run.run_id, of_type=of_type)
    return {key: len(logged[key]) for key in sorted(unfinished) if key in logged}


def _unfinished(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[dg.AssetKey]:
    """Return the assets whose step was planned and has not succeeded."""
    if run.execution_plan_snapshot_id is None:
        return set()
    snapshot = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    left = set(snapshot.step_keys_to_execute) - successful_steps(instance, run.run_id)
    outputs = (output for step in snapshot.steps if step.key in left for output in step.outputs)
    return {key for output in outputs if output.properties and (key := output.properties.asset_key) is not None}


def mark_unfinished(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dict[dg.AssetKey, int]:
    """Log for each asset that Dagster would take for done that it is not; return them, with their logged partitions.

    The mark is a failed blocking check: the one thing for which "from asset failure" selects an asset that has
    materializations. It says why in the run's log, belongs to no definition, and is logged once per run and asset.

    Private: as above, and `DagsterInstance.report_dagster_event`; the public event of a check belongs to no run.
    """
    found = taken_for_done(instance, run)
    marked = _marked(instance, run) if found else set()
    for key, count in found.items():
        if key not in marked:
            instance.report_dagster_event(_mark(run, key, count), run.run_id)
    return found


def _mark(run: dg.DagsterRun, key: dg.AssetKey, count: int) -> dg.DagsterEvent:
    description = (
        f"The step of {key.to_user_string()} did not succeed. What it had materialized before ({count}) stands, and is "
        'not computed again by "from failure" or "from asset failure".'
    )
    evaluation = dg.AssetCheckEvaluation(
        asset_key=key, check_name=UNFINISHED_CHECK, passed=False, blocking=True, description=description, metadata={}
    )
    return DagsterEvent(
        event_type_value=dg.DagsterEventType.ASSET_CHECK_EVALUATION.value,
        job_name=run.job_name,
        event_specific_data=evaluation,
        message=description,
    )


def _marked(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[dg.AssetKey]:
    logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    data = (entry.get_dagster_event().event_specific_data for entry in logs)
    return {
        one.asset_key for one in data if isinstance(one, dg.AssetCheckEvaluation) and one.check_name == UNFINISHED_CHECK
    }


def planned_assets(execution_plan: ExecutionPlan) -> set[dg.AssetKey]:
    """Return the assets of the steps that a plan executes. Private: as `planned_steps`."""
    steps: Iterable[str] = execution_plan.step_keys_to_execute
    found = (execution_plan.step_dict_by_key.get(key) for key in steps)
    outputs = (output for step in found if step is not None for output in step.step_outputs)
    return {key for output in outputs if (key := _asset(output)) is not None}
