"""A code location whose steps are killed, executed by Dagster's command line, and the recovery that looks at it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._grpc.types import ExecuteRunArgs
from recovery_world import JOB, World, eventually

from dagster_resilient import ResilientResource

LOCATION = """
import json, os, signal
import dagster as dg
from dagster_resilient import EverySteps, ResilientIOManager, ResilientResource, resilient_executor
from dagster_resilient.io_managers import resilient as manager

HERE = os.path.dirname(os.path.abspath(__file__))
MODE = os.environ.get("TEST_MODE")
real = manager.store_value

def die(*processes):
    for process in processes:
        os.kill(process, signal.SIGKILL)

def store_value(durable, value):
    # The run worker and the step in one moment: what a lost machine looks like.
    if MODE == "lost in handle_output" and durable.asset == ("second",):
        die(os.getppid(), os.getpid())
    return real(durable, value)

manager.store_value = store_value
letters = dg.StaticPartitionsDefinition(["a", "b"])

@dg.asset(partitions_def=letters, code_version="1")
def first() -> int:
    return 1

@dg.asset(partitions_def=letters, code_version="1")
def second(first: int) -> int:
    if MODE == "lost in compute":
        die(os.getppid(), os.getpid())
    return first + 1

@dg.asset(code_version="1")
def trained(context, resilient: ResilientResource) -> int:
    with resilient.task(context).training(save=EverySteps(2)) as session:
        with open(os.path.join(HERE, "told"), "a") as file:
            file.write(json.dumps([context.run.run_id, session.resumed_from]) + "\\n")
        for step in session.steps(10):
            session.user["sum"] = session.user.get("sum", 0) + step
            if step == 7 and MODE == "child dies":
                die(os.getpid())
    return session.user["sum"]

resilient = ResilientResource(url=dg.EnvVar("TEST_STORE"), heartbeat_seconds=0.5, ttl_seconds=2)
defs = dg.Definitions(
    assets=[first, second, trained], executor=resilient_executor,
    resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
    jobs=[dg.define_asset_job("everything", selection=["first", "second"]),
          dg.define_asset_job("training", selection=["trained"])],
)
"""


class Place:
    """A code location, an instance and a store in one folder.

    Attributes:
        world: The recovery that looks at it.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.url = folder, str(folder / "store")
        (folder / "home").mkdir()
        (folder / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        (folder / "pipeline.py").write_text(LOCATION)
        self.instance = dg.DagsterInstance.from_config(str(folder / "home"))
        monkeypatch.setenv("TEST_STORE", self.url)
        self.world = World(self.instance, self.url)
        self.world.resource = ResilientResource(url=self.url, heartbeat_seconds=0.5, ttl_seconds=2)
        self.world.repository = self._load().get_repository_def()

    def _load(self) -> Any:
        spec = importlib.util.spec_from_file_location("pipeline_of_a_case", self.folder / "pipeline.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.defs

    def _call(self, mode: str, *arguments: str) -> None:
        """Call Dagster's command line. The process is the run worker."""
        env = os.environ | {"DAGSTER_HOME": str(self.folder / "home"), "TEST_MODE": mode}
        command = [sys.executable, "-m", "dagster", *arguments]
        subprocess.run(command, env=env, cwd=self.folder, capture_output=True, check=False, timeout=120)

    def execute(self, mode: str, job: str = JOB, **tags: str) -> dg.DagsterRun:
        """Execute the job as `dagster job execute` does, and return its run."""
        self._call(mode, "job", "execute", "-f", "pipeline.py", "-j", job, "--tags", json.dumps(tags))
        return self.instance.get_runs(limit=1)[0]

    def launch(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """Execute a queued run as the daemon does; return it as it ended."""
        assert run.job_code_origin is not None
        arguments = ExecuteRunArgs(run.job_code_origin, run.run_id, self.instance.get_ref()).get_command_args()
        starting = dg.DagsterEvent(event_type_value=dg.DagsterEventType.PIPELINE_STARTING.value, job_name=run.job_name)
        self.instance.report_dagster_event(starting, run.run_id)
        self._call("", *arguments[arguments.index("api") :])
        return self.world.now(run)

    def ticks_until_relaunched(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """Let the sensor look until the run has a re-execution, and twice more; return the one there is."""
        eventually(lambda: self.world.tick() and self.world.children(run))
        for _ in range(2):
            self.world.tick()
        return self.world.only_child(run)

    def told(self) -> list[list[Any]]:
        """Return what each try of the training has written down: its run, and where it went on."""
        return [json.loads(line) for line in (self.folder / "told").read_text().splitlines()]
