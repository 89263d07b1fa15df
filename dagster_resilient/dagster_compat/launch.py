"""Launch a true re-execution of a run from inside a sensor, exactly once."""

import os
from collections.abc import Collection, Mapping, Sequence

import dagster as dg
from dagster._core.errors import DagsterRunAlreadyExists, DagsterRunNotFoundError
from dagster._core.execution.api import create_execution_plan
from dagster._core.execution.backfill import BulkActionStatus
from dagster._core.execution.plan.state import KnownExecutionState
from dagster._core.origin import JobPythonOrigin
from dagster._core.remote_origin import RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.run_coordinator import DefaultRunCoordinator
from dagster._core.snap import snapshot_from_execution_plan
from dagster._core.storage import tags as dagster_tags

from dagster_resilient.dagster_compat.definitions import assets_of_step, job_of_run
from dagster_resilient.dagster_compat.features import without_retries
from dagster_resilient.errors import ConfigurationError

_NEVER_KEPT = dagster_tags.TAGS_TO_MAYBE_OMIT_ON_RETRY | {
    dagster_tags.RUN_KEY_TAG,  # a sensor would take the copy for a run of its own and skip the next request
    dagster_tags.TICK_ID_TAG,
    dagster_tags.ASSET_RESUME_RETRY_TAG,
    dagster_tags.STEP_SELECTION_TAG,
    dagster_tags.OP_SELECTION_TAG,
    dagster_tags.PARENT_RUN_ID_TAG,
    dagster_tags.ROOT_RUN_ID_TAG,
    dagster_tags.CODE_LOCATION_TAG,
}


def launch_reexecution(
    context: dg.SensorEvaluationContext,
    parent: dg.DagsterRun,
    *,
    run_id: str,
    asset_keys: Sequence[dg.AssetKey] | None,
    tags: Mapping[str, str],
    check_keys: Sequence[dg.AssetCheckKey] | None = None,
) -> tuple[dg.DagsterRun, bool]:
    """Queue a re-execution of a run, exactly once for a run id.

    The sensor may be killed at any line and be called again with the same run id: a run that was created and not yet
    queued is queued, any further one is left alone. (Dagster runs a sensor's ticks one after the other. Two daemons on
    one instance could both queue one run.)

    Args:
        context: The sensor's context. Its code location must define the parent's job.
        parent: The run to re-execute. Its run config and selection are taken over.
        run_id: The id of the new run, a UUID that is the same at every call.
        asset_keys: What to compute, or None for the steps that the parent left undone. Assets of a multi-asset that
            cannot be subset are added.
        tags: All tags of the new run, the parent's `kept_tags` and its partitions among them. The job's own tags, and
            those that make it a re-execution, are added.
        check_keys: Exactly these asset checks; None: those of the assets, as far as the parent had selected them.

    Returns:
        The run, and whether this call queued it.

    Raises:
        ConfigurationError: The run cannot be re-executed from here. The message says why.

    Private: `DagsterInstance.create_run` and `submit_run`. A `RunRequest` would leave parent and root unset, and its
    run id would be random, so that a crash between request and launch would repeat or lose it.
    """
    instance = context.instance
    _check_coordinator(instance)
    run = instance.get_run_by_id(run_id)
    if run is None:
        run = _create(context, parent, run_id, _selected(context, parent, asset_keys, check_keys), tags)
    new = queue_once(instance, run)
    return (_stored_run(instance, run_id), True) if new else (run, False)


