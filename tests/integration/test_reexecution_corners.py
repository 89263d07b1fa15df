"""Crashes, races and refusals on the way to a re-execution, and what it takes over from its parent."""

import sys
import uuid
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from compat_definitions import JOB, REPOSITORY, a_run, key
from dagster._core.code_pointer import FileCodePointer
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import ConfigurationError

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
