"""`resilient_executor`: Dagster's multiprocess executor, with a heartbeat for the run itself.

Steps keep a heartbeat of their own. What no step can tell is whether the run worker, the process that plans and starts
the steps, is alive: without it a step goes on as an orphan, and between two steps nobody would speak for the run.
Dagster sets up no resources in the run worker. An executor is the one piece of ours that runs there, exactly once.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import dagster as dg

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
)
from dagster_resilient.errors import ConfigurationError, UnsupportedValueError
from dagster_resilient.io_managers import ResilientIOManager
from dagster_resilient.resources import RUN_WORKER_ENV, ResilientResource
from dagster_resilient.state.beats import carries_heartbeats
from dagster_resilient.state.owner import start_ticks


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
        """Run the plan. A resumed run does the steps that have not succeeded.

        Raises:
            ConfigurationError: A store of the run lives in one process's memory, or carries no heartbeats. No step has
            started.
        """
        with on_run_worker_start(plan_context, execution_plan):
            yield from self._inner.execute(plan_context, remaining_plan(plan_context, execution_plan))


@contextmanager
def on_run_worker_start(plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan) -> Iterator[None]:
    """Around all steps of a run: name this process to them, fence the run's predecessors, and keep its heartbeat.

    The body also ends by an exception, and when Dagster drops the executor's generator: the heartbeat ends with it.
    """
    stores = resilient_resources(plan_context)
    _refuse_unfit(stores, execution_plan)
    _refuse_hints(plan_context)
    with ExitStack() as stack:
        stack.enter_context(named_run_worker())
        for store in stores:
            stack.enter_context(store.run_worker(plan_context.dagster_run, plan_context.instance))
        yield


def resilient_resources(plan_context: PlanOrchestrationContext) -> list[ResilientResource]:
    """Return the resilient resources that a run's steps use, one per store."""
    by_url = {resource.url: resource for resource in job_resources(plan_context, ResilientResource)}
    return list(by_url.values())


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
def named_run_worker() -> Iterator[None]:
    """Name this process to its children as their run worker: pid and start time, since a pid alone is used again."""
    before = os.environ.get(RUN_WORKER_ENV)
    os.environ[RUN_WORKER_ENV] = f"{os.getpid()}:{start_ticks(os.getpid()) or 0}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[RUN_WORKER_ENV]
        else:
            os.environ[RUN_WORKER_ENV] = before
