"""A launcher that starts nothing, and says of each worker what the test wants. It resumes runs, as Dagster's do."""

from typing import Any, ClassVar

import dagster as dg
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
from dagster._core.test_utils import MockedRunLauncher


class Launcher(MockedRunLauncher):
    """The test's own process plays the worker.

    Attributes:
        dead: Runs whose worker it reports as gone.
        resumed: Runs that it was asked to resume.
    """

    dead: ClassVar[set[str]] = set()
    resumed: ClassVar[list[str]] = []
    supports_check_run_worker_health = True
    supports_resume_run = True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Say that a worker runs, unless the test says otherwise."""
        return CheckRunHealthResult(WorkerStatus.UNKNOWN if run.run_id in self.dead else WorkerStatus.RUNNING)

    def resume_run(self, context: Any) -> None:
        """Note down the run."""
        self.resumed.append(context.dagster_run.run_id)

    def terminate(self, run_id: str) -> bool:
        """Say that nothing ran."""
        return False
