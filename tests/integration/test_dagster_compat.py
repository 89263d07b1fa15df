"""The private calls into Dagster do what they say, against real definitions, a real instance and a real daemon."""

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
from dagster._core.code_pointer import FileCodePointer
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import ConfigurationError

MONTHS = ["2024-01", "2024-02", "2024-03", "2024-04"]
JOB = "everything"


class TablesIOManager(dg.ConfigurableIOManager):
    """Stands for an IO manager of ours."""

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Store nothing."""

    def load_input(self, context: dg.InputContext) -> Any:
        """Load nothing."""


monthly = dg.StaticPartitionsDefinition(MONTHS)
grid = dg.MultiPartitionsDefinition(
    {"size": dg.StaticPartitionsDefinition(["small", "big"]), "month": dg.StaticPartitionsDefinition(MONTHS)}
)


@dg.asset
def raw() -> int:
    """Unpartitioned."""
    return 1


@dg.asset(partitions_def=monthly, io_manager_key="tables", backfill_policy=dg.BackfillPolicy.single_run())
def features(raw: int) -> int:
    """Partitioned, stored by the manager under test."""
    return 1


@dg.asset(deps=[features])
def trained() -> None:
    """Hands over nothing."""


@dg.asset(deps=[raw])
def reported() -> dg.MaterializeResult[Any]:
    """Reports its materialization itself."""
    return dg.MaterializeResult()


@dg.multi_asset(specs=[dg.AssetSpec("left", deps=[raw]), dg.AssetSpec("right", deps=[raw])])
def pair() -> Iterator[dg.MaterializeResult[Any]]:
    """Cannot be subset."""
    yield dg.MaterializeResult("left")
    yield dg.MaterializeResult("right")


@dg.op
def one() -> int:
    """First op of a graph asset."""
    return 1


@dg.op
def plus(number: int) -> int:
    """Last op of a graph asset."""
    return number + 1


@dg.graph_asset
def chained() -> int:
    """Two ops."""
    return plus(one())


@dg.asset(partitions_def=grid)
def cells() -> None:
    """Partitioned in two dimensions."""


@dg.asset(partitions_def=dg.DynamicPartitionsDefinition(name="files"))
def files() -> None:
    """Partitioned as the instance says."""


@dg.op
def boom() -> None:
    """Fail."""
    raise ValueError("the inner cause")


@dg.job
def plain_ops() -> None:
    """No asset at all."""
    boom()


@dg.executor(name="ours")
def our_executor(init_context: dg.InitExecutorContext) -> dg.Executor:
    """Has a name to be recognised by."""
    return dg.in_process_executor.executor_creation_fn(init_context)


ASSETS = [raw, features, trained, reported, pair, chained, cells, files]
REPOSITORY = dg.Definitions(
    assets=ASSETS,
    jobs=[
        dg.define_asset_job(JOB, selection=["raw", "features", "trained", "left", "right"]),
        dg.define_asset_job("own_executor", selection=["raw"], executor_def=dg.in_process_executor),
        plain_ops,
    ],
    executor=our_executor,
    resources={"tables": TablesIOManager(), "io_manager": dg.mem_io_manager},
).get_repository_def()


def key(name: str) -> dg.AssetKey:
    """Return an asset key."""
    return dg.AssetKey(name)


def a_run(job_name: str = JOB, **fields: Any) -> dg.DagsterRun:
    """Return a run as the instance would, not stored anywhere."""
    return dg.DagsterRun(job_name=job_name, **fields)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """An empty instance on disk."""
    with dg.instance_for_test() as found:
        yield found


# --- definitions


def test_the_executor_of_definitions_covers_jobs_and_the_implicit_job_but_not_a_job_with_its_own() -> None:
    """Whether a run has our worker heartbeat depends on which executor really runs its job."""
    names = {job: compat.job_executor_name(REPOSITORY, job) for job in (JOB, "__ASSET_JOB", "plain_ops")}
    assert set(names.values()) == {"ours"}
    assert compat.job_executor_name(REPOSITORY, "own_executor") == "in_process"


def test_an_unknown_job_is_refused_by_name() -> None:
    """A run of another code location cannot be planned here, and the message says so."""
    with pytest.raises(ConfigurationError, match="no job 'nowhere'"):
        compat.job_executor_name(REPOSITORY, "nowhere")


def test_run_assets_are_those_of_the_job_upstream_first() -> None:
    """Without a selection, a run computes what its job selects."""
    found = compat.run_asset_keys(REPOSITORY, a_run())
    assert set(found) == {key(name) for name in ("raw", "features", "trained", "left", "right")}
    assert found.index(key("raw")) < found.index(key("features")) < found.index(key("trained"))


def test_run_assets_are_cut_to_the_selection() -> None:
    """A run from the UI selects assets, a re-execution from failure selects steps, the command line selects ops."""
    by_assets = a_run("__ASSET_JOB", asset_selection=frozenset({key("raw"), key("trained")}))
    assert compat.run_asset_keys(REPOSITORY, by_assets) == [key("raw"), key("trained")]
    by_steps = a_run(step_keys_to_execute=["features", "pair"])
    assert set(compat.run_asset_keys(REPOSITORY, by_steps)) == {key("features"), key("left"), key("right")}
    by_ops = a_run(op_selection=["features"], resolved_op_selection=frozenset({"features"}))
    assert compat.run_asset_keys(REPOSITORY, by_ops) == [key("features")]


def test_a_job_of_ops_has_no_assets() -> None:
    """Such a run is re-executed whole."""
    assert compat.run_asset_keys(REPOSITORY, a_run("plain_ops")) == []


def test_steps_behind_assets() -> None:
    """A multi-asset has one step for all, a graph asset's value comes from its last op, others have their own."""
    assert compat.step_key_of(REPOSITORY, JOB, key("features")) == "features"
    assert (
        compat.step_key_of(REPOSITORY, JOB, key("left")) == compat.step_key_of(REPOSITORY, JOB, key("right")) == "pair"
    )
    assert compat.step_key_of(REPOSITORY, "__ASSET_JOB", key("chained")) == "chained.plus"
    assert compat.step_key_of(REPOSITORY, JOB, key("cells")) is None


