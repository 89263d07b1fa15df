"""Where briefs come from: the definitions of a code location, or what the run worker stored at the run's start."""

import logging
from collections.abc import Callable
from typing import Protocol

import dagster as dg

from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import ConfigurationError, ResilientError
from dagster_resilient.io_managers import ResilientIOManager
from dagster_resilient.recovery.brief import AssetBrief, PartitionList, RunBrief
from dagster_resilient.state.store import RecordStore
from dagster_resilient.storage import keys

MANAGED_TAG = "resilient/managed"
_LONGEST_CHAIN = 1000

_log = logging.getLogger(__name__)


class Briefs(Protocol):
    """Tells what a run is to compute."""

    def __call__(self, run: dg.DagsterRun) -> RunBrief | None:
        """Return the brief of a run, or None where nobody knows it.

        Raises:
            ConfigurationError: The code has changed so that it lacks what the run names.
        """


class LiveBriefs:
    """Briefs from the definitions as they stand now. What changed since a run began is thereby noticed."""

    def __init__(self, repository_def: dg.RepositoryDefinition, instance: dg.DagsterInstance) -> None:
        self._repository, self._instance = repository_def, instance
        self._known: dict[str, RunBrief] = {}

    def __call__(self, run: dg.DagsterRun) -> RunBrief:
        """Return the brief of a run."""
        if run.run_id not in self._known:
            self._known[run.run_id] = compat.brief_of(self._repository, run, self._instance, ResilientIOManager)
        return self._known[run.run_id]


class StoredBriefs:
    """Briefs as run workers stored them: for a place where the user's code cannot be imported."""

    def __init__(self, records: RecordStore, get_run: Callable[[str], dg.DagsterRun | None]) -> None:
        self._records, self._get_run = records, get_run
        self._known: dict[str, RunBrief | None] = {}

    def __call__(self, run: dg.DagsterRun) -> RunBrief | None:
        """Return the brief of a run; of one that never began, that of its parent cut down to what the run selects."""
        if run.run_id not in self._known:
            self._known[run.run_id] = self._find(run)
        return self._known[run.run_id]

    def _find(self, run: dg.DagsterRun) -> RunBrief | None:
        asked: dg.DagsterRun | None = run
        for _ in range(_LONGEST_CHAIN):
            if asked is None:
                return None
            found: RunBrief | None = self._records.get(keys.brief_key(asked.run_id), RunBrief)
            if found is not None:
                return found if asked is run else cut_down(found, run)
            asked = None if asked.parent_run_id is None else self._get_run(asked.parent_run_id)
        return None


def cut_down(brief: RunBrief, run: dg.DagsterRun) -> RunBrief:
    """Return a brief cut down to the assets, steps, checks and partitions that a re-execution selects."""

    def is_selected(asset: AssetBrief) -> bool:
        by_key = run.asset_selection is None or dg.AssetKey(list(asset.key)) in run.asset_selection
        return by_key and (run.step_keys_to_execute is None or asset.step_key in run.step_keys_to_execute)

    wanted = compat.partition_bounds(run)
    lists = tuple(_between(partitions, wanted) for partitions in brief.partitions)
    assets = tuple(asset for asset in brief.assets if is_selected(asset))
    kept = {asset.key for asset in assets}
    checks = tuple(check for check in brief.checks if check.asset in kept)
    return brief.model_copy(update={"run_id": run.run_id, "assets": assets, "checks": checks, "partitions": lists})


def _between(partitions: PartitionList, wanted: tuple[str, str] | None) -> PartitionList:
    every = partitions.all
    if wanted is None or wanted[0] not in every or wanted[1] not in every:
        return partitions
    first, last = every.index(wanted[0]), every.index(wanted[1])
    return PartitionList.of(list(every[first : last + 1]), partitions.dimensions)


def store_brief(
    records: RecordStore, run: dg.DagsterRun, instance: dg.DagsterInstance, make: Callable[[], RunBrief]
) -> None:
    """Store what a run is to compute, and mark the run as ours. Recovery can do without: a failure is told, once.

    A worker that run monitoring started anew finds the brief there, and leaves it.
    """
    try:
        compat.add_run_tags(instance, run.run_id, {MANAGED_TAG: "true"})
        records.create(keys.brief_key(run.run_id), make())
    except (ResilientError, ConfigurationError, dg.DagsterError) as error:
        _log.warning("What run %s is to compute could not be stored (%s); it goes on.", run.run_id, error)
