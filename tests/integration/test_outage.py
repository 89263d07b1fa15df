"""The store is down under live tasks: nobody is killed, nobody is relaunched, work goes on."""

import os
import time
from pathlib import Path

import dagster as dg
import pytest

from dagster_resilient.storage.object_store import open_store
from dagster_resilient.values import load_value
from example_project.demo.cluster import Cluster, wait_for

SOAK = os.environ.get("RESILIENT_SOAK") == "1"
# The full count is three minutes with the default heartbeat: four TTLs and more. Of the short form, three.
HEARTBEAT, TTL, OUTAGE, STEPS = (10, 45, 180, 2_400) if SOAK else (1, 5, 16, 350)
LANES = [f"lane{n}" for n in range(5 if SOAK else 2)]
SUCCESS = dg.DagsterRunStatus.SUCCESS

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(900 if SOAK else 600)]


def lines(notes: Path, lane: str) -> list[list[str]]:
    """What a lane has noted: time, process, step."""
    file = notes / lane
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def test_an_outage_hurts_nobody(tmp_path, s3_server, s3_url, s3_options):
    """Several runs go on while the store is down for longer than any TTL, and each lane is computed once."""
    notes = tmp_path / "notes"
    notes.mkdir()
    environment = {
        "RESILIENT_URL": s3_url,
        "RESILIENT_HEARTBEAT_SECONDS": str(HEARTBEAT),
        "RESILIENT_TTL_SECONDS": str(TTL),
        "AWS_ACCESS_KEY_ID": s3_options["key"],
        "AWS_SECRET_ACCESS_KEY": s3_options["secret"],
        "AWS_ENDPOINT_URL": s3_options["endpoint_url"],
        "STEADY_NOTES": str(notes),
        "STEADY_STEPS": str(STEPS),
        "PYTHONPATH": str(Path(__file__).parents[1] / "locations"),
    }
    with Cluster(tmp_path / "cluster", "steady", environment) as cluster:
        for lane in LANES:
            cluster.launch("steady_job", {"dagster/partition": lane}, "{}")
        wait_for("all lanes", lambda: all(len(lines(notes, lane)) > 20 for lane in LANES) or None, 150)
        s3_server.kill()
        begun = time.monotonic()
        time.sleep(OUTAGE)  # the outage itself, not a wait for something
        ended = time.monotonic()
        s3_server.start()
        wait_for("the runs", lambda: all(run.is_finished for run in cluster.runs()) or None, 600 if SOAK else 150)
        runs = cluster.runs()
    assert [run.status for run in runs] == [SUCCESS] * len(LANES), "a run was killed or relaunched"
    for lane in LANES:
        noted = lines(notes, lane)
        assert len({process for _, process, _ in noted}) == 1, f"{lane} was computed by two processes"
        during = [step for at, _, step in noted if begun + 2 < float(at) < ended]
        assert len(during) > OUTAGE, f"{lane} stood still while the store was down"
        assert load_value(open_store(s3_url, s3_options), ("steady",), lane) == {"sum": sum(range(STEPS))}