def test_only_a_multi_asset_that_cannot_be_subset_runs_together() -> None:
    """Selecting one half of it alone is an error in Dagster."""
    assert compat.assets_of_step(REPOSITORY, key("left")) == {key("left"), key("right")}
    assert compat.assets_of_step(REPOSITORY, key("raw")) == {key("raw")}


def test_upstream_keys_are_the_direct_ones() -> None:
    """By argument or by deps."""
    assert compat.upstream_keys(REPOSITORY, key("trained")) == {key("features")}
    assert compat.upstream_keys(REPOSITORY, key("features")) == {key("raw")}
    assert compat.upstream_keys(REPOSITORY, key("raw")) == set()


def test_which_assets_hand_over_a_value() -> None:
    """`-> None` and specs hand nothing to the IO manager; a MaterializeResult may carry a value."""
    names = ("raw", "features", "trained", "reported", "left", "cells", "chained")
    nothing = {name for name in names if compat.output_is_nothing(REPOSITORY, key(name))}
    assert nothing == {"trained", "left", "cells"}


def test_io_manager_is_recognised_by_its_class() -> None:
    """Subclasses count, others do not, and a plain function's manager has no class."""
    assert compat.io_manager_is(REPOSITORY, JOB, key("features"), TablesIOManager)
    assert compat.io_manager_is(REPOSITORY, "__ASSET_JOB", key("features"), dg.ConfigurableIOManager)
    assert not compat.io_manager_is(REPOSITORY, JOB, key("raw"), TablesIOManager)


# --- partitions


