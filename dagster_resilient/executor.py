"""`resilient_executor`: Dagster's multiprocess executor, with a heartbeat for the run itself.

Steps keep a heartbeat of their own. What no step can tell is whether the run worker, the process that plans and starts
the steps, is alive: without it a step goes on as an orphan, and between two steps nobody would speak for the run.
Dagster sets up no resources in the run worker. An executor is the one piece of ours that runs there, exactly once.
"""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import dagster as dg

from dagster_resilient.briefs import LiveBriefs, store_brief
from dagster_resilient.codecs.hints import unsupported_hint
from dagster_resilient.dagster_compat import (
    MULTIPROCESS_CONFIG,
    ExecutionPlan,
    PlanOrchestrationContext,
    RetryMode,
    StepDependencyConfig,
    declared_outputs,
    job_resources,
    remaining_plan,
    run_group,
    successful_steps,
)
from dagster_resilient.dagster_compat.skips import (
    PlannedStep,
    is_from_asset_failure,
    mark_asset_resume,
    mark_unfinished,
    planned_assets,
    planned_steps,
    taken_for_done,
    tell_run,
    with_inner_steps,
    without_steps,
    worker_repository,
)
from dagster_resilient.errors import ConfigurationError, UnsupportedValueError
from dagster_resilient.facts import RunFacts
from dagster_resilient.io_managers import ResilientIOManager
from dagster_resilient.recovery import AssetFacts, plan
from dagster_resilient.recovery.brief import AssetBrief, Key, Partition
from dagster_resilient.resources import RUN_WORKER_ENV, ResilientResource, resumes_parent, series_of
from dagster_resilient.state.beats import carries_heartbeats
from dagster_resilient.state.owner import start_ticks
from dagster_resilient.state.store import RecordStore

_log = logging.getLogger(__name__)


@dg.executor(
    name="resilient",
    config_schema=MULTIPROCESS_CONFIG,
    requirements=dg.multiple_process_executor_requirements(),
)
def resilient_executor(init_context: dg.InitExecutorContext) -> dg.Executor:
    """Run each step in a process of its own, and keep a heartbeat for the run.

    Takes the configuration of `multiprocess_executor`, and needs none, so that a job can change from one to the other::

        execution:
          config:
            max_concurrent: 4

    `Definitions(executor=resilient_executor)` covers every job that names no executor, and what the UI materializes
    without a job. `materialize` and `execute_in_process` use one process, whatever the executor.
    """
    create = dg.multiprocess_executor.executor_creation_fn
    assert create is not None  # so for every executor that Dagster ships
    return ResilientExecutor(create(init_context))


class ResilientExecutor(dg.Executor):
    """Wraps an executor: while it works, the run has a heartbeat, and its steps know their run worker."""

    def __init__(self, inner: dg.Executor) -> None:
        self._inner = inner

    @property
    def retries(self) -> RetryMode:
        """Whether steps are retried, as configured."""
        return self._inner.retries

    @property
    def step_dependency_config(self) -> StepDependencyConfig:
        """When a step counts as ready, as configured."""
        return self._inner.step_dependency_config

    def execute(
        self, plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan
    ) -> Iterator[dg.DagsterEvent]:
        """Run the plan. A resumed run does the steps that have not succeeded, and that its series has not finished.

        Raises:
            ConfigurationError: A store of the run lives in one process's memory, or carries no heartbeats; or Dagster
            chose assets by "from asset failure" and dropped an unfinished one. No step has started.
        """
        with on_run_worker_start(plan_context, execution_plan) as stores, marked_where_unfinished(plan_context):
            remaining = remaining_plan(plan_context, execution_plan)
            finished = _finished(plan_context, remaining, stores)
            if finished:
                yield from (tell_run(plan_context, words) for words in finished.values())
                remaining = without_steps(plan_context, remaining, with_inner_steps(remaining, finished))
            yield from self._inner.execute(plan_context, remaining)


@contextmanager
def on_run_worker_start(
    plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan
) -> Iterator[list[ResilientResource]]:
    """Around all steps of a run: name this process to them, fence the run's predecessors, and keep its heartbeat.

    The body also ends by an exception, and when Dagster drops the executor's generator: the heartbeat ends with it.
    """
    stores = resilient_resources(plan_context)
    _say_if_unprotected(plan_context, stores)
    _refuse_unfit(stores, execution_plan)
    _refuse_hints(plan_context)
    with ExitStack() as stack:
        stack.enter_context(named_run_worker(plan_context.run_id))
        brief = partial(_brief, plan_context)
        for store in stores:
            stack.enter_context(store.run_worker(plan_context.dagster_run, plan_context.instance, brief))
        yield stores


