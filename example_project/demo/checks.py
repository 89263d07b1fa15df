"""What the demo promises, checked against the store's own history and Dagster's instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import dagster as dg

from dagster_resilient.errors import ResilientError
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import Entry
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import get_object, read_manifest
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.values import find_value
from example_project.demo.cluster import DemoError


def history(store: ObjectStore, asset: str, partition: str | None = None) -> list[Entry]:
    """Return the log of an asset partition, oldest entry first."""
    return NumberedLog(ObjectRecords(store), keys.task_prefix((asset,), partition, "log")).history()


def committed(store: ObjectStore, asset: str, partitions: Iterable[str]) -> list[str]:
    """Return the partitions that have a committed value."""
    return [key for key in partitions if any(entry.kind == "value" for entry in history(store, asset, key))]


def committers(store: ObjectStore, asset: str, partitions: Sequence[str]) -> Counter[str]:
    """Return how many partitions each run committed, after checking that each was committed exactly once.

    Raises:
        DemoError: A partition was committed twice, or never.
    """
    runs: Counter[str] = Counter()
    for key in partitions:
        values = [entry.value.run_id for entry in history(store, asset, key) if entry.kind == "value" and entry.value]
        if len(values) != 1:
            raise DemoError(f"{asset}[{key}] was committed {len(values)} times; once was promised.")
        runs[values[0]] += 1
    return runs


def last_checkpoint(store: ObjectStore, asset: str) -> int:
    """Return the newest committed training step, 0 where there is none."""
    entries = history(store, asset)
    return entries[-1].checkpoints[-1].step if entries and entries[-1].checkpoints else 0


def first_step_of_generation(store: ObjectStore, asset: str, generation: int) -> int | None:
    """Return the first step that a generation committed, None before it did."""
    for entry in history(store, asset):
        if entry.generation == generation and entry.kind in {"checkpoint", "complete"} and entry.checkpoints:
            return entry.checkpoints[-1].step
    return None


def same_bytes(left: ObjectStore, right: ObjectStore, asset: str, partitions: Iterable[str | None]) -> int:
    """Compare the objects of two stores' values, bit for bit; return how many bytes were compared.

    Raises:
        DemoError: They differ, or one of them is missing or damaged.
    """
    compared = 0
    for partition in partitions:
        try:
            mine, theirs = _objects(left, asset, partition), _objects(right, asset, partition)
        except ResilientError as error:
            raise DemoError(str(error)) from error
        if mine != theirs:
            raise DemoError(f"{asset}[{partition or ''}] differs from the uninterrupted run's.")
        compared += sum(len(raw) for raw in mine.values())
    return compared


def _objects(store: ObjectStore, asset: str, partition: str | None) -> dict[str, bytes]:
    manifest = read_manifest(store, find_value(store, (asset,), partition).manifest)
    return {role: get_object(store, stored) for role, stored in manifest.objects.items()}


def recovery_event(instance: dg.DagsterInstance, run_id: str) -> str | None:
    """Return what the recovery wrote into a run's log."""
    events = instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    messages = (entry.dagster_event.message or "" for entry in events if entry.dagster_event)
    return next((message for message in messages if message.startswith("Recovery:")), None)


def step_errors(instance: dg.DagsterInstance, run_id: str) -> str:
    """Return the errors of a run's failed steps as text."""
    failures = instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    return "\n".join(str(entry.dagster_event.event_specific_data) for entry in failures if entry.dagster_event)
