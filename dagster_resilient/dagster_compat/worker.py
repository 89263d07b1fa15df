"""What the executor needs to know in the run worker, where Dagster sets up no resources."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import dagster as dg
from dagster._config.pythonic_config.resource import coerce_to_resource, is_coercible_to_resource
from dagster._config.validate import process_config
from dagster._core.execution.api import create_execution_plan
from dagster._core.execution.context.system import PlanOrchestrationContext
from dagster._core.execution.plan.plan import ExecutionPlan
from dagster._core.execution.plan.state import KnownExecutionState
from dagster._core.execution.retries import RetryMode
from dagster._core.execution.step_dependency_config import StepDependencyConfig
from dagster._core.system_config.objects import ResolvedRunConfig

from dagster_resilient.errors import ConfigurationError

# An executor's signature consists of these private types.
__all__ = [
    "MULTIPROCESS_CONFIG",
    "ExecutionPlan",
    "PlanOrchestrationContext",
    "RetryMode",
    "StepDependencyConfig",
    "job_resources",
    "remaining_plan",
]

R = TypeVar("R")

# Private: `as_field`, since the public schema of an executor is not what the public `executor` takes.
MULTIPROCESS_CONFIG: dg.Field = dg.multiprocess_executor.config_schema.as_field()


def job_resources(plan_context: PlanOrchestrationContext, cls: type[R]) -> list[R]:
    """Return the resources of class `cls` that a run's steps will use, configured but not set up.

    Found are the job's own resources and those nested in them (an IO manager's). Environment variables are resolved,
    and the run's config is applied.

    Private: `ResolvedRunConfig`, the plan's job, and the config of pydantic resources; a resource's public ways to
    resolve its config all set it up as well.
    """
    job = plan_context.job.get_definition()
    configs = ResolvedRunConfig.build(job, plan_context.run_config).resources
    found: list[R] = []
    for key, definition in job.get_required_resource_defs().items():
        config = configs[key].config if key in configs else None
        found.extend(_instances(definition, config, cls))
    return found


def _instances(definition: Any, config: Any, cls: type[R]) -> Iterator[R]:
    """Yield the resource of a definition and those nested in it, where they are of the class."""
    nested = getattr(definition, "nested_resources", {})
    found = getattr(definition, "configurable_resource_cls", None)
    if isinstance(found, type) and issubclass(found, cls):
        yield found(**_config(config), **nested)
    for inner in nested.values():
        if is_coercible_to_resource(inner):
            inner_definition = coerce_to_resource(inner)
            yield from _instances(inner_definition, _default_config(inner_definition), cls)


def _config(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else {}


def _default_config(definition: dg.ResourceDefinition) -> Any:
    """Return a nested resource's config, resolved.

    A nested resource that the run config completes stands among the job's own.

    Private: `process_config` and `ConfiguredDefinitionConfigSchema.resolve_config`, as in Dagster's own set-up.
    """
    schema = definition.config_schema
    if not schema.default_provided:
        return None
    value = schema.default_value
    result = process_config({"config": schema.config_type}, {"config": value})
    if not result.success or result.value is None:
        reasons = "; ".join(error.message for error in result.errors or ())
        raise ConfigurationError(f"A nested resource's config is not valid: {reasons} Correct its definition.")
    return result.value["config"]


def remaining_plan(plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan of what a run still has to do: all of it, or after a resume the steps that have not succeeded.

    Run monitoring can start a new worker for a run whose worker died. The multiprocess executor would start at the
    first step again.

    Private: `PlanOrchestrationContext.resume_from_failure`; the rule of "re-execute from failure", for which the status
    must say so.
    """
    if not plan_context.resume_from_failure:
        return execution_plan
    run = plan_context.dagster_run.with_status(dg.DagsterRunStatus.FAILURE)
    steps, state = KnownExecutionState.build_resume_retry_reexecution(plan_context.instance, run)
    return create_execution_plan(
        plan_context.job,
        run_config=plan_context.run_config,
        step_keys_to_execute=list(steps),
        known_state=state,
        repository_load_data=execution_plan.repository_load_data,
    )
