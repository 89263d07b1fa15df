"""A real Dagster deployment for the demo (daemon, code server, runs in processes of their own), and ways to lose it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import dagster as dg
import psutil

from dagster_resilient import open_store
from dagster_resilient.state.beats import Beat, LiveName, list_beats, read_beat

T = TypeVar("T")

HEARTBEAT_SECONDS = 1.0
TTL_SECONDS = 5.0
_DAGSTER_YAML = "telemetry:\n  enabled: false\n"


class DemoError(Exception):
    """Something that the demo promises did not happen."""


def wait_for(what: str, look: Callable[[], T | None], seconds: float = 120.0) -> T:
    """Look ten times a second until there is something to see.

    Raises:
        DemoError: Nothing was to be seen in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = look()
        if seen is not None:
            return seen
        time.sleep(0.1)
    raise DemoError(f"Waited {seconds:.0f} s in vain for {what}.")


@dataclass
class Cluster:
    """The daemon, its code server and the store, all under one folder.

    Attributes:
        folder: Holds DAGSTER_HOME, the store and the daemon's output.
        module: The code location.
        environment: Added to the environment of all processes.
    """

    folder: Path
    module: str = "example_project.definitions"
    environment: Mapping[str, str] = field(default_factory=dict)
    _daemon: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.home = self.folder / "dagster_home"
        self.home.mkdir(parents=True)
        (self.home / "dagster.yaml").write_text(_DAGSTER_YAML)
        self.url = str(self.folder / "store")
        self.store = open_store(self.url)
        self.instance = dg.DagsterInstance.from_config(str(self.home))
        self.instance.get_runs()  # makes the database now: the daemon and the launcher would race to make it

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the daemon, the code server and the runs."""
        return {
            **os.environ,
            "DAGSTER_HOME": str(self.home),
            "RESILIENT_URL": self.url,
            "RESILIENT_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS),
            "RESILIENT_TTL_SECONDS": str(TTL_SECONDS),
            "RESILIENT_SENSOR_SECONDS": "1",
            **self.environment,
        }

    def __enter__(self) -> Self:
        command = [_tool("dagster-daemon"), "run", "-m", self.module]
        with (self.folder / "daemon.log").open("wb") as log:
            self._daemon = subprocess.Popen(command, env=self.variables, stdout=log, stderr=log)  # noqa: S603 - our own
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left: the daemon and everything below it, stopped processes included."""
        if self._daemon is not None:
            end_tree(tree(self._daemon.pid))
            self._daemon.wait(30)

    def launch(self, job: str, tags: Mapping[str, str], config: str) -> None:
        """Queue a run, as the command line does it; the daemon starts it."""
        command = [_tool("dagster"), "job", "launch", "-m", self.module, "-j", job, "--tags", json.dumps(dict(tags))]
        done = subprocess.run([*command, "--config-json", config], env=self.variables, capture_output=True, check=False)  # noqa: S603 - our own
        if done.returncode != 0:
            raise DemoError(f"Could not launch the job {job}:\n{done.stderr.decode()[-2000:]}")

    def runs(self) -> list[dg.DagsterRun]:
        """All runs, oldest first."""
        return list(reversed(self.instance.get_runs()))

    def run(self, run_id: str) -> dg.DagsterRun:
        """One run as it stands now."""
        found = self.instance.get_run_by_id(run_id)
        if found is None:
            raise DemoError(f"Run {run_id} is gone.")
        return found

    def beats(self, run_id: str) -> list[tuple[LiveName, Beat]]:
        """The last heartbeats of a run's processes."""
        names = [name for name in list_beats(self.store) if name.run_id == run_id]
        return [(name, beat) for name in names if (beat := read_beat(self.store, name.key)) is not None]

    def progress(self, run_id: str, task: str) -> dict[str, float]:
        """What a run's steps last said of a task, empty before they said anything."""
        said = [beat.progress for _, beat in self.beats(run_id) if str(beat.progress.get("task", "")).startswith(task)]
        return said[-1] if said else {}

    def processes(self, run_id: str) -> list[psutil.Process]:
        """The run worker and all below it: steps and their sidecars."""
        workers = [beat.pid for _, beat in self.beats(run_id) if beat.role == "worker"]
        if not workers:
            raise DemoError(f"Run {run_id} has no worker.")
        return tree(workers[0])

    def freeze(self, run_id: str) -> list[psutil.Process]:
        """Stop a run's whole process tree (SIGSTOP), as a machine that hangs; return its processes.

        A process that is stopped inside a write to Dagster's SQLite file would hold its lock, and nobody else could
        record anything. A real deployment keeps its log in a server, which no client can lock up: so the tree is woken
        and stopped again until it holds nothing.
        """

        def frozen() -> list[psutil.Process] | None:
            found = self.processes(run_id)
            signal_all(found, signal.SIGSTOP)
            if not self._locked():
                return found
            signal_all(found, signal.SIGCONT)
            return None

        return wait_for("a moment without a lock on Dagster's database", frozen)

    def _locked(self) -> bool:
        """Whether any of Dagster's databases stays locked for longer than a write takes."""
        try:
            for path in self.home.rglob("*.db"):
                with contextlib.closing(sqlite3.connect(path, timeout=2.0, isolation_level=None)) as database:
                    database.execute("BEGIN IMMEDIATE")
                    database.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
        return False

    def log_tail(self) -> str:
        """The end of the daemon's output, for when something went wrong."""
        return (self.folder / "daemon.log").read_text(errors="replace")[-4000:]


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def end_tree(processes: list[psutil.Process]) -> None:
    """TERM, then KILL after 10 s. A stopped process is woken, or it would never see the TERM."""
    signal_all(processes, signal.SIGTERM)
    signal_all(processes, signal.SIGCONT)
    _, alive = psutil.wait_procs(processes, timeout=10)
    signal_all(alive, signal.SIGKILL)


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
