"""A deployment whose parts can be killed one by one: a code server of its own, a daemon, run workers, steps.

The code server is a process that something else starts again (Kubernetes, systemd; here `revive`), reached through a
workspace file, as in most deployments. The rest comes from the demo's cluster.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import dagster as dg
import psutil
import servers
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster_graphql.cli import execute_query
from dagster_graphql.client.query import LAUNCH_PARTITION_BACKFILL_MUTATION, LAUNCH_PIPELINE_EXECUTION_MUTATION

from example_project.demo.cluster import Cluster, signal_all, tree, wait_for

HERE = Path(__file__).parent
REPOSITORY = {"repositoryLocationName": "chaos", "repositoryName": "__repository__"}
# The limit of the promise: no step outlives its run worker by more.
ORPHAN_SECONDS = 15.0
_SETTINGS = """
telemetry: {enabled: false}
concurrency: {runs: {max_concurrent_runs: 12}}
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config: {dequeue_interval_seconds: 1}
"""
# By default a backfill ends as FAILED where the daemon reloads its workspace while the code server is away; and its six
# tries in a row are soon over where the daemon comes around every second.
_PATIENT_BACKFILLS = {"DAGSTER_BACKFILL_RETRY_DEFINITION_CHANGED_ERROR": "1", "DAGSTER_MAX_BACKFILL_RETRIES": "300"}


class Line(NamedTuple):
    """A computation that began."""

    asset: str
    partition: str
    pid: int
    run_id: str

    @property
    def pair(self) -> tuple[str, str]:
        """Asset and partition."""
        return self.asset, self.partition


@dataclass
class ChaosCluster(Cluster):
    """See the module.

    Attributes:
        size: How many partitions the long ranges have.
    """

    size: int = 20
    _server: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _ups: Iterator[int] = field(default_factory=itertools.count, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.port = servers.free_ports(1)
        (self.home / "dagster.yaml").write_text(_SETTINGS)
        self.workspace = self.folder / "workspace.yaml"
        place = {"host": "127.0.0.1", "port": self.port, "location_name": "chaos"}
        self.workspace.write_text(json.dumps({"load_from": [{"grpc_server": place}]}))
        here = {"CHAOS_FOLDER": str(self.folder), "CHAOS_SIZE": str(self.size), "PYTHONPATH": str(HERE)}
        self.environment = here | _PATIENT_BACKFILLS

    # ---- processes

    def __enter__(self) -> Self:
        self.revive()
        return self

    def __exit__(self, *_: object) -> None:
        """End all that was started here and below it, also what has lost its parent since."""
        left = self._everything()
        signal_all(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=20)
        for process in (self._daemon, self._server):
            if process is not None:
                process.wait(20)
        self.instance.dispose()

    def _everything(self) -> list[psutil.Process]:
        """The processes with this cluster's home in their environment: nothing else can have it."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DAGSTER_HOME") == str(self.home) and process.pid != os.getpid():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def revive(self) -> None:
        """Start the code server and the daemon where they do not run, and wait until the code is loaded."""
        with self._lock:
            wait_for("the code server", self._is_serving)
            if self._daemon is None or self._daemon.poll() is not None:
                self._daemon = self._start("daemon", HERE / "fast_daemon.py", "run", "-w", self.workspace)

    def _start(self, name: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, *map(str, arguments)]
        with (self.folder / f"{name}-{next(self._ups)}.log").open("wb") as log:
            return subprocess.Popen(command, env=self.variables, cwd=self.folder, stdout=log, stderr=log)

    def _is_serving(self) -> bool | None:
        """Start one where none is. It listens once its code is loaded, and ends where that fails.

        While it loads, another story may kill it again.
        """
        if self._server is None or self._server.poll() == -signal.SIGKILL:
            where = ("--host", "127.0.0.1", "--port", str(self.port))
            self._server = self._start("server", "-m", "dagster", "api", "grpc", "-f", HERE / "pipeline.py", *where)
        assert self._server.poll() is None, self.logs()
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0 or None

    def code_server(self) -> list[psutil.Process]:
        """The code server alone: what runs below it goes on without it."""
        return _alive([self._server.pid if self._server else 0])

    def daemon(self) -> list[psutil.Process]:
        """The daemon."""
        return _alive([self._daemon.pid if self._daemon else 0])

    def worker(self, run_id: str) -> psutil.Process | None:
        """The worker of a run, once its heartbeat tells of it, while it lives."""
        return next(iter(self._of_role(run_id, "worker")), None)

    def steps(self, run_id: str) -> list[psutil.Process]:
        """The living steps of a run whose heartbeat tells of them."""
        return self._of_role(run_id, "step")

    def _of_role(self, run_id: str, role: str) -> list[psutil.Process]:
        return _alive([beat.pid for _, beat in self.beats(run_id) if beat.role == role])

    # ---- runs

    @contextmanager
    def client(self) -> Iterator["Client"]:
        """Connect as the UI does."""
        with WorkspaceProcessContext(self.instance, WorkspaceFileTarget([str(self.workspace)])) as context:
            yield Client(context)

    def group(self, story: str) -> list[dg.DagsterRun]:
        """The runs of a story, oldest first."""
        return list(reversed(self.instance.get_runs(dg.RunsFilter(tags={"chaos/story": story}))))

    def journal(self, story: str) -> list[Line]:
        """What was computed for a story, in order."""
        path = self.folder / f"journal-{story}"
        if not path.exists():
            return []
        lines = (line.split() for line in path.read_text().splitlines())
        return [Line(asset, partition, int(pid), run_id) for asset, partition, pid, run_id in lines]

    def open_gate(self, story: str) -> None:
        """Let the computations of a story that wait go on."""
        (self.folder / f"gate-{story}").touch()

    def logs(self) -> str:
        """The ends of what the newest daemon and code server wrote, for when something went wrong."""
        files = sorted(self.folder.glob("*-*.log"), key=lambda file: file.stat().st_mtime)[-3:]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