def _brief(plan_context: PlanOrchestrationContext, records: RecordStore) -> None:
    """Store what the run is to compute, for a recovery that cannot import the run's code."""
    run, instance = plan_context.dagster_run, plan_context.instance
    store_brief(records, run, instance, lambda: LiveBriefs(worker_repository(plan_context), instance)(run))


def resilient_resources(plan_context: PlanOrchestrationContext) -> list[ResilientResource]:
    """Return the resilient resources that a run's steps use, one per store."""
    by_url = {resource.url: resource for resource in job_resources(plan_context, ResilientResource)}
    return list(by_url.values())


def _say_if_unprotected(plan_context: PlanOrchestrationContext, stores: Sequence[ResilientResource]) -> None:
    """Somebody who chose the executor believes to be protected."""
    if not stores:
        plan_context.log.warning(
            f"No step of this run uses a ResilientResource: {resilient_executor.name!r} has no place for a heartbeat, "
            "and the run is not recovered. Give the job ResilientIOManager, or an asset the resource as a parameter."
        )


def _refuse_unfit(stores: list[ResilientResource], execution_plan: ExecutionPlan) -> None:
    """Each step would have a memory store of its own; and a run without heartbeats counts as lost."""
    for store in stores:
        if not store.store.is_shared:
            raise ConfigurationError(
                f"The store {store.url!r} lives in the memory of one process, but {resilient_executor.name!r} runs the "
                f"steps {', '.join(execution_plan.step_keys_to_execute)} in processes of their own. Give "
                "ResilientResource a bucket or a directory as `url`, or use `in_process_executor`."
            )
        if not carries_heartbeats(store.store):
            raise ConfigurationError(
                f"The store {store.url!r} cannot be opened by the heartbeat process, which has only obstore, so the "
                f"recovery sensor would take each run of {resilient_executor.name!r} for lost. Give ResilientResource "
                "an S3, GCS or Azure bucket or a directory as `url`, or use another executor, without recovery."
            )


def _refuse_hints(plan_context: PlanOrchestrationContext) -> None:
    """An output whose annotation no codec takes would be refused after its computation; refuse it before."""
    for asset_key, hint in declared_outputs(plan_context.job.get_definition(), ResilientIOManager):
        name = unsupported_hint(hint)
        if name is not None:
            raise UnsupportedValueError(
                f"{asset_key.to_user_string()} is annotated to return {name}, which no codec takes. Return a "
                "DataFrame, tensors, arrays, bytes or plain Python values, or give the asset an IO manager of its own."
            )


@contextmanager
def marked_where_unfinished(plan_context: PlanOrchestrationContext) -> Iterator[None]:
    """However the run ends: keep "from asset failure" from dropping what it leaves of a range of partitions."""
    try:
        yield
    finally:
        try:
            mark_unfinished(plan_context.instance, plan_context.dagster_run)
            mark_asset_resume(plan_context.instance, plan_context.dagster_run)
        except Exception:  # noqa: BLE001 - how the run ended must reach Dagster
            # Without the mark, a re-execution that drops an asset is refused at its start.
            _log.exception("Run %s could not be marked for a re-execution.", plan_context.run_id)


@contextmanager
def named_run_worker(run_id: str) -> Iterator[None]:
    """Name this process to its children as their run worker: pid and start time, since a pid alone is used again."""
    before = os.environ.get(RUN_WORKER_ENV)
    os.environ[RUN_WORKER_ENV] = f"{os.getpid()}:{start_ticks(os.getpid()) or 0}:{run_id}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[RUN_WORKER_ENV]
        else:
            os.environ[RUN_WORKER_ENV] = before


def _finished(
    plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan, stores: list[ResilientResource]
) -> dict[str, str]:
    """Return the steps that need not run, with the reason in words; none where the run starts afresh."""
    run = plan_context.dagster_run
    if not stores or not (resumes_parent(run) or plan_context.resume_from_failure):
        return {}
    series = _Series(plan_context, stores)
    series.refuse_dropped(execution_plan)
    try:
        return series.finished(execution_plan)
    except ConfigurationError as error:
        _log.warning("Run %s computes all that it selected: what is finished of it is not known. %s", run.run_id, error)
        return {}


