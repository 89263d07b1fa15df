"""A run group as its run workers left it, and what the worker of its next run makes of it; without processes."""

from types import SimpleNamespace
from typing import Any

import dagster as dg
from dagster._core.events import DagsterEvent, StepMaterializationData
from dagster._core.execution.api import create_execution_plan
from dagster._core.execution.plan.objects import StepSuccessData

from dagster_resilient import ResilientIOManager, ResilientResource, executor, resilient_executor
from dagster_resilient.state.fences import claim_attempt
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.task import Attempt
from dagster_resilient.values import store_value

JOB = "everything"
RESUME = {"dagster/is_resume_retry": "true"}
ASSET_RESUME = {"dagster/is_asset_resume_retry": "true"}
LETTERS = dg.StaticPartitionsDefinition(list("abcd"))
RANGE = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "d"}


def an_asset(name: str, *above: str, version: str = "1", **options: Any) -> Any:
    """Return an asset that computes one number, below others."""

    @dg.asset(name=name, deps=list(above), code_version=version, **options)
    def asset() -> int:
        return 1

    return asset


CHAIN = (an_asset("first"), an_asset("second", "first"), an_asset("third", "second"))


class Group:
    """A run group whose runs stand as their workers left them, and what a run worker sees of it."""

    def __init__(self, instance: dg.DagsterInstance, url: str) -> None:
        self.instance, self.store = instance, open_store(url)
        self.records, self.resource = ObjectRecords(self.store), ResilientResource(url=url)
        self.deploy(*CHAIN)

    def deploy(self, *assets: Any, **resources: Any) -> None:
        """Put new code in the place of the old."""
        self.repository = dg.Definitions(
            assets=assets,
            jobs=[dg.define_asset_job(JOB)],
            executor=resilient_executor,
            resources={"io_manager": ResilientIOManager(resilient=self.resource), **resources},
        ).get_repository_def()

    def job(self, *names: str) -> dg.JobDefinition:
        """The job, cut down to some assets."""
        selection = {dg.AssetKey(name) for name in names} or None
        return self.repository.get_job(JOB).get_subset(asset_selection=selection)

    def a_run(self, *names: str, parent: dg.DagsterRun | None = None, **tags: str) -> dg.DagsterRun:
        """A failed run of some assets, with its plan, as the UI stores it."""
        lineage = {}
        if parent is not None:
            root = parent.root_run_id or parent.run_id
            lineage = {"parent_run_id": parent.run_id, "root_run_id": root}
            tags |= {"dagster/parent_run_id": parent.run_id, "dagster/root_run_id": root}
        return self.instance.create_run_for_job(
            self.job(*names),
            tags=tags,
            status=dg.DagsterRunStatus.FAILURE,
            asset_selection=frozenset(dg.AssetKey(name) for name in names) or None,
            **lineage,
        )

    def commit(self, run: dg.DagsterRun, asset: str, *partitions: str, version: str = "1", series: str = "") -> None:
        """Commit values as a step of the run does."""
        root = run.root_run_id or run.run_id
        claim = claim_attempt(self.records, root=root, run_id=run.run_id, series=series or root)
        attempt = Attempt(self.store, claim, this_process(claim, heartbeat=None, interval=1, ttl=5), None, self.records)
        for partition in partitions or (None,):
            store_value(attempt.durable((asset,), partition, f"code:{version}"), 1)

    def log(self, run: dg.DagsterRun, kind: dg.DagsterEventType, step: str, data: Any = None) -> None:
        """Log an event of a step."""
        event = DagsterEvent(kind.value, run.job_name, step_key=step, event_specific_data=data)
        self.instance.report_dagster_event(event, run.run_id)

    def succeed(self, run: dg.DagsterRun, step: str) -> None:
        """Log the success of a step."""
        self.log(run, dg.DagsterEventType.STEP_SUCCESS, step, StepSuccessData(duration_ms=1.0))

    def materialize(self, run: dg.DagsterRun, asset: str, *partitions: str) -> None:
        """Commit partitions, and log each as the loop over a range does."""
        self.commit(run, asset, *partitions)
        for partition in partitions:
            data = StepMaterializationData(dg.AssetMaterialization(asset, partition=partition))
            self.log(run, dg.DagsterEventType.ASSET_MATERIALIZATION, asset, data)

    def worker(self, run: dg.DagsterRun, resumed: bool = False) -> tuple[Any, Any]:
        """What the worker of a run hands to the executor."""
        job = self.job(*(key.to_user_string() for key in run.asset_selection or ()))
        reconstructable = SimpleNamespace(repository=SimpleNamespace(get_definition=lambda: self.repository))
        context = SimpleNamespace(
            dagster_run=run,
            instance=self.instance,
            job=job,
            run_config={},
            reconstructable_job=reconstructable,
            resume_from_failure=resumed,
        )
        return context, create_execution_plan(job)

    def left_out(self, run: dg.DagsterRun, **how: Any) -> dict[str, str]:
        """The steps that the worker of a run leaves out, with the words of the log."""
        return executor._finished(*self.worker(run, **how), [self.resource])

    def chosen_by_dagster(self, run: dg.DagsterRun) -> set[str]:
        """The assets that Dagster selects "from asset failure"."""
        snapshot = self.instance.get_execution_plan_snapshot(str(run.execution_plan_snapshot_id))
        keys, _ = self.instance.run_domain.get_keys_to_reexecute(run.run_id, snapshot)
        return {key.to_user_string() for key in keys}
