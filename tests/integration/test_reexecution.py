"""A sensor's re-execution is queued, launched by a real daemon, and succeeds."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_resilient import dagster_compat as compat

JOB, MONTHS = "everything", ["2024-01", "2024-02", "2024-03", "2024-04"]
LOCATION = '''
import os, signal, time, uuid
import dagster as dg
from dagster_resilient import dagster_compat as compat
from dagster_resilient.recovery.brief import PartitionList

HERE = os.path.dirname(os.path.abspath(__file__))
monthly = dg.StaticPartitionsDefinition(["2024-01", "2024-02", "2024-03", "2024-04"])
single_run = dg.BackfillPolicy.single_run()

def is_first(context):
    return context.run.parent_run_id is None

@dg.asset
def raw():
    return 1

@dg.asset(partitions_def=monthly, backfill_policy=single_run, deps=[raw])
def features(context) -> None: ...

@dg.asset(deps=[features])
def trained(context) -> None:
    mode = context.run.tags.get("mode")
    if not is_first(context):
        return
    with open(os.path.join(HERE, f"pids-{context.run.run_id}.new"), "w") as file:
        file.write(f"{os.getppid()} {os.getpid()}")
    os.rename(file.name, file.name.removesuffix(".new"))
    if mode == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    while mode == "hang":
        time.sleep(0.1)

@dg.asset(partitions_def=monthly, backfill_policy=single_run, deps=[trained])
def predicted(context) -> None:
    for key in context.partition_keys:
        context.log_event(dg.AssetMaterialization(context.asset_key, partition=key))

@dg.sensor(minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def again(context):
    """Re-executes every failed root run twice with one id: the second call must do nothing."""
    for run in context.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE])):
        if run.parent_run_id is not None or not compat.belongs_to(context, run):
            continue
        tags = {k: v for k, v in compat.kept_tags(run, context.instance).items() if not compat.is_partition_tag(k)}
        wanted = [dg.AssetKey("trained"), dg.AssetKey("predicted")]
        tags |= compat.partition_tags([None, "2024-02", "2024-03"], [PartitionList.of(monthly.get_partition_keys())])
        child = str(uuid.uuid5(uuid.NAMESPACE_OID, run.run_id))
        news = [
            compat.launch_reexecution(context, run, run_id=child, asset_keys=wanted, tags=tags | {"why": "test"})[1]
            for _ in range(2)
        ]
        with open(os.path.join(HERE, f"news-{run.run_id}"), "a") as file:
            file.write(f"{news}\\n")
    return dg.SkipReason("done")

defs = dg.Definitions(
    assets=[raw, features, trained, predicted], sensors=[again],
    jobs=[dg.define_asset_job("everything", tags={"of": "job"})],
    resources={"io_manager": dg.FilesystemIOManager(base_dir=os.path.join(HERE, "values"))},
)
'''
SETTINGS = """
telemetry: {enabled: false}
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config: {dequeue_interval_seconds: 1}
"""
RANGE = {"dagster/asset_partition_range_start": "2024-01", "dagster/asset_partition_range_end": "2024-04"}


class Deployment:
    """A code location in a folder, an instance, and a daemon as a real process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "dagster.yaml").write_text(SETTINGS)
        (folder / "pipeline.py").write_text(LOCATION)
        self.env = os.environ | {"DAGSTER_HOME": str(self.home)}
        self.instance = dg.DagsterInstance.from_config(str(self.home))

    def dagster(self, *arguments: str) -> list[str]:
        """Return a command line of Dagster for the code location."""
        return [sys.executable, "-m", "dagster", *arguments, "-f", str(self.folder / "pipeline.py")]

    def launch(self, **tags: str) -> dg.DagsterRun:
        """Launch the job as a person would: from the command line, over a range of partitions."""
        command = self.dagster("job", "launch", "-j", JOB, "--tags", json.dumps(RANGE | tags))
        done = subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return self.instance.get_runs(limit=1)[0]

    def wait(self, what: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Poll until something is there."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := what():
                return found
            time.sleep(0.1)
        log = (self.folder / "daemon.log").read_text()
        raise AssertionError(f"Waited {seconds} s in vain.\n{log[-4000:]}")

    def ended(self, run_id: str) -> dg.DagsterRun:
        """Wait for the end of a run."""
        return self.wait(lambda: (r := self.instance.get_run_by_id(run_id)) and r.is_finished and r)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One daemon for the tests of this file; each test has runs of its own."""
    found = Deployment(tmp_path_factory.mktemp("deployment"))
    command = [sys.executable, "-m", "dagster._daemon", "run", "-f", str(found.folder / "pipeline.py")]
    with (found.folder / "daemon.log").open("w") as log:
        daemon = subprocess.Popen(command, env=found.env, cwd=found.folder, stdout=log, stderr=log)
        try:
            yield found
        finally:
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            found.instance.dispose()


@pytest.fixture(scope="module")
def family(deployment: Deployment) -> tuple[dg.DagsterRun, dg.DagsterRun]:
    """A run whose training step was killed, and its re-execution by the sensor, both ended."""
    parent = deployment.ended(deployment.launch(mode="crash", team="a").run_id)
    assert parent.status == dg.DagsterRunStatus.FAILURE
    return parent, deployment.ended(str(uuid.uuid5(uuid.NAMESPACE_OID, parent.run_id)))


@pytest.mark.slow
def test_a_queued_re_execution_is_launched_by_the_daemon_and_succeeds(family: tuple[dg.DagsterRun, ...]) -> None:
    """It is a true re-execution: parent and root are set, so the UI shows one group."""
    parent, child = family
    assert child.status == dg.DagsterRunStatus.SUCCESS
    assert (child.parent_run_id, child.root_run_id) == (parent.run_id, parent.run_id)


@pytest.mark.slow
def test_only_the_selected_assets_and_partitions_run(deployment: Deployment, family: tuple[dg.DagsterRun, ...]) -> None:
    """What was done before the crash is not computed again."""
    parent, child = family
    instance = deployment.instance
    assert compat.successful_steps(instance, parent.run_id) == {"raw", "features"}
    assert compat.successful_steps(instance, child.run_id) == {"trained", "predicted"}
    assert compat.materialized_partitions(instance, [child.run_id], dg.AssetKey("predicted")) == {"2024-02", "2024-03"}
    assert compat.materialized_partitions(instance, [parent.run_id], dg.AssetKey("features")) == set(MONTHS)


@pytest.mark.slow
def test_tags_of_the_re_execution(family: tuple[dg.DagsterRun, ...]) -> None:
    """The job's, the parent's and the caller's; its own range, and its own gRPC address."""
    parent, child = family
    assert (child.tags["of"], child.tags["team"], child.tags["why"]) == ("job", "a", "test")
    assert child.tags["dagster/asset_partition_range_start"] == "2024-02"
    assert parent.tags["dagster/asset_partition_range_start"] == "2024-01"
    assert child.tags["dagster/code_location"] == "pipeline.py"


@pytest.mark.slow
def test_the_same_id_gives_one_run(deployment: Deployment, family: tuple[dg.DagsterRun, ...]) -> None:
    """One call launched it; the calls after it, in this tick and in later ones, found it there."""
    parent, _ = family
    record = deployment.folder / f"news-{parent.run_id}"
    lines = deployment.wait(lambda: (lines := record.read_text().splitlines()) and len(lines) > 1 and lines)
    assert lines[0] == "[True, False]"
    assert set(lines[1:]) == {"[False, False]"}
    queued = deployment.instance.all_logs(family[1].run_id, of_type=dg.DagsterEventType.PIPELINE_ENQUEUED)
    assert len(queued) == 1


@pytest.mark.slow
def test_a_killed_step_is_known_by_its_signal(deployment: Deployment, family: tuple[dg.DagsterRun, ...]) -> None:
    """SIGKILL from outside is what running out of memory looks like."""
    errors = compat.failed_step_errors(deployment.instance, family[0].run_id)
    crash = [error for error in errors if error.exit_code is not None]
    assert [(error.step_key, error.exit_code) for error in crash] == [("trained", -9)]
    assert "ChildProcessCrashException" in crash[0].classes


@pytest.mark.slow
def test_a_step_that_started_and_did_not_end_is_running(deployment: Deployment) -> None:
    """Also after its worker is gone, when nothing will log its end any more; then the run is marked failed."""
    run = deployment.launch(mode="hang")
    pids = deployment.folder / f"pids-{run.run_id}"
    worker, step = (int(pid) for pid in deployment.wait(lambda: pids.exists() and pids.read_text()).split())
    assert compat.step_tries_running(deployment.instance, run.run_id) == ["trained"]
    for pid in (worker, step):
        os.kill(pid, 9)
    assert deployment.ended(run.run_id).status == dg.DagsterRunStatus.FAILURE
    assert compat.step_tries_running(deployment.instance, run.run_id) == ["trained"]
    crash = compat.failed_step_errors(deployment.instance, run.run_id)[0]
    assert (crash.step_key, crash.exit_code) == (None, -9)
    child = deployment.ended(str(uuid.uuid5(uuid.NAMESPACE_OID, run.run_id)))
    assert child.status == dg.DagsterRunStatus.SUCCESS
