"""A Dagster deployment of real processes for `benchmarks.resume`: code server, daemon, runs, and `kill -9` for them.

The daemon is Dagster's own, with its own loops. Code server and daemon are started again at once when they are killed,
as a supervisor does; the daemon waits for the code server, as services that depend on each other are started.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import dagster as dg
import psutil
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster_graphql.cli import execute_query
from dagster_graphql.client.query import LAUNCH_PIPELINE_EXECUTION_MUTATION

T = TypeVar("T")

HERE = Path(__file__).parent
LOCATION, JOB = "resume", "training"
_SECONDS = 240.0
_ENDED = 20.0


class Step(NamedTuple):
    """A training step that was done.

    Attributes:
        run_id: By which run.
        number: Its number.
        at: When it was done, by this machine's clock.
    """

    run_id: str
    number: int
    at: float


@dataclass(frozen=True)
class Setting:
    """How a deployment is set up.

    Attributes:
        code: ``ours``, or ``by hand`` for plain Dagster.
        dagster: The content of ``dagster.yaml``, beyond what all have.
        environment: Variables for all its processes.
    """

    code: str
    dagster: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def wait(what: str, look: Callable[[], T | None], seconds: float = _SECONDS) -> T:
    """Look twenty times a second until there is something to see.

    Raises:
        TimeoutError: Nothing was to be seen in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = look()
        if seen is not None:
            return seen
        time.sleep(0.05)
    raise TimeoutError(f"Waited {seconds:g} s in vain for {what}.")


class Deployment(contextlib.AbstractContextManager["Deployment"]):
    """All under one folder; see the module."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self._folder, self._home, self._workspace = folder, folder / "home", folder / "workspace.yaml"
        self._home.mkdir(parents=True)
        told = {"telemetry": {"enabled": False}, **setting.dagster}
        (self._home / "dagster.yaml").write_text(json.dumps(told))
        self._port = _free_port()
        place = {"host": "127.0.0.1", "port": self._port, "location_name": LOCATION}
        self._workspace.write_text(json.dumps({"load_from": [{"grpc_server": place}]}))
        self._variables = {
            **os.environ,
            "DAGSTER_HOME": str(self._home),
            "RESUME_FOLDER": str(folder),
            "RESUME_CODE": setting.code,
            "PYTHONPATH": str(HERE.parent),
            **setting.environment,
        }
        self._server: subprocess.Popen[bytes] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self.instance = dg.DagsterInstance.from_config(str(self._home))
        self.instance.get_runs()  # makes the database now: the processes would race to make it

    # ---- processes

    def __exit__(self, *_: object) -> None:
        left = self._all()
        _kill(left)
        psutil.wait_procs(left, timeout=_ENDED)
        for process in (self._server, self._daemon):
            if process is not None:
                process.wait(_ENDED)
        self.instance.dispose()

    def start(self) -> None:
        """Start code server and daemon, in this order. Leaving the block ends them and all their runs."""
        where = ("--host", "127.0.0.1", "--port", str(self._port), "-m", "benchmarks.resume_pipeline")
        self._server = self._process("server", "dagster", "api", "grpc", *where)
        wait("the code server", self._serves)
        self._daemon = self._process("daemon", "dagster._daemon", "run", "-w", str(self._workspace))

    def _process(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *arguments]
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, env=self._variables, cwd=self._folder, stdout=log, stderr=log)

    def _serves(self) -> bool | None:
        """It listens once its code is loaded."""
        if self._server is None or self._server.poll() is not None:
            raise RuntimeError(f"The code server ended: {self.log()}")
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self._port)) == 0 or None

    def log(self) -> str:
        """The ends of what daemon and code server wrote."""
        files = self._folder.glob("*.log")
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def _all(self) -> list[psutil.Process]:
        """The processes with this home in their environment, sidecars included: nothing else can have it."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DAGSTER_HOME") == str(self._home) and process.pid != os.getpid():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def kill_run(self) -> float:
        """Kill the run: worker, steps, sidecars. Return when, by this machine's clock."""
        kept = {process.pid for process in (self._server, self._daemon) if process is not None}
        victims = [one for one in self._all() if one.pid not in kept and not _tracks_resources(one)]
        at = time.time()
        _kill(victims)
        return at

    def kill_everything(self) -> float:
        """Kill the run, the daemon and the code server, and start the last two again. Return when it was killed.

        The code server goes first: it reports a worker whose end it sees.
        """
        first = self._server.pid if self._server is not None else 0
        victims = sorted(self._all(), key=lambda one: one.pid != first)
        at = time.time()
        _kill(victims)
        for process in (self._server, self._daemon):
            if process is not None:
                process.wait(_ENDED)
        self.start()
        return at

    # ---- runs

    def launch(self) -> str:
        """Queue a training, as the UI does; return the run's id."""
        selector = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__", "jobName": JOB}
        wanted = {"selector": selector, "runConfigData": {}, "mode": "default"}
        target = WorkspaceFileTarget([str(self._workspace)])
        with WorkspaceProcessContext(self.instance, target) as context:
            done = execute_query(context, LAUNCH_PIPELINE_EXECUTION_MUTATION, {"executionParams": wanted})
        try:
            return str(done["data"]["launchPipelineExecution"]["run"]["runId"])
        except (KeyError, TypeError) as error:
            raise RuntimeError(f"The training could not be launched: {done}") from error

    def steps(self, root: str) -> list[Step]:
        """The steps that a run and its re-executions have done."""
        file = self._folder / f"steps-{root}"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = (line.split() for line in lines if line.endswith("\n"))
        return [Step(run_id, int(number), float(at)) for run_id, number, at in whole]

    def enough(self, root: str) -> None:
        """Let a run and its re-executions end, and wait for it."""
        (self._folder / f"enough-{root}").touch()
        wait("the end of the recovered run", lambda: self._newest(root).is_finished or None)

    def _newest(self, root: str) -> dg.DagsterRun:
        return max(self._group(root), key=lambda record: record.storage_id).dagster_run

    def _group(self, root: str) -> list[dg.RunRecord]:
        again = self.instance.get_run_records(dg.RunsFilter(tags={"dagster/root_run_id": root}))
        return [*self.instance.get_run_records(dg.RunsFilter(run_ids=[root])), *again]

    def when(self, run_id: str, kind: dg.DagsterEventType) -> float:
        """When something first happened to a run, by this machine's clock."""
        entries = self.instance.all_logs(run_id, of_type=kind)
        return min((entry.timestamp for entry in entries), default=float("nan"))


def _tracks_resources(process: psutil.Process) -> bool:
    """Whether it is the helper that multiprocessing keeps beside the code server: it is no part of the run."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def _free_port() -> int:
    """It lies below those that Linux takes for outgoing connections: a server that is killed gets its port back."""
    for port in random.SystemRandom().sample(range(11_000, 22_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("No free port was found in 100 tries.")