class Client:
    """Launches through GraphQL, as the UI does."""

    def __init__(self, context: WorkspaceProcessContext) -> None:
        self._context = context

    def launch(self, job: str, tags: Mapping[str, str]) -> str:
        """Queue a run; return its id."""
        parameters = {
            "selector": REPOSITORY | {"jobName": job},
            "executionMetadata": {"tags": _listed(tags)},
            "runConfigData": {},
            "mode": "default",
        }
        done = self._ask(LAUNCH_PIPELINE_EXECUTION_MUTATION, "executionParams", parameters)
        return str(done["launchPipelineExecution"]["run"]["runId"])

    def backfill(self, asset: str, partitions: Sequence[str], tags: Mapping[str, str]) -> str:
        """Request a backfill of an asset; return its id."""
        parameters = {
            "assetSelection": [{"path": [asset]}],
            "partitionNames": list(partitions),
            "tags": _listed(tags),
            "fromFailure": False,
        }
        done = self._ask(LAUNCH_PARTITION_BACKFILL_MUTATION, "backfillParams", parameters)
        return str(done["launchPartitionBackfill"]["backfillId"])

    def _ask(self, mutation: str, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        done = execute_query(self._context, mutation, {name: parameters})
        assert "errors" not in done, done
        answer: dict[str, Any] = done["data"]
        assert "Success" in next(iter(answer.values()))["__typename"], answer
        return answer


def _listed(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in tags.items()]


def _alive(pids: Iterable[int]) -> list[psutil.Process]:
    """Return those that run; one that is dead and not waited for does not.

    The first thread of a killed process may be dead before the others are, which still hold its ports.
    """
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def survivors(processes: Sequence[psutil.Process], seconds: float = ORPHAN_SECONDS) -> list[str]:
    """Return those that have not ended by themselves in time, in words."""
    deadline = time.monotonic() + seconds
    pids = [one.pid for one in processes]
    while (left := _alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [_words(one) for one in left]


def _words(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}, {process.cpu_times().user} s): {process.cmdline()}"[:300]
    except psutil.NoSuchProcess:
        return f"{process.pid}, which ended just now"


def kill(*processes: psutil.Process) -> None:
    """Kill -9, all at once, and wait until it has happened."""
    signal_all(list(processes), signal.SIGKILL)
    assert survivors(processes) == []


__all__ = ["ChaosCluster", "Client", "Line", "kill", "signal_all", "survivors", "tree", "wait_for"]