class _Series:
    """What the runs of a series have finished of what this run, a part of it, is to compute.

    The runs of the series are fenced before it is asked, so that what it tells stays as it is.
    """

    def __init__(self, plan_context: PlanOrchestrationContext, stores: list[ResilientResource]) -> None:
        self._run, self._instance, self._stores = plan_context.dagster_run, plan_context.instance, stores
        self._group = run_group(self._instance, self._run)
        self._briefs = LiveBriefs(worker_repository(plan_context), self._instance)
        self._facts = self._facts_of(self._run)

    def _facts_of(self, run: dg.DagsterRun) -> list[RunFacts]:
        return [RunFacts(self._instance, store, self._briefs, run, self._group) for store in self._stores]

    def refuse_dropped(self, execution_plan: ExecutionPlan) -> None:
        """Refuse a run in which Dagster took an asset for done after some of its partitions.

        Its worker marks a run against that when it ends, but a killed one marks nothing.
        """
        parent = next((run for run in self._group if run.run_id == self._run.parent_run_id), None)
        if parent is None or not is_from_asset_failure(self._run):
            return
        dropped = taken_for_done(self._instance, parent).keys() - planned_assets(execution_plan)
        missing = plan(_united(self._facts_of(parent))).missing if dropped else {}
        left = sorted(key.to_user_string() for key in dropped if tuple(key.path) in missing)
        if left:
            mark_unfinished(self._instance, parent)
            raise ConfigurationError(
                f"Dagster left out {', '.join(left)}, of which run {parent.run_id} had materialized a part before it "
                "died, and the assets below would be computed from that part. Nothing was computed. Re-execute run "
                f'{parent.run_id} "from asset failure" once more: it is marked now, and nothing will be left out.'
            )

    def finished(self, execution_plan: ExecutionPlan) -> dict[str, str]:
        """Return the steps of a plan whose every asset is done for every partition, with who did it in words."""
        missing = plan(_united(self._facts)).missing
        by_step: dict[str | None, list[AssetBrief]] = defaultdict(list)
        for asset in self._facts[0].brief.assets:
            by_step[asset.step_key].append(asset)
        found = {
            step.key: "; ".join(map(self._words, assets))
            for step in planned_steps(execution_plan)
            if step.is_plain and (assets := by_step[step.key]) and self._are_settled(step, assets, missing)
        }
        if found:
            for facts in self._facts:
                facts.adopt_unrecorded()
        return found

    def _are_settled(self, step: PlannedStep, assets: Sequence[AssetBrief], missing: Collection[Key]) -> bool:
        return all(asset.key not in missing and self._is_settled(step, asset) for asset in assets)

    def _is_settled(self, step: PlannedStep, asset: AssetBrief) -> bool:
        """What the IO manager committed ends the step's work. A loop that saved all may have more to do behind it."""
        if asset.must_commit:
            return True
        is_optional = dg.AssetKey(list(asset.key)) in step.optional
        return not is_optional and self._partitions(asset) <= self._successes(asset).keys()

    def _partitions(self, asset: AssetBrief) -> set[Partition]:
        return set(self._facts[0].brief.partitions_of(asset))

    def _successes(self, asset: AssetBrief) -> Mapping[Partition, str]:
        """Return the partitions for which the asset's step succeeded in the series, with the last such run."""
        get_run = self._instance.get_run_by_id
        series, found = self._facts[0].series, dict[Partition, str]()
        for run in self._group:
            brief = self._briefs(run) if series_of(run, get_run) == series else None
            same = next((one for one in brief.assets if one.key == asset.key), None) if brief else None
            if brief and same and same.step_key in successful_steps(self._instance, run.run_id):
                found |= dict.fromkeys(brief.partitions_of(same), run.run_id)
        return found

    def _words(self, asset: AssetBrief) -> str:
        """Return what is left out of an asset, and which runs have done it."""
        values = {key: value for facts in self._facts for key, value in facts.values.items()}
        partitions = self._facts[0].brief.partitions_of(asset)
        successes = {} if asset.must_commit else self._successes(asset)
        by_run = Counter(
            value.run_id if (value := values.get((asset.key, p))) else successes.get(p, "") for p in partitions
        )
        who = ", ".join(f"run {run_id}" + (f" ({n})" if len(by_run) > 1 else "") for run_id, n in by_run.items())
        return f"{_named(asset.key, partitions)}: committed by {who}; not computed again."


def _united(of_stores: Sequence[RunFacts]) -> list[AssetFacts]:
    """Return the facts about a run's assets; an asset is done if it is in the store that is its own."""
    return [
        replace(same[0], done=frozenset().union(*(facts.done for facts in same)))
        for same in zip(*(facts.assets for facts in of_stores), strict=True)
    ]


def _named(key: Key, partitions: Sequence[Partition]) -> str:
    name = "/".join(key)
    if partitions[0] is None:
        return name
    more = f"..{partitions[-1]}: {len(partitions)}" if len(partitions) > 1 else ""
    return f"{name}[{partitions[0]}{more}]"