@pytest.mark.parametrize(
    ("asset", "tags", "expected"),
    [
        ("features", {"dagster/partition": "2024-02"}, ["2024-02"]),
        (
            "features",
            {"dagster/asset_partition_range_start": "2024-02", "dagster/asset_partition_range_end": "2024-04"},
            MONTHS[1:],
        ),
        ("raw", {"dagster/partition": "2024-02"}, [None]),
        ("features", {}, [None]),
        ("cells", {"dagster/partition": "2024-02|big"}, ["2024-02|big"]),
        (
            "cells",
            {
                "dagster/asset_partition_range_start": "2024-02|small",
                "dagster/asset_partition_range_end": "2024-03|big",
            },
            ["2024-02|small", "2024-02|big", "2024-03|small", "2024-03|big"],
        ),
    ],
)
def test_partitions_of_a_run(
    instance: dg.DagsterInstance, asset: str, tags: dict[str, str], expected: list[str]
) -> None:
    """In definition order; unpartitioned assets in a partitioned run have none."""
    assert compat.partition_keys_of_run(REPOSITORY, a_run(tags=tags), key(asset), instance) == expected


def test_dynamic_partitions_are_read_from_the_instance(instance: dg.DagsterInstance) -> None:
    """In the order in which they were added."""
    instance.add_dynamic_partitions("files", ["z", "a", "m"])
    tags = {"dagster/asset_partition_range_start": "z", "dagster/asset_partition_range_end": "a"}
    assert compat.partition_keys_of_run(REPOSITORY, a_run(tags=tags), key("files"), instance) == ["z", "a"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"raw": [None]}, {}),
        ({"raw": [None], "features": ["2024-03"]}, {"dagster/partition": "2024-03"}),
        (
            {"features": ["2024-04", "2024-02"]},
            {"dagster/asset_partition_range_start": "2024-02", "dagster/asset_partition_range_end": "2024-04"},
        ),
        (
            {"cells": ["2024-03|big"]},
            {"dagster/partition": "2024-03|big", "dagster/partition/month": "2024-03", "dagster/partition/size": "big"},
        ),
    ],
)
def test_tags_for_partitions(
    instance: dg.DagsterInstance, wanted: dict[str, list[str | None]], expected: dict[str, str]
) -> None:
    """One key by name, several by the ends of their range."""
    assert compat.partition_tags(REPOSITORY, {key(k): v for k, v in wanted.items()}, instance) == expected


def test_the_range_of_multi_partitions_is_a_box_around_all(instance: dg.DagsterInstance) -> None:
    """The first and last key in order would span an empty range where a later month misses an earlier size."""
    wanted = ["2024-02|big", "2024-03|small"]
    tags = compat.partition_tags(REPOSITORY, {key("cells"): wanted}, instance)
    targeted = compat.partition_keys_of_run(REPOSITORY, a_run(tags=tags), key("cells"), instance)
    assert set(wanted) < set(targeted)
    assert len(targeted) == 4


def test_partitions_that_no_asset_holds_are_refused(instance: dg.DagsterInstance) -> None:
    """A removed partition is named, rather than dropped without a word."""
    with pytest.raises(ConfigurationError, match="1999-01"):
        compat.partition_tags(REPOSITORY, {key("features"): ["1999-01", "2024-01"]}, instance)


def test_partition_tags_are_recognised() -> None:
    """A run over other partitions must not inherit one of them."""
    names = ["dagster/partition", "dagster/partition/month", "dagster/asset_partition_range_end", "dagster/priority"]
    assert [compat.is_partition_tag(name) for name in names] == [True, True, True, False]


# --- runs


