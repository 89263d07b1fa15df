"""The code location: `dagster dev -m example_project.definitions`.

Where state is kept comes from the environment:

- ``RESILIENT_URL``: ``s3://bucket/prefix`` (with ``AWS_*``), or a directory; without it, ``.resilient`` here.
- ``RESILIENT_HEARTBEAT_SECONDS``, ``RESILIENT_TTL_SECONDS``: how soon a loss is noticed, 10 and 45 by default.
- ``RESILIENT_SENSOR_SECONDS``: how often the recovery sensor looks, 30 by default.
"""

import os
from pathlib import Path

import dagster as dg

from dagster_resilient import ResilientIOManager, ResilientResource, build_recovery_sensor, resilient_executor
from example_project import assets

# A default in the environment, not in the resource: EnvVar knows none, and the resource's other users (steps, the
# sensor) inherit it.
os.environ.setdefault("RESILIENT_URL", str(Path(".resilient").absolute()))

resilient = ResilientResource(
    url=dg.EnvVar("RESILIENT_URL"),
    heartbeat_seconds=float(os.environ.get("RESILIENT_HEARTBEAT_SECONDS", "10")),
    ttl_seconds=float(os.environ.get("RESILIENT_TTL_SECONDS", "45")),
)

# Everything over one range of months: the model is trained once, between the features and the predictions.
delay_pipeline = dg.define_asset_job("delay_pipeline")

# A new month is predicted with the model that there is; training anew is a decision of its own.
score_month = dg.define_asset_job("score_month", [assets.flights, assets.flight_features, assets.delay_predictions])

defs = dg.Definitions(
    assets=dg.load_assets_from_modules([assets]),
    jobs=[delay_pipeline, score_month],
    schedules=[dg.build_schedule_from_partitioned_job(score_month)],
    sensors=[build_recovery_sensor(minimum_interval_seconds=int(os.environ.get("RESILIENT_SENSOR_SECONDS", "10")))],
    executor=resilient_executor,
    resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
)
