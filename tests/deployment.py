"""A whole Dagster of its own: webserver, daemon and code locations on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg

T = TypeVar("T")

SETTINGS = """
telemetry: {enabled: false}
nux: {enabled: false}
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config: {dequeue_interval_seconds: 1}
"""
START, END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
LAUNCH = """
mutation($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } }
}
"""


class Deployment:
    """Everything in one folder.

    The code locations find the folder in the variable DEPLOYMENT_FOLDER, and the webserver's address in DEPLOYMENT_URL.

    Attributes:
        folder: The folder.
        url: Of the webserver.
        instance: For what the pages do not show.
    """

    def __init__(self, folder: Path, *locations: Path) -> None:
        self.folder, self._locations = folder, locations
        home = folder / "home"
        home.mkdir()
        (home / "dagster.yaml").write_text(SETTINGS)
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        told = {"DAGSTER_HOME": str(home), "DEPLOYMENT_FOLDER": str(folder), "DEPLOYMENT_URL": self.url}
        self._env = os.environ | told
        self.instance = dg.DagsterInstance.from_config(str(home))
        self._log = folder / "dagster.log"

    def start(self) -> None:
        """Start all, and wait until the webserver answers."""
        files = [argument for location in self._locations for argument in ("-f", str(location))]
        command = [sys.executable, "-m", "dagster", "dev", *files, "-h", "127.0.0.1", "-p"]
        with self._log.open("w") as log:
            self._dev = subprocess.Popen(
                [*command, str(self._port)],
                env=self._env,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.wait(self._answers, "the webserver's answer", 120)

    def _answers(self) -> bool:
        assert self._dev.poll() is None, self._log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{self.url}/server_info", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """End all. Its processes have a session of their own: what does not leave when told is killed with it."""
        self._dev.terminate()
        try:
            self._dev.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._dev.pid, signal.SIGKILL)
            self._dev.wait()
        self.instance.dispose()

    def launch(self, partitions: str, trouble: str, job: str = "everything") -> str:
        """Launch a job over a range of partitions, or over none, as the launchpad does; return the run's id."""
        selector = {
            "repositoryLocationName": self._locations[0].name,
            "repositoryName": "__repository__",
            "jobName": job,
        }
        wanted = ({START: partitions[0], END: partitions[-1]} if partitions else {}) | {"trouble": trouble}
        tags = [{"key": key, "value": value} for key, value in wanted.items()]
        params = {"selector": selector, "runConfigData": {}, "executionMetadata": {"tags": tags}}
        body = json.dumps({"query": LAUNCH, "variables": {"params": params}}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        assert found["data"]["launchRun"]["__typename"] == "LaunchRunSuccess", found
        return str(found["data"]["launchRun"]["run"]["runId"])

    def wait(self, look: Callable[[], T], what: str, seconds: float = 240) -> T:
        """Return the first true answer."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < deadline, f"{what} did not come.\n{self._log.read_text()[-4000:]}"
            time.sleep(0.1)
        return found

    def ended(self, run_id: str) -> dg.DagsterRun:
        """Wait for the end of a run, and return it."""

        def look() -> dg.DagsterRun | None:
            run = self.instance.get_run_by_id(run_id)
            return run if run is not None and run.is_finished else None

        found = self.wait(look, f"the end of run {run_id}")
        assert found is not None
        return found

    def children(self, run_id: str) -> list[str]:
        """The ids of a run's direct re-executions."""
        return [run.run_id for run in self.instance.get_runs() if run.parent_run_id == run_id]

    def computed(self, run_id: str) -> list[str]:
        """What a run computed."""
        found = self.folder / f"computed-{run_id}"
        return found.read_text().splitlines() if found.exists() else []

    def said(self, run_id: str) -> str:
        """All that the run's own log says of it."""
        logs: Any = self.instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        return "\n".join(entry.dagster_event.message or "" for entry in logs)

    def ticks_since(self, seconds: float) -> int:
        """How many ticks of the recovery sensor began after a time and have ended."""
        (state,) = self.instance.all_instigator_state()
        ticks = self.instance.get_ticks(state.instigator_origin_id, state.selector_id, after=seconds)
        return sum(tick.is_completed for tick in ticks)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