def test_kept_tags_leave_behind_what_belongs_to_one_run(instance: dg.DagsterInstance) -> None:
    """Copying a run key would make a sensor skip its next request; copying a retry count would spend the budget."""
    kept = {"team": "a", "dagster/priority": "3", "dagster/concurrency_key": "gpu", "dagster/partition": "2024-01"}
    left = {
        "dagster/run_key": "k", "dagster/tick": "7", ".dagster/grpc_info": "{}", ".dagster/repository": "r",
        "dagster/retry_number": "1", "dagster/will_retry": "true", "dagster/auto_retry_run_id": "x",
        "dagster/failure_reason": "STEP_FAILURE", "dagster/is_resume_retry": "true", "dagster/backfill": "gone",
        "dagster/parent_run_id": "p", "dagster/root_run_id": "r", "dagster/is_asset_resume_retry": "true",
    }  # fmt: skip
    assert compat.kept_tags(a_run(tags=kept | left), instance) == kept


def test_a_run_group_is_its_root_and_re_executions_oldest_first(instance: dg.DagsterInstance) -> None:
    """From whichever run it is asked for."""
    ids = [str(uuid.uuid4()) for _ in range(3)]
    for number, run_id in enumerate(ids):
        lineage = {} if number == 0 else {"root_run_id": ids[0], "parent_run_id": ids[number - 1]}
        tags = {"dagster/root_run_id": ids[0]} if number else {}
        instance.add_run(a_run(run_id=run_id, tags=tags, **lineage))
    last = instance.get_run_by_id(ids[2])
    assert last is not None
    assert [run.run_id for run in compat.run_group(instance, last)] == ids


def test_a_cancel_is_known_even_where_the_run_then_failed(instance: dg.DagsterInstance) -> None:
    """What a user ended is never undone; a run that only failed may be."""
    asked = REPOSITORY.get_job("plain_ops").execute_in_process(instance=instance, raise_on_error=False)
    failed = REPOSITORY.get_job("plain_ops").execute_in_process(instance=instance, raise_on_error=False)
    run = instance.get_run_by_id(asked.run_id)
    assert run is not None
    instance.report_run_canceling(run)
    compat.report_run_failed(instance, run, "the worker died on the way")
    verdicts = [
        compat.cancelled_by_user(instance, found)
        for run_id in (asked.run_id, failed.run_id)
        if (found := instance.get_run_by_id(run_id))
    ]
    assert verdicts == [True, False]


def test_errors_of_a_run_name_the_classes_behind_them(instance: dg.DagsterInstance) -> None:
    """Classification needs the user's own exception, not Dagster's wrapper alone."""
    result = REPOSITORY.get_job("plain_ops").execute_in_process(instance=instance, raise_on_error=False)
    step_error, run_error = compat.failed_step_errors(instance, result.run_id)
    assert (step_error.step_key, run_error.step_key) == ("boom", None)
    assert step_error.classes == ("DagsterExecutionStepExecutionError", "ValueError")
    assert "ValueError" in compat.failure_error_names(instance, result.run_id)
    assert step_error.exit_code is None


def test_materialized_partitions_are_those_of_the_given_runs(instance: dg.DagsterInstance) -> None:
    """None stands for an unpartitioned asset."""
    job = REPOSITORY.get_job("__ASSET_JOB")
    chosen = [key("raw"), key("features")]
    runs = [
        job.execute_in_process(asset_selection=[key("raw")], instance=instance),
        job.execute_in_process(asset_selection=chosen, instance=instance, partition_key="2024-03"),
    ]
    ids = [run.run_id for run in runs]
    assert compat.materialized_partitions(instance, ids, key("features")) == {"2024-03"}
    assert compat.materialized_partitions(instance, ids[:1], key("features")) == set()
    assert compat.materialized_partitions(instance, ids, key("raw")) == {None}
    assert compat.successful_steps(instance, ids[1]) == {"raw", "features"}


# --- re-execution through a real daemon

