"""Runs that were told to leave, as they say themselves: one small record, made just before the process ends.

Dagster's log says it too, by the name of the error. The record is for the process whose machine goes away before that
is logged: it would look lost, or crashed.
"""

from __future__ import annotations

import logging
import uuid

import pydantic

from dagster_resilient.errors import StorageError
from dagster_resilient.state.store import RecordStore
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Record
from dagster_resilient.storage.retry import hasty

log = logging.getLogger(__name__)

# The machine is about to go: what the record tells is nearly always in Dagster's log as well.
_PATIENCE = 5.0


class Preemption(Record):
    """That a run was told to leave. Created once; the first task of the run that says so stands.

    Attributes:
        run_id: The run.
        task: What was interrupted.
        signal: By which signal.
        host: The machine that was to be left.
    """

    run_id: str
    task: str
    signal: str
    host: str
    op: str = pydantic.Field(default_factory=lambda: uuid.uuid4().hex)


def _key(run_id: str) -> str:
    return f"preempted/{keys.encode_segment(run_id)}.json"


def mark_preempted(records: RecordStore, run_id: str, *, task: str, signal: str, host: str) -> None:
    """Record that a run was told to leave. Never raises: it is a courtesy to whoever judges the run."""
    record = Preemption(run_id=run_id, task=task, signal=signal, host=host)
    try:
        hasty(records, _PATIENCE).create(_key(run_id), record)
    except StorageError as error:
        log.warning("That run %s was told to leave could not be recorded: %s", run_id, error)


def read_preemption(records: RecordStore, run_id: str) -> Preemption | None:
    """Return what a run said of being told to leave, or None where it said nothing."""
    return records.get(_key(run_id), Preemption)