def queue_once(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Queue a run that was created and not yet queued; return whether there was need. Private: `submit_run`."""
    if run.status != dg.DagsterRunStatus.NOT_STARTED:
        return False
    # The queue's coordinator reads only the run. A sensor has no workspace, and the daemon launches with its own.
    instance.submit_run(run.run_id, workspace=None)  # type: ignore[arg-type]
    return True


def _check_coordinator(instance: dg.DagsterInstance) -> None:
    """Refuse an instance without a queue: a submitted run would start in the sensor. Private: `run_coordinator`."""
    if isinstance(instance.run_coordinator, DefaultRunCoordinator):
        raise ConfigurationError(
            "The instance launches runs without a queue (DefaultRunCoordinator), which needs a workspace that a sensor "
            "does not have. Remove `run_coordinator` from dagster.yaml, or set QueuedRunCoordinator."
        )


def _create(
    context: dg.SensorEvaluationContext,
    parent: dg.DagsterRun,
    run_id: str,
    target: dg.DagsterRun,
    tags: Mapping[str, str],
) -> dg.DagsterRun:
    """Create the run, not started. Private: `create_run` and all that the launch page of the UI hands to it."""
    instance, repository_def = context.instance, _repository_of(context)
    job = job_of_run(repository_def, target)
    step_keys, known_state = (None, None) if target is not parent else steps_left(instance, parent)
    plan = create_execution_plan(
        job,
        run_config=parent.run_config,
        step_keys_to_execute=step_keys,
        known_state=known_state,
        instance_ref=instance.get_ref() if instance.is_persistent else None,
        repository_load_data=repository_def.repository_load_data,
    )
    try:
        return instance.create_run(
            job_name=parent.job_name,
            run_id=run_id,
            run_config=parent.run_config,
            status=dg.DagsterRunStatus.NOT_STARTED,
            tags={**job.run_tags, **tags, **lineage_tags(parent)},
            root_run_id=parent.root_run_id or parent.run_id,
            parent_run_id=parent.run_id,
            step_keys_to_execute=step_keys,
            execution_plan_snapshot=snapshot_from_execution_plan(plan, job.get_job_snapshot_id()),
            job_snapshot=job.get_job_snapshot(),
            parent_job_snapshot=job.get_parent_job_snapshot(),
            asset_selection=target.asset_selection,
            asset_check_selection=target.asset_check_selection,
            resolved_op_selection=target.resolved_op_selection,
            op_selection=target.op_selection,
            remote_job_origin=_remote_origin(context, parent),
            job_code_origin=_code_origin(parent),
            asset_graph=repository_def.asset_graph,
        )
    except DagsterRunAlreadyExists:  # another daemon's tick was faster
        return _stored_run(instance, run_id)


def _repository_of(context: dg.SensorEvaluationContext) -> dg.RepositoryDefinition:
    if context.repository_def is None:
        raise ConfigurationError(
            "The sensor's context holds no definitions: build it with `definitions=` or run it in a code location."
        )
    return context.repository_def


def _stored_run(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRun:
    run = instance.get_run_by_id(run_id)
    if run is None:
        raise ConfigurationError(f"Run {run_id} was deleted while it was being created; the next tick tries again.")
    return run


def _selected(
    context: dg.SensorEvaluationContext,
    parent: dg.DagsterRun,
    asset_keys: Sequence[dg.AssetKey] | None,
    check_keys: Sequence[dg.AssetCheckKey] | None,
) -> dg.DagsterRun:
    """Return the parent with the selection of its re-execution; itself where all that it left is wanted.

    Private: the selections of `DagsterRun`. Ops and assets exclude each other; no check selection means all checks of
    the selected assets.
    """
    if asset_keys is None:
        return parent
    if not asset_keys and not check_keys:  # Dagster would take an empty selection for the whole job
        raise ConfigurationError(f"Run {parent.run_id}: no asset is left to re-execute; do not launch it.")
    repository = _repository_of(context)
    keys = frozenset(key for wanted in asset_keys for key in assets_of_step(repository, wanted))
    return parent._replace(
        asset_selection=keys,
        asset_check_selection=kept_checks(parent, keys) if check_keys is None else frozenset(check_keys),
        op_selection=None,
        resolved_op_selection=None,
        step_keys_to_execute=None,
    )


def kept_checks(parent: dg.DagsterRun, asset_keys: Collection[dg.AssetKey]) -> frozenset[dg.AssetCheckKey] | None:
    """Return the parent's selection of checks as far as it is of these assets; None: all of them. Private: as above."""
    checks = parent.asset_check_selection
    return None if checks is None else frozenset(c for c in checks if c.asset_key in asset_keys)


def steps_left(
    instance: dg.DagsterInstance, parent: dg.DagsterRun
) -> tuple[Sequence[str] | None, KnownExecutionState | None]:
    """Return the steps that a run left undone, and where the inputs of those steps come from. None: all steps.

    Dynamic outputs are known to it: mapped steps that succeeded are left out one by one.

    Private: `KnownExecutionState`, Dagster's own rule of a re-execution "from failure". A run that died before it had a
    plan, or before any event of a step, has nothing to derive it from.
    """
    over = parent.status in (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
    if parent.execution_plan_snapshot_id is None or not over:
        return parent.step_keys_to_execute, None
    try:
        steps, state = KnownExecutionState.build_resume_retry_reexecution(instance, parent)
    except DagsterRunNotFoundError:  # an ancestor was deleted, and with it what its steps put out
        return parent.step_keys_to_execute, None
    snapshot = instance.get_execution_plan_snapshot(parent.execution_plan_snapshot_id)
    whole = {step.key for step in snapshot.steps} == set(steps)
    return (None, None) if whole and snapshot.initial_known_state is None else (steps, state)


def lineage_tags(parent: dg.DagsterRun) -> dict[str, str]:
    """Return the tags that make a run a re-execution of another. Private: their names."""
    root = parent.root_run_id or parent.run_id
    return {dagster_tags.PARENT_RUN_ID_TAG: parent.run_id, dagster_tags.ROOT_RUN_ID_TAG: root}


def kept_tags(parent: dg.DagsterRun, instance: dg.DagsterInstance) -> dict[str, str]:
    """Return the tags of a run that its re-execution keeps.

    Kept are the user's tags, priority, concurrency keys and partitions. Dropped is what belongs to the one run: run
    key, tick, retry count, failure reason, and all hidden tags (gRPC address, pools, run worker). Tags of a backfill
    are kept while it goes on: a finished one must not gain runs. These are Dagster's rules for its own retries, made
    stricter. Those retries are switched off, where anybody would make them.

    Private: the tags' names, and `DagsterInstance.get_backfill`.
    """
    backfill_id = parent.tags.get(dagster_tags.BACKFILL_ID_TAG)
    backfill = instance.get_backfill(backfill_id) if backfill_id else None
    going_on = backfill is not None and backfill.status == BulkActionStatus.REQUESTED
    dropped = _NEVER_KEPT - (dagster_tags.BACKFILL_TAGS if going_on else set())
    hidden = dagster_tags.HIDDEN_TAG_PREFIX
    kept = {key: value for key, value in parent.tags.items() if key not in dropped and not key.startswith(hidden)}
    return kept | without_retries(instance, parent)


def _remote_origin(context: dg.SensorEvaluationContext, parent: dg.DagsterRun) -> RemoteJobOrigin:
    """Return where the daemon finds the job: in the sensor's own code location, which has just planned the run.

    A run of the command line has no such origin, or one whose location the daemon does not know by that name.

    Private: `SensorEvaluationContext.code_location_origin` and the classes of origins.
    """
    if context.code_location_origin is not None and context.repository_name is not None:
        repository = RemoteRepositoryOrigin(context.code_location_origin, context.repository_name)
        return repository.get_job_origin(parent.job_name)
    if parent.remote_job_origin is None:
        raise ConfigurationError(
            f"Run {parent.run_id} was started without a code location, and the sensor's context names none either; "
            "launch the run anew from the UI or with `dagster job launch`."
        )
    return parent.remote_job_origin


def _code_origin(parent: dg.DagsterRun) -> JobPythonOrigin:
    """Return how a new process imports the job: as for the parent, in the image of the code that planned this run.

    Private: `DagsterRun.job_code_origin`; the variable from which Dagster's code server takes its image.
    """
    origin = parent.job_code_origin
    if origin is None:
        raise ConfigurationError(
            f"Run {parent.run_id} does not say where its code is, as runs of `execute_in_process` do not; launch it "
            "anew from the UI or with `dagster job launch`."
        )
    image = os.environ.get("DAGSTER_CURRENT_IMAGE", origin.repository_origin.container_image)
    return origin._replace(repository_origin=origin.repository_origin._replace(container_image=image))
