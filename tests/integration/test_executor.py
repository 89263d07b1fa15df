"""`resilient_executor` in real run workers with real step processes, killed and resumed."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._grpc.types import ExecuteRunArgs, ResumeRunArgs

from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.executor import named_run_worker, resilient_executor
from dagster_resilient.io_managers import ResilientIOManager
from dagster_resilient.resources import RUN_WORKER_ENV, ResilientResource
from dagster_resilient.state.beats import list_beats
from dagster_resilient.state.owner import start_ticks
from dagster_resilient.storage.object_store import open_store

LOCATION = """
import json, os, signal
import dagster as dg
from dagster_resilient.executor import resilient_executor
from dagster_resilient.io_managers import ResilientIOManager
from dagster_resilient.resources import RUN_WORKER_ENV, ResilientResource
from dagster_resilient.state.beats import list_beats
from dagster_resilient.state.owner import start_ticks
from dagster_resilient.storage.object_store import open_store

HERE = os.path.dirname(os.path.abspath(__file__))

def tell(context, **facts):
    name = os.path.join(HERE, f"{context.op.name}-{context.run.run_id}")
    with open(name, "a") as file:
        file.write(json.dumps(facts) + "\\n")

@dg.asset
def first(context) -> int:
    store = open_store(os.environ["TEST_STORE"])
    parent = os.getppid()
    tell(context, worker=os.environ.get(RUN_WORKER_ENV), parent=f"{parent}:{start_ticks(parent)}",
         beats=[beat.role for beat in list_beats(store) if beat.run_id == context.run.run_id])
    return 1

