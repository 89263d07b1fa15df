"""A peer of `benchmarks.resume`: Dagster's own launcher, made able to tell whether a worker lives.

Dagster's launchers for Kubernetes, Docker and ECS can ask their platform; the one for processes cannot ask. This one
looks for the process, which is as fast as can be, and possible on one machine only.
"""

import re

import dagster as dg
import psutil
from dagster._core.launcher import CheckRunHealthResult, DefaultRunLauncher, WorkerStatus

_STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")


class WatchedRunLauncher(DefaultRunLauncher):
    """See the module."""

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Whether run monitoring may ask."""
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Say whether the process of a run's worker exists. Before it has told its number, it starts."""
        events = self._instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        told = [_STARTED.search(entry.message or entry.user_message) for entry in events]
        pids = [int(found[1]) for found in told if found]
        alive = not pids or _lives(pids[-1])
        return CheckRunHealthResult(WorkerStatus.RUNNING if alive else WorkerStatus.FAILED)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
