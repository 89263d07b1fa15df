"""Dagster's own daemon process, whose loops come around every second.

As it is, it looks at sensors every 5 s and at backfills every 30 s, and a kill test would be a test of patience.
"""

from dagster._daemon import controller, sensor
from dagster._daemon.cli import create_dagster_daemon_cli

if __name__ == "__main__":
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 1
    sensor.MIN_INTERVAL_LOOP_TIME = 1
    create_dagster_daemon_cli()()