@dg.asset
def second(context, first: int) -> int:
    tell(context, pid=os.getpid(), worker=os.getppid())
    mode = context.run.tags.get("mode")
    if mode == "fail":
        raise ValueError("on purpose")
    if mode == "die with the worker" and not os.path.exists(os.path.join(HERE, "died")):
        open(os.path.join(HERE, "died"), "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return first + 1

@dg.asset
def third(context, second: int) -> int:
    tell(context, value=second)
    return second + 1

# Nested only, and its url is an environment variable: the hardest place to find it in.
nested = ResilientIOManager(resilient=ResilientResource(url=dg.EnvVar("TEST_STORE")))
defs = dg.Definitions(
    assets=[first, second, third], executor=resilient_executor, resources={"io_manager": nested},
    jobs=[dg.define_asset_job("everything")],
)
"""


class Place:
    """A code location, an instance and a store in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "home").mkdir()
        (folder / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        (folder / "pipeline.py").write_text(LOCATION)
        self.url = str(folder / "store")
        self.instance = dg.DagsterInstance.from_config(str(folder / "home"))

    def call(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Call Dagster's command line. The process is the run worker."""
        return subprocess.run(
            [sys.executable, "-m", "dagster", *arguments],
            env=os.environ | {"DAGSTER_HOME": str(self.folder / "home"), "TEST_STORE": self.url} | env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def execute(self, config: Any = None, url: str | None = None, **tags: str) -> dg.DagsterRun:
        """Execute the job as `dagster job execute` does, and return its run."""
        settings = self.folder / f"{uuid.uuid4()}.yaml"
        settings.write_text(json.dumps(config or {}))
        arguments = ("-f", "pipeline.py", "-j", "everything", "--tags", json.dumps(tags), "-c", str(settings))
        done = self.call("job", "execute", *arguments, **({} if url is None else {"TEST_STORE": url}))
        runs = self.instance.get_runs(limit=1)
        assert runs, done.stderr
        return runs[0]

    def told(self, step: str, run: dg.DagsterRun) -> list[dict[str, Any]]:
        """Return what each try of a step wrote down."""
        found = self.folder / f"{step}-{run.run_id}"
        return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []

    def beats(self) -> list[str]:
        """Return the roles of all heartbeats in the store."""
        return [beat.role for beat in list_beats(open_store(self.url))]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A fresh one for each test."""
    found = Place(tmp_path)
    yield found
    found.instance.dispose()


@pytest.mark.slow
def test_steps_know_their_run_worker_and_it_has_a_heartbeat(place: Place) -> None:
    """By pid, start time and run, so that a step can watch it; and the heartbeat says goodbye when the run ends."""
    run = place.execute()
    assert run.status == dg.DagsterRunStatus.SUCCESS
    (facts,) = place.told("first", run)
    assert facts["worker"] == f"{facts['parent']}:{run.run_id}"
    assert "worker" in facts["beats"]
    assert place.beats() == []
    assert place.told("third", run) == [{"value": 2}]


@pytest.mark.slow
def test_the_heartbeat_ends_when_the_run_fails(place: Place) -> None:
    """Else a failed run would look alive for as long as its worker process stays."""
    run = place.execute(mode="fail")
    assert run.status == dg.DagsterRunStatus.FAILURE
    assert "worker" in place.told("first", run)[0]["beats"]
    assert place.beats() == []


@pytest.mark.slow
def test_a_memory_store_is_refused_before_any_step_starts(place: Place) -> None:
    """Each process would have a memory of its own; every value would be lost without a word."""
    run = place.execute(url="memory://lost")
    assert run.status == dg.DagsterRunStatus.FAILURE
    (error,) = compat.failed_step_errors(place.instance, run.run_id)
    assert error.classes[0] == "ConfigurationError"
    assert "memory://lost" in error.message
    assert not place.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_WORKER_STARTING)


@pytest.mark.slow
def test_the_configuration_of_the_multiprocess_executor_is_taken(place: Place) -> None:
    """A job changes executors without a change of its run config; a misspelt field is refused."""
    config = {"execution": {"config": {"max_concurrent": 1, "retries": {"disabled": {}}}}}
    assert place.execute(config).status == dg.DagsterRunStatus.SUCCESS
    known = len(place.instance.get_runs())
    misspelt = {"execution": {"config": {"max_concurent": 1}}}
    place.execute(misspelt)
    assert len(place.instance.get_runs()) == known


@pytest.mark.slow
def test_a_resumed_run_does_not_repeat_what_succeeded(place: Place) -> None:
    """Run monitoring starts a new worker for the same run; plain multiprocess would begin at the first step."""
    run = place.execute(mode="die with the worker")
    assert run.status == dg.DagsterRunStatus.STARTED
    assert run.job_code_origin is not None
    arguments = ResumeRunArgs(run.job_code_origin, run.run_id, place.instance.get_ref()).get_command_args()
    done = place.call(*arguments[arguments.index("api") :])
    again = place.instance.get_run_by_id(run.run_id)
    assert again is not None
    assert again.status == dg.DagsterRunStatus.SUCCESS, done.stderr
    assert (len(place.told("first", run)), len(place.told("second", run))) == (1, 2)
    assert place.told("third", run) == [{"value": 2}]


@pytest.mark.slow
def test_a_resumed_run_with_nothing_left_ends_in_success(place: Place) -> None:
    """The worker died after the last step and before it said so."""
    run = place.execute()
    assert run.job_code_origin is not None
    started = dg.DagsterEvent(event_type_value=dg.DagsterEventType.PIPELINE_START.value, job_name=run.job_name)
    place.instance.report_dagster_event(started, run.run_id)
    arguments = ResumeRunArgs(run.job_code_origin, run.run_id, place.instance.get_ref()).get_command_args()
    place.call(*arguments[arguments.index("api") :])
    again = place.instance.get_run_by_id(run.run_id)
    assert again is not None
    assert again.status == dg.DagsterRunStatus.SUCCESS
    assert len(place.told("first", run)) == 1


@pytest.mark.slow
def test_a_left_out_step_hands_its_value_to_the_next(place: Place) -> None:
    """Even where a step starts as soon as its inputs exist: what is left out counts as there. The run says why."""
    config = {"execution": {"config": {"step_dependency_config": {"require_upstream_step_success": False}}}}
    root = place.execute(config, mode="fail")
    tags = {"dagster/parent_run_id": root.run_id, "dagster/root_run_id": root.run_id, "resilient/resume": "true"}
    child = place.instance.add_run(
        root._replace(
            run_id=str(uuid.uuid4()),
            status=dg.DagsterRunStatus.NOT_STARTED,
            tags=tags,
            parent_run_id=root.run_id,
            root_run_id=root.run_id,
        )
    )
    assert child.job_code_origin is not None
    arguments = ExecuteRunArgs(child.job_code_origin, child.run_id, place.instance.get_ref()).get_command_args()
    done = place.call(*arguments[arguments.index("api") :])
    again = place.instance.get_run_by_id(child.run_id)
    assert again is not None
    assert again.status == dg.DagsterRunStatus.SUCCESS, done.stderr
    assert place.told("first", child) == []
    assert place.told("third", child) == [{"value": 2}]
    logs = place.instance.all_logs(child.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    said = [entry.get_dagster_event().message for entry in logs]
    assert f"first: committed by run {root.run_id}; not computed again." in said


# --- without processes


def a_job(*resources: tuple[str, Any]) -> dg.JobDefinition:
    """Return a job of one asset that uses these resources."""

    @dg.asset(required_resource_keys={name for name, _ in resources})
    def only() -> int:
        return 1

    defs = dg.Definitions(assets=[only], resources=dict(resources), executor=resilient_executor)
    return defs.resolve_implicit_global_asset_job_def()


class Planned:
    """What the executor reads of a plan context."""

    resume_from_failure = False

    def __init__(self, job: dg.JobDefinition, run_config: dict[str, Any] | None = None) -> None:
        self.job, self.run_config = self, run_config or {}
        self._job = job

    def get_definition(self) -> dg.JobDefinition:
        """Return the job."""
        return self._job


def test_resources_are_found_with_their_config_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-level, nested, from the environment and from the run config; an unused one is not there to be found."""
    monkeypatch.setenv("STORE_A", "a")
    job = a_job(
        ("plain", ResilientResource(url="p", ttl_seconds=90)),
        ("late", ResilientResource.configure_at_launch()),
        ("manager", ResilientIOManager(resilient=ResilientResource(url=dg.EnvVar("STORE_A")))),
    )
    config = {"resources": {"late": {"config": {"url": "from the run"}}}}
    found = compat.job_resources(Planned(job, config), ResilientResource)
    assert {resource.url: resource.ttl_seconds for resource in found} == {"p": 90, "from the run": 45, "a": 45}
    assert len(compat.job_resources(Planned(job, config), ResilientIOManager)) == 1


def test_a_missing_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any step starts, rather than in each of them."""
    monkeypatch.delenv("NO_SUCH_STORE", raising=False)
    job = a_job(("manager", ResilientIOManager(resilient=ResilientResource(url=dg.EnvVar("NO_SUCH_STORE")))))
    with pytest.raises(ConfigurationError, match="NO_SUCH_STORE"):
        compat.job_resources(Planned(job), ResilientResource)


def test_execute_in_process_runs_with_a_memory_store() -> None:
    """In one process a memory store works, and the executor has no part in it."""
    job = a_job(("io_manager", ResilientIOManager(resilient=ResilientResource(url=f"memory://{uuid.uuid4()}"))))
    assert job.execute_in_process().success


def test_the_run_worker_is_named_only_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an outer name comes back, also after an error."""
    monkeypatch.delenv(RUN_WORKER_ENV, raising=False)
    with named_run_worker("r"):
        inside = os.environ[RUN_WORKER_ENV]
    assert inside == f"{os.getpid()}:{start_ticks(os.getpid())}:r"
    assert RUN_WORKER_ENV not in os.environ
    monkeypatch.setenv(RUN_WORKER_ENV, "1:2:outer")
    with pytest.raises(KeyError), named_run_worker("r"):
        raise KeyError
    assert os.environ[RUN_WORKER_ENV] == "1:2:outer"
