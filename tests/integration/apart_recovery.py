"""A code location that only recovers. It imports none of the user's code."""

import os
from pathlib import Path

import dagster as dg

from dagster_resilient import RecoveryPolicy, ResilientResource, build_recovery_sensor

HERE = Path(os.environ["DEPLOYMENT_FOLDER"])

defs = dg.Definitions(
    sensors=[
        build_recovery_sensor(
            RecoveryPolicy(first_wait=0, start_allowance=90),
            minimum_interval_seconds=1,
            webserver_url=os.environ["DEPLOYMENT_URL"],
        )
    ],
    resources={"resilient": ResilientResource(url=str(HERE / "store"), heartbeat_seconds=0.5, ttl_seconds=3)},
)