LOCATION = '''
import os, signal, time, uuid
import dagster as dg
from dagster_resilient import dagster_compat as compat

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
        missing = {wanted[0]: [None], wanted[1]: ["2024-02", "2024-03"]}
        tags |= compat.partition_tags(context.repository_def, missing, context.instance)
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
    assert compat.materialized_partitions(instance, [child.run_id], key("predicted")) == {"2024-02", "2024-03"}
    assert compat.materialized_partitions(instance, [parent.run_id], key("features")) == set(MONTHS)


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


# --- re-execution in the corners

QUEUE = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}}
LOCATION_ORIGIN = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(python_file=__file__), "here")


@pytest.fixture
def queue() -> Iterator[dg.DagsterInstance]:
    """An instance whose queue nobody empties."""
    with dg.instance_for_test(overrides=QUEUE) as found:
        yield found


def sensor_context(instance: dg.DagsterInstance) -> dg.SensorEvaluationContext:
    """Return the context that a code server would make."""
    return dg.SensorEvaluationContext(
        instance_ref=None,
        instance=instance,
        repository_def=REPOSITORY,
        repository_name=REPOSITORY.name,
        sensor_name="again",
        code_location_origin=LOCATION_ORIGIN,
    )


def a_stored_run(instance: dg.DagsterInstance, job_name: str = JOB, **fields: Any) -> dg.DagsterRun:
    """Return a run that failed, as if a code server had executed it."""
    code = RepositoryPythonOrigin(sys.executable, FileCodePointer(__file__, "REPOSITORY"), container_image="old")
    origin = JobPythonOrigin(job_name, code)
    return instance.add_run(a_run(job_name, status=dg.DagsterRunStatus.FAILURE, job_code_origin=origin, **fields))


def relaunch(
    instance: dg.DagsterInstance, parent: dg.DagsterRun, *names: str, run_id: str | None = None, **tags: str
) -> tuple[dg.DagsterRun, bool]:
    """Re-execute all that a run selected, or some assets of it."""
    keys = [key(name) for name in names] or None
    return compat.launch_reexecution(
        sensor_context(instance), parent, run_id=run_id or str(uuid.uuid4()), asset_keys=keys, tags=tags
    )


def test_a_run_that_was_created_and_not_queued_is_queued(
    queue: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sensor killed between the two must neither lose the run nor start it twice."""
    parent, child = a_stored_run(queue), str(uuid.uuid4())
    with monkeypatch.context() as killed:
        killed.setattr(queue, "submit_run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            relaunch(queue, parent, run_id=child)
    left = queue.get_run_by_id(child)
    assert left is not None
    assert left.status == dg.DagsterRunStatus.NOT_STARTED
    run, queued = relaunch(queue, parent, run_id=child)
    assert (run.status, queued) == (dg.DagsterRunStatus.QUEUED, True)
    assert relaunch(queue, parent, run_id=child)[1] is False
    assert len(queue.all_logs(child, of_type=dg.DagsterEventType.PIPELINE_ENQUEUED)) == 1


def test_a_run_that_another_daemon_creates_first_is_taken_over(
    queue: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw that it was not there; the second creation finds it and goes on."""
    parent, child = a_stored_run(queue), str(uuid.uuid4())
    relaunch(queue, parent, run_id=child)
    real, looks = queue.get_run_by_id, iter([None])
    monkeypatch.setattr(queue, "get_run_by_id", lambda run_id: next(looks, real(run_id)))
    run, queued = relaunch(queue, parent, run_id=child)
    assert (run.run_id, queued) == (child, False)


def test_the_root_of_a_re_execution_of_a_re_execution_is_the_first_run(queue: dg.DagsterInstance) -> None:
    """The group is one, however often it is tried."""
    root = a_stored_run(queue)
    middle, _ = relaunch(queue, root)
    last, _ = relaunch(queue, middle)
    assert (last.parent_run_id, last.root_run_id) == (middle.run_id, root.run_id)
    assert [run.run_id for run in compat.run_group(queue, root)] == [root.run_id, middle.run_id, last.run_id]


def test_without_assets_the_whole_original_selection_is_kept(queue: dg.DagsterInstance) -> None:
    """Of assets, of ops, and the run config."""
    chosen = frozenset({key("raw"), key("chained")})
    of_assets, _ = relaunch(queue, a_stored_run(queue, "__ASSET_JOB", asset_selection=chosen))
    assert (of_assets.asset_selection, of_assets.step_keys_to_execute) == (chosen, None)
    assert compat.run_asset_keys(REPOSITORY, of_assets) == compat.run_asset_keys(
        REPOSITORY, a_run("__ASSET_JOB", asset_selection=chosen)
    )
    config = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
    of_ops, _ = relaunch(queue, a_stored_run(queue, "plain_ops", op_selection=["boom"], run_config=config))
    assert (of_ops.op_selection, of_ops.run_config) == (["boom"], config)


def test_a_selection_of_steps_is_kept(queue: dg.DagsterInstance) -> None:
    """A run "from failure" that is lost must not do again what it was to leave out."""
    whole, _ = relaunch(queue, a_stored_run(queue))
    assert whole.execution_plan_snapshot_id is not None
    steps = a_stored_run(
        queue,
        step_keys_to_execute=["trained"],
        job_snapshot_id=whole.job_snapshot_id,
        execution_plan_snapshot_id=whole.execution_plan_snapshot_id,
    )
    again, _ = relaunch(queue, steps)
    assert again.step_keys_to_execute == ["trained"]
    assert relaunch(queue, steps, "features")[0].step_keys_to_execute is None


def test_half_of_an_inseparable_pair_brings_the_other(queue: dg.DagsterInstance) -> None:
    """Dagster refuses to run it alone."""
    run, _ = relaunch(queue, a_stored_run(queue), "left")
    assert run.asset_selection == {key("left"), key("right")}


def test_the_new_run_uses_the_image_of_the_code_that_planned_it(
    queue: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a new deployment the parent's image may be gone."""
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", "new")
    run, _ = relaunch(queue, a_stored_run(queue))
    assert run.job_code_origin is not None
    assert run.job_code_origin.repository_origin.container_image == "new"
    assert run.remote_job_origin is not None
    assert run.remote_job_origin.location_name == "here"


def test_a_run_belongs_to_the_location_that_executed_it(queue: dg.DagsterInstance) -> None:
    """A run of another location with a job of the same name is not ours; one of the command line is."""
    context = sensor_context(queue)
    ours, _ = relaunch(queue, a_stored_run(queue))
    assert compat.belongs_to(context, ours)
    assert compat.belongs_to(context, a_run())
    assert not compat.belongs_to(context, a_run("nowhere"))
    elsewhere = RemoteRepositoryOrigin(LOCATION_ORIGIN._replace(location_name="there"), REPOSITORY.name)
    assert not compat.belongs_to(context, a_run(remote_job_origin=elsewhere.get_job_origin(JOB)))


def test_nothing_to_re_execute_is_refused(queue: dg.DagsterInstance) -> None:
    """Dagster takes an empty selection for the whole job."""
    with pytest.raises(ConfigurationError, match="no asset is left"):
        compat.launch_reexecution(
            sensor_context(queue), a_stored_run(queue), run_id=str(uuid.uuid4()), asset_keys=[], tags={}
        )


def test_a_run_that_does_not_say_where_its_code_is_is_refused(queue: dg.DagsterInstance) -> None:
    """It could be queued, but nobody could launch it."""
    child = str(uuid.uuid4())
    with pytest.raises(ConfigurationError, match="dagster job launch"):
        relaunch(queue, queue.add_run(a_run()), run_id=child)
    assert queue.get_run_by_id(child) is None


def test_an_instance_without_a_queue_is_refused() -> None:
    """There, submitting means starting the process at once, which a sensor cannot."""
    settings = {"run_coordinator": QUEUE["run_coordinator"] | {"class": "DefaultRunCoordinator"}}
    with dg.instance_for_test(overrides=settings) as instance, pytest.raises(ConfigurationError, match="Queued"):
        relaunch(instance, a_stored_run(instance))
