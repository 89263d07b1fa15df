"""Assets that are materialized in the process of a test, with our IO manager."""

import dagster as dg

from dagster_resilient import ResilientIOManager


def run(assets, resilient, **options) -> dg.ExecuteInProcessResult:
    """Materialize in this process."""
    resources = {"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)}
    return dg.materialize(assets, resources=resources, raise_on_error=False, **options)


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    """The errors of a run that failed, as text."""
    return "\n".join(str(event.event_specific_data) for event in result.all_events if event.is_failure)
