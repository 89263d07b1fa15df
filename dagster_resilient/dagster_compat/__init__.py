"""Every non-public Dagster call of this library, in one place. Written against Dagster 1.13.

Dagster may change a private name in any release. So each function here says after *Private* which names it leans on,
and why nothing public does. The rest of the library uses Dagster's public names alone.
"""

from dagster_resilient.dagster_compat.definitions import (
    assets_of_step,
    belongs_to,
    declared_outputs,
    io_manager_is,
    job_executor_name,
    job_of,
    job_of_run,
    output_is_nothing,
    output_may_be_absent,
    run_asset_keys,
    step_key_of,
    upstream_keys,
)
from dagster_resilient.dagster_compat.launch import kept_tags, launch_reexecution
from dagster_resilient.dagster_compat.partitions import (
    is_partition_tag,
    partition_keys_of_run,
    partition_tags,
    shared_partition,
)
from dagster_resilient.dagster_compat.runs import (
    RecordedError,
    cancelled_by_user,
    children_of,
    failed_step_errors,
    failure_error_names,
    instance_id,
    materialized_partitions,
    report_run_failed,
    run_group,
    step_tries_running,
    successful_steps,
)
from dagster_resilient.dagster_compat.worker import (
    MULTIPROCESS_CONFIG,
    ExecutionPlan,
    PlanOrchestrationContext,
    RetryMode,
    StepDependencyConfig,
    job_resources,
    remaining_plan,
)

__all__ = [
    "MULTIPROCESS_CONFIG",
    "ExecutionPlan",
    "PlanOrchestrationContext",
    "RecordedError",
    "RetryMode",
    "StepDependencyConfig",
    "assets_of_step",
    "belongs_to",
    "cancelled_by_user",
    "children_of",
    "declared_outputs",
    "failed_step_errors",
    "failure_error_names",
    "instance_id",
    "io_manager_is",
    "is_partition_tag",
    "job_executor_name",
    "job_of",
    "job_of_run",
    "job_resources",
    "kept_tags",
    "launch_reexecution",
    "materialized_partitions",
    "output_is_nothing",
    "output_may_be_absent",
    "partition_keys_of_run",
    "partition_tags",
    "remaining_plan",
    "report_run_failed",
    "run_asset_keys",
    "run_group",
    "shared_partition",
    "step_key_of",
    "step_tries_running",
    "successful_steps",
    "upstream_keys",
]
