"""`build_recovery_sensor`: detects lost and failed runs, and re-executes what is missing, exactly once.

No postponed annotations here: Dagster inspects the evaluation function.
"""

from collections.abc import Collection, Mapping
from typing import Any

import dagster as dg

from dagster_resilient.briefs import StoredBriefs
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.launchers import Webserver
from dagster_resilient.recovery import RecoveryPolicy, Rests
from dagster_resilient.resources import ResilientResource
from dagster_resilient.scopes import ManagedRuns
from dagster_resilient.tick import RecoveryTick


def build_recovery_sensor(
    policy: RecoveryPolicy | None = None,
    *,
    name: str = "resilient_recovery",
    resource_key: str = "resilient",
    minimum_interval_seconds: int = 9,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    webserver_url: str | None = None,
    webserver_headers: Mapping[str, str] | None = None,
    code_locations: Collection[str] | None = None,
) -> dg.SensorDefinition:
    """Build the sensor that recovers the runs of a code location, or from a location of its own those of others.

    It looks after runs of jobs whose executor is `resilient_executor`: only these have a worker whose heartbeat tells
    whether it lives.

    Without `webserver_url` it stands beside the assets, and recovers the runs of its own code location. With it, it
    stands in a small code location of its own, which imports none of the user's code and outlives it: it plans with
    what run workers stored at the start of their runs, and launches through Dagster's webserver.

    Args:
        policy: How many attempts each class of failure gets, and how they are spaced.
        name: Name of the sensor.
        resource_key: Key of the `ResilientResource`.
        minimum_interval_seconds: Seconds between ticks. Dagster's daemon looks every 5 s, and skips a sensor that is a
            moment too early: just under a multiple of 5 keeps the ticks that far apart.
        default_status: Whether it runs without being switched on.
        webserver_url: Address of Dagster's webserver, such as ``http://webserver:3000``.
        webserver_headers: What the webserver wants of its clients, such as a token.
        code_locations: With `webserver_url`: whose runs are recovered; None: those of all that use this store.

    Raises:
        ConfigurationError: `code_locations` or `webserver_headers` without `webserver_url`, or of a form that cannot be
            meant.
    """
    chosen, rests = policy or RecoveryPolicy(), Rests()
    if webserver_url is None and (code_locations is not None or webserver_headers is not None):
        raise ConfigurationError(
            "build_recovery_sensor: code_locations and webserver_headers say how to recover the runs of other code "
            "locations; give webserver_url with them."
        )
    if webserver_url is not None and not webserver_url.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"build_recovery_sensor: webserver_url={webserver_url!r} must begin with http:// or https://."
        )
    if isinstance(code_locations, str):
        raise ConfigurationError(
            f"build_recovery_sensor: code_locations={code_locations!r} is one text; write [{code_locations!r}]."
        )

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        required_resource_keys={resource_key},
        description="Fences lost runs, and re-executes from the last committed partition and checkpoint.",
    )
    def recovery(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        resource: ResilientResource = getattr(context.resources, resource_key)
        apart: dict[str, Any] = {}
        if webserver_url is not None:
            apart["scope"] = ManagedRuns(context.instance, code_locations)
            apart["briefs"] = StoredBriefs(resource.records, context.instance.get_run_by_id)
            apart["launcher"] = Webserver(context.instance, webserver_url, webserver_headers)
        return dg.SkipReason(RecoveryTick(context, resource, chosen, rests=rests, **apart).run())

    return recovery
