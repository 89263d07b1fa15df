"""Which runs a recovery sensor looks after: only such as keep a heartbeat, which `resilient_executor` sees to."""

from collections.abc import Collection
from typing import Any, Protocol

import dagster as dg

from dagster_resilient import dagster_compat as compat
from dagster_resilient.briefs import MANAGED_TAG

EXECUTOR_NAME = "resilient"


class Scope(Protocol):
    """Tells which runs are looked after."""

    def holds(self, run: dg.DagsterRun) -> bool:
        """Whether a run is."""


class OwnRuns:
    """The runs of the sensor's own code location whose job has our executor."""

    def __init__(self, context: dg.SensorEvaluationContext) -> None:
        self._context = context
        self._repository: Any = context.repository_def

    def holds(self, run: dg.DagsterRun) -> bool:
        """Whether a run is looked after. `belongs_to` comes first: it knows the job."""
        return (
            compat.belongs_to(self._context, run)
            and compat.job_executor_name(self._repository, run.job_name) == EXECUTOR_NAME
        )


class ManagedRuns:
    """The runs that our executor has marked as its own, of any code location or of some.

    A run that never began bears no mark: it is looked after where another run of its job does.

    Args:
        instance: The instance that holds the runs.
        locations: Names of the code locations; None: all.
    """

    def __init__(self, instance: dg.DagsterInstance, locations: Collection[str] | None = None) -> None:
        self._instance, self._locations = instance, locations
        self._jobs: dict[tuple[str, str, str], bool] = {}

    def holds(self, run: dg.DagsterRun) -> bool:
        """Whether a run is looked after."""
        if run.remote_job_origin is None:
            return False  # it could be planned, but nothing says where its job is
        location, repository = compat.location_of(run)
        if self._locations is not None and location not in self._locations:
            return False
        return MANAGED_TAG in run.tags or self._is_managed_job(location, repository, run.job_name)

    def _is_managed_job(self, location: str, repository: str, job_name: str) -> bool:
        key = location, repository, job_name
        if key not in self._jobs:
            marked = dg.RunsFilter(job_name=job_name, tags={MANAGED_TAG: "true"})
            found = self._instance.get_runs(marked, limit=20)
            self._jobs[key] = any(run.remote_job_origin and compat.location_of(run) == key[:2] for run in found)
        return self._jobs[key]
