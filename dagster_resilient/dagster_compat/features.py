"""What Dagster's own features do with a run that recovery looks after: retries, pools, backfills, adopted values."""

from collections.abc import Callable

import dagster as dg
from dagster._core.events import RunFailureReason, StepMaterializationData
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus
from dagster._core.execution.retries import auto_reexecution_should_retry_run
from dagster._core.storage import tags as dagster_tags

# Seconds. Dagster's daemon looks every 5 s; a promise that it has not kept by then is not kept any more: the run has no
# code location, it belongs to a backfill that ended, or the daemon is gone.
LONGEST_PROMISE = 300.0
_CANCELLED = {BulkActionStatus.CANCELING, BulkActionStatus.CANCELED}


def dagster_retries(instance: dg.DagsterInstance, run: dg.DagsterRun, elapsed: Callable[[], float]) -> bool:
    """Return whether Dagster's own run retries act on a failed run, so that recovery stands back.

    Its mark is written a moment after the status. In between, and where an older Dagster wrote none, the answer is
    worked out as Dagster does. A retry that has been launched makes this a run that was gone on with, for ever.

    Args:
        instance: The instance.
        run: The failed run.
        elapsed: Tells the seconds since it failed; asked only where that matters.

    Private: the tags' names, `DagsterInstance.run_retries_enabled`, and the rule of Dagster's retry daemon.
    """
    if dagster_tags.AUTO_RETRY_RUN_ID_TAG in run.tags:
        return True
    marked = run.tags.get(dagster_tags.WILL_RETRY_TAG)
    if marked == "false" or (marked is None and not instance.run_retries_enabled) or elapsed() > LONGEST_PROMISE:
        return False
    if marked is not None:
        return True
    reason = run.tags.get(dagster_tags.RUN_FAILURE_REASON_TAG)
    return bool(auto_reexecution_should_retry_run(instance, run, RunFailureReason(reason) if reason else None))


def take_retries_over(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Tell Dagster's run retries that this run is not theirs any more.

    To be called before its re-execution is launched: Dagster would take no notice of that, and launch another.

    Private: the tag's name, and `DagsterInstance.add_run_tags`.
    """
    if instance.run_retries_enabled or dagster_tags.WILL_RETRY_TAG in run.tags:
        instance.add_run_tags(run.run_id, {dagster_tags.WILL_RETRY_TAG: "false"})


def without_retries(instance: dg.DagsterInstance, parent: dg.DagsterRun) -> dict[str, str]:
    """Return the tags that keep Dagster's run retries off a re-execution: from here on the group is recovery's.

    Empty where nobody would retry it. Private: the tag's name, and `DagsterInstance.run_retries_enabled`.
    """
    wanted = instance.run_retries_enabled or dagster_tags.MAX_RETRIES_TAG in parent.tags
    return {dagster_tags.MAX_RETRIES_TAG: "0"} if wanted else {}


def free_slots(instance: dg.DagsterInstance, run_id: str) -> None:
    """Give back what the steps of a dead run hold of pools, and its places in their queues.

    Dagster frees a slot when its step ends. The steps of a lost run never do, and run monitoring, which would free
    them after `free_slots_after_run_end_seconds`, is off by default: the re-execution would wait for its own parent.

    Private: `DagsterInstance.event_log_storage`.
    """
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        storage.free_concurrency_slots_for_run(run_id)


def why_backfill_is_over(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str | None:
    """Return why the failed run of a backfill is nobody's to recover, in words; None where recovery goes on.

    A user cancelled the backfill, which leaves no trace on runs that had failed before; or launched it anew, and the
    new one computes what this one left.

    Private: `DagsterInstance.get_backfill` and `get_backfills`.
    """
    backfill_id = run.tags.get(dagster_tags.BACKFILL_ID_TAG)
    backfill = instance.get_backfill(backfill_id) if backfill_id else None
    if backfill is None:
        return None
    if backfill.status in _CANCELLED:
        return f"Backfill {backfill_id}, to which it belongs, was cancelled."
    if backfill.status is BulkActionStatus.REQUESTED:
        return None
    anew = BulkActionsFilter(tags={dagster_tags.PARENT_BACKFILL_ID_TAG: backfill.backfill_id})
    found = instance.get_backfills(filters=anew, limit=1)
    return f"Backfill {backfill_id} was launched again as {found[0].backfill_id}." if found else None


def reopen_backfill(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Let the asset backfill of a failed run go on, where Dagster closed it as failed before the run was recovered.

    Dagster's backfill daemon closes a backfill as soon as no run is left, and knows of no recovery that is yet to
    come. Open again, it counts what the re-execution materializes, and requests what lies below. It leaves a closed
    backfill alone, so that nobody else writes this record meanwhile. A backfill of a job is not opened: it ends as
    failed whatever comes after the failed run, as it does after Dagster's own retries.

    Private: `DagsterInstance.get_backfill` and `update_backfill`, as the daemon itself uses them.
    """
    backfill_id = run.tags.get(dagster_tags.BACKFILL_ID_TAG)
    backfill = instance.get_backfill(backfill_id) if backfill_id else None
    if backfill is None or not backfill.is_asset_backfill or backfill.status is not BulkActionStatus.COMPLETED_FAILED:
        return
    instance.update_backfill(backfill._replace(status=BulkActionStatus.REQUESTED, backfill_end_timestamp=None))


def report_materialized(
    instance: dg.DagsterInstance, run: dg.DagsterRun, step_key: str | None, materialization: dg.AssetMaterialization
) -> None:
    """Log a materialization in the name of the run that made it, after its end.

    A backfill counts only what its own runs materialized.

    Private: `DagsterInstance.report_dagster_event` and the class of the event's data.
        (`report_runless_asset_event` is public, and belongs to no run.)
    """
    event = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.ASSET_MATERIALIZATION.value,
        job_name=run.job_name,
        step_key=step_key,
        event_specific_data=StepMaterializationData(materialization),
        message=f"Materialized {materialization.asset_key.to_user_string()}; recorded by the recovery.",
    )
    instance.report_dagster_event(event, run.run_id)
