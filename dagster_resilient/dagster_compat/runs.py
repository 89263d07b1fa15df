"""Runs, their groups, and what stands in their log."""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._core.storage import tags as dagster_tags
from dagster._core.storage.runs import SqlRunStorage

from dagster_resilient.errors import ConfigurationError

_CRASH = re.compile(r"was terminated by signal (?P<signal>\d+)|unexpectedly exited with code (?P<code>-?\d+)")
_STEP_STARTS = {dg.DagsterEventType.STEP_START, dg.DagsterEventType.STEP_RESTARTED}
_STEP_ENDS = {
    dg.DagsterEventType.STEP_SUCCESS,
    dg.DagsterEventType.STEP_FAILURE,
    dg.DagsterEventType.STEP_SKIPPED,
    dg.DagsterEventType.STEP_UP_FOR_RETRY,
}


def run_group(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.DagsterRun]:
    """Return a run's root and all re-executions of it, oldest first. A deleted root is left out.

    Private: the name of the root tag. (`get_run_group` raises where the root was deleted, and has no order. The public
    `get_run_records` asks PostgreSQL for the columns of its table at each call.)
    """
    root = run.root_run_id or run.run_id
    found = instance.get_runs(dg.RunsFilter(run_ids=[root]))
    again = instance.get_runs(dg.RunsFilter(tags={dagster_tags.ROOT_RUN_ID_TAG: root}), ascending=True)
    return [*found, *again]


def location_of(run: dg.DagsterRun) -> tuple[str, str]:
    """Return the names of the code location and the repository of a run's job. Private: `remote_job_origin`.

    Raises:
        ConfigurationError: The run was started without a code location.
    """
    if run.remote_job_origin is None:
        raise ConfigurationError(
            f"Run {run.run_id} was started without a code location, so nothing tells where its job is; put the "
            "recovery sensor into the code location that defines the job, or launch the run anew from the UI."
        )
    origin = run.remote_job_origin.repository_origin
    return origin.code_location_origin.location_name, origin.repository_name


def children_of(instance: dg.DagsterInstance, run_ids: Sequence[str]) -> Sequence[dg.DagsterRun]:
    """Return the direct re-executions of some runs. Private: the name of the parent tag."""
    return instance.get_runs(dg.RunsFilter(tags={dagster_tags.PARENT_RUN_ID_TAG: list(run_ids)}))


def cancelled_by_user(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Return whether somebody asked to end the run, also where it then failed or its worker died on the way.

    Private: `DagsterInstance.all_logs` (the public event records cannot be asked for one run).
    """
    if run.status in (dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.CANCELING):
        return True
    asked = dg.DagsterEventType.PIPELINE_CANCELING
    return run.status == dg.DagsterRunStatus.FAILURE and bool(instance.all_logs(run.run_id, of_type=asked))


def materialized_partitions(
    instance: dg.DagsterInstance, run_ids: Iterable[str], asset_key: dg.AssetKey
) -> set[str | None]:
    """Return the partitions of an asset that these runs logged as materialized; None stands for "no partition".

    Private: `DagsterInstance.get_asset_partitions_for_run`, one indexed query per run without event bodies.
    """
    of_type = dg.DagsterEventType.ASSET_MATERIALIZATION
    found = (instance.get_asset_partitions_for_run(run_id, of_type=of_type) for run_id in run_ids)
    return {partition for by_asset in found for partition in by_asset.get(asset_key, ())}


def successful_steps(instance: dg.DagsterInstance, run_id: str) -> set[str]:
    """Return the steps of a run that logged success. Private: `DagsterInstance.all_logs`."""
    logs = instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_SUCCESS)
    return {entry.step_key for entry in logs if entry.step_key is not None}


def step_tries_running(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    """Return the steps that started and have not ended, in order of start. Private: `DagsterInstance.all_logs`."""
    running: dict[str, None] = {}
    for entry in instance.all_logs(run_id, of_type=_STEP_STARTS | _STEP_ENDS):
        if entry.step_key is None:
            continue
        running.pop(entry.step_key, None)
        if entry.dagster_event_type in _STEP_STARTS:
            running[entry.step_key] = None
    return list(running)


@dataclass(frozen=True)
class RecordedError:
    """One error in a run's log.

    Attributes:
        step_key: The step that failed, or None for the run as a whole.
        classes: Names of the error's class and of those behind it, outermost first. Empty for a mere crash.
        message: What was logged.
        exit_code: How the process ended where it crashed: negative for a signal (-9 is SIGKILL, often out of memory).
    """

    step_key: str | None
    classes: tuple[str, ...]
    message: str
    exit_code: int | None = None


def failed_step_errors(instance: dg.DagsterInstance, run_id: str) -> list[RecordedError]:
    """Return the errors of a run's steps and of the run itself, in the order they were logged.

    Private: `DagsterInstance.all_logs`; the wording of crash messages, since no event carries an exit code.
    """
    kinds = {
        dg.DagsterEventType.STEP_FAILURE,
        dg.DagsterEventType.PIPELINE_FAILURE,
        dg.DagsterEventType.ENGINE_EVENT,
    }
    found = [_recorded(entry) for entry in instance.all_logs(run_id, of_type=kinds)]
    return [error for error in found if error is not None]


def failure_error_names(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    """Return the names of all error classes in a run's failures, in the order they were logged. Private: as above."""
    return [name for error in failed_step_errors(instance, run_id) for name in error.classes]


def _recorded(entry: dg.EventLogEntry) -> RecordedError | None:
    event = entry.get_dagster_event()
    crash = _CRASH.search(event.message or "")
    if event.event_type == dg.DagsterEventType.ENGINE_EVENT and crash is None:
        return None
    error = getattr(event.event_specific_data, "error", None)
    message = f"{event.message or ''} {_innermost(error)}".strip()
    return RecordedError(entry.step_key, tuple(_class_names(error)), message, _exit_code(crash))


def _innermost(error: Any) -> str:
    """The message of what was raised first; Dagster's wrappers around it say nothing of the cause."""
    while error is not None and error.cause is not None:
        error = error.cause
    return "" if error is None else str(error.message)


def _class_names(error: Any) -> Iterator[str]:
    """Walk an error, its causes and contexts, as Dagster's serializable copy holds them."""
    pending = deque([error])
    while pending:
        current = pending.popleft()
        if current is not None:
            yield current.cls_name or ""
            pending.extend((current.cause, current.context))


def _exit_code(crash: re.Match[str] | None) -> int | None:
    if crash is None:
        return None
    return -int(crash["signal"]) if crash["signal"] else int(crash["code"])


def instance_id(instance: dg.DagsterInstance) -> str:
    """Return an id that all processes of an instance share, and other instances do not.

    Private: `DagsterInstance.run_storage`, whose id Dagster itself uses to tell instances apart.
    """
    storage = instance.run_storage
    return storage.get_run_storage_id() if isinstance(storage, SqlRunStorage) else "dagster"


def add_run_tags(instance: dg.DagsterInstance, run_id: str, tags: Mapping[str, str]) -> None:
    """Add tags to a run. Private: `DagsterInstance.add_run_tags`; no public call changes the tags of a run."""
    instance.add_run_tags(run_id, dict(tags))


def report_run_failed(instance: dg.DagsterInstance, run: dg.DagsterRun, message: str) -> None:
    """Mark a run as failed. It does not stop the run: a worker that still lives can turn it into a success.

    Private: `DagsterInstance.report_run_failed`, the one way from outside that retries do not take for a cancel.
    """
    instance.report_run_failed(run, message)
