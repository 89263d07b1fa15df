"""What a tick of the recovery costs where thousands of runs stand in PostgreSQL, and what does not stop it.

Small in `make test`; on 5,000 runs and 10,000 tasks with RESILIENT_SOAK=1. Seconds are printed, and not asserted.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import postgres
import pytest
from scale_world import FULL, SMALL, Costs, ScaleWorld, counted_queries, scale_world

from benchmarks import recovery_tick
from benchmarks.rounds import Run
from dagster_resilient import RecoveryPolicy, build_recovery_sensor, sensors
from dagster_resilient import dagster_compat as compat
from dagster_resilient.briefs import LiveBriefs, StoredBriefs
from dagster_resilient.recovery import Rests
from dagster_resilient.state.fences import read_fence
from dagster_resilient.storage import keys

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]
SOAK = os.environ.get("RESILIENT_SOAK") == "1"
SCALE = FULL if SOAK else SMALL
QUIET = f"{SCALE.waiting} waiting for their backoff"
LOST = 20 if SOAK else 3
MOST_LISTS, MOST_READS, MOST_CURSOR = 20, 300, 100_000
# Those of each tick, and those for the given up runs that have their turn.
MOST_QUERIES = 12 + 10 * 6
# Of a re-execution, beside Dagster's own three for each planned partition of each asset, and those of adopted values.
MOST_QUERIES_OF_A_LAUNCH = 60


@pytest.fixture(scope="module")
def whole(postgres_server: postgres.PostgresServer) -> Iterator[ScaleWorld]:
    """The instance and the store, after a first tick."""
    with scale_world(postgres_server.schema_url(), SCALE) as made:
        made.tick()
        yield made


@pytest.fixture
def world(whole: ScaleWorld) -> ScaleWorld:
    """They, with nothing to recover."""
    assert show(whole.tick()).words == QUIET
    return whole


def show(costs: Costs) -> Costs:
    """Print them; they are read where a test fails, and in a soak."""
    print(costs)
    return costs


def test_a_quiet_tick_costs_pages(world: ScaleWorld) -> None:
    """One listing page per 1,000 heartbeats, one of the marks; a few reads; a few queries on kept connections."""
    costs = show(world.tick())
    beating = SCALE.live + SCALE.tasks
    assert costs.lists == -(-beating // 1000) + 1 <= MOST_LISTS
    assert costs.reads <= 1 + 10
    assert costs.writes == 1
    assert costs.queries <= MOST_QUERIES
    assert costs.connections <= 2
    assert costs.cursor < MOST_CURSOR


def test_a_tick_does_not_grow_with_the_runs_that_are_settled(world: ScaleWorld) -> None:
    """A hundred more runs of the day, of which nothing is to be done: as many queries and reads as before."""
    before = world.tick()
    world.add_history(finished=40, replaced=20, settled=20)
    world.tick()
    after = show(world.tick())
    assert (after.queries, after.reads, after.lists) == (before.queries, before.reads, before.lists)


def test_lost_runs_are_re_executed_in_the_tick_that_convicts_them(world: ScaleWorld) -> None:
    """All of them, in the queue when the tick ends; each costs its own plan, and the launch, and no look at others."""
    lost, quiet = world.take(LOST), world.tick()
    for run in lost:
        world.commit(run, 5)
    world.lose(lost)
    for _ in range(4):
        assert "lost" not in world.tick().words
    costs = show(world.tick())
    assert costs.words == f"{LOST} lost runs closed, {LOST} re-executed, {QUIET}"
    children = world.children(lost)
    assert {run.parent_run_id for run in children} == {run.run_id for run in lost}
    assert {run.status for run in children} == {dg.DagsterRunStatus.QUEUED}
    assert len(costs.submitted) == LOST
    planned = 2 * SCALE.length
    assert costs.lists - quiet.lists <= LOST * planned
    assert costs.reads - quiet.reads <= LOST * (planned + 20)
    assert costs.queries - quiet.queries <= LOST * (3 * planned + 3 * 5 + MOST_QUERIES_OF_A_LAUNCH)
    assert show(world.tick()).words == QUIET


def test_a_new_code_server_looks_once_at_each_run_and_does_nothing_twice(world: ScaleWorld) -> None:
    """Without what the old process remembered, and without the cursor: no launch, and the next tick is quiet."""
    before, runs = world.tick(), world.instance.get_runs_count()
    world.rests, world.cursor = Rests(), None
    costs = show(world.tick())
    assert costs.words == QUIET
    assert costs.submitted == []
    planned = 2 * SCALE.length  # whether a waiting run had got on decides for how long it waits
    assert costs.reads <= MOST_READS + (planned + 20) * SCALE.waiting
    assert world.instance.get_runs_count() == runs
    after = world.tick()
    assert (after.words, after.queries) == (QUIET, before.queries)


def test_one_bad_record_stops_nobody(world: ScaleWorld) -> None:
    """A damaged decision, a damaged mark of a hang, names that are none: the lost run beside them is recovered."""
    lost, hung = world.take(2)
    bad = world.settled[0]
    world.store.put(keys.verdict_key(bad.run_id, bad.run_id, "final"), b'{"schema_version": 1, "torn')
    for name in ("live/x", "live/%FF/step-0a.json", f"live/{lost.run_id}/worker-.json", f"live/{lost.run_id}/a/b.json"):
        world.store.beats[name] = lost.run_id
    world.store.put("hung/nothing", b"")
    mark = next(key for key in world.store.beats if key.startswith(f"live/{hung.run_id}/step-"))
    world.store.put(f"hung/{mark.removeprefix('live/')}", b"not a mark")
    world.lose([lost])
    world.rests = Rests()
    said = [world.tick().words for _ in range(5)]
    assert "1 lost runs closed" in said[-1]
    assert "1 re-executed" in said[-1]
    assert len(world.children([lost])) == 1
    assert world.children([bad, hung]) == []
    assert read_fence(world.records, hung.run_id) is None
    assert any("2 skipped on an error" in words for words in said), said
    world.store.delete([f"hung/{mark.removeprefix('live/')}", "hung/nothing"])
    world.store.delete([keys.verdict_key(bad.run_id, bad.run_id, "final")])
    world.settle(bad)
    world.rests = Rests()
    world.tick()


def test_a_damaged_brief_stops_nobody(world: ScaleWorld) -> None:
    """Where recovery plans with what run workers stored: of two lost runs the one with a whole brief is recovered."""
    bad, good = lost = world.take(2)
    briefs = LiveBriefs(world.repository, world.instance)
    for run in lost:
        world.records.create(keys.brief_key(run.run_id), briefs(run))
    world.store.put(keys.brief_key(bad.run_id), b'{"schema_version": 1, "torn')
    world.lose(lost)
    stored = StoredBriefs(world.records, world.instance.get_run_by_id)
    said = [world.tick(briefs=stored).words for _ in range(6)]
    assert any("1 skipped on an error" in words for words in said), said
    assert [run.parent_run_id for run in world.children(lost)] == [good.run_id]
    world.settle(bad)
    world.rests = Rests()
    world.tick()


def test_given_up_runs_are_armed_again_in_turns(world: ScaleWorld) -> None:
    """New data above them all: at most ten in a tick, and each of them once."""
    world.instance.report_runless_asset_event(dg.AssetMaterialization("flights"))
    at_once = RecoveryPolicy(first_wait=0.0)
    first, turns = show(world.tick(at_once)), -(-SCALE.given_up // 10)
    assert f"{min(10, SCALE.given_up)} re-executed" in first.words
    for _ in range(turns):
        world.tick(at_once)
    assert len(world.children(world.given_up)) == SCALE.given_up


def test_the_benchmark_measures_each_kind_of_tick(world: ScaleWorld, tmp_path: Path) -> None:
    """Seconds and requests of each, and its raw rounds."""
    with Run(tmp_path / "rounds.jsonl", settle=False) as run:
        rows = recovery_tick.measure(world, recovery_tick.QUICK, run)
    cases = ["quiet", "first of a process", "lost run until queued", "finds 2 lost runs"]
    assert [row.case for row in rows if row.section == recovery_tick.SECONDS] == cases
    assert {row.case for row in rows if row.section == recovery_tick.REQUESTS} == set(cases)
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert {line["case"]: len(line["submitted"]) for line in rounds} == dict(zip(cases, (0, 0, 1, 2), strict=True))


def test_the_sensor_remembers_from_tick_to_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ticks of a sensor in one process share what needs no look; two sensors do not."""
    seen: list[Rests] = []

    class Tick:
        def __init__(self, *_: Any, rests: Rests) -> None:
            seen.append(rests)

        def run(self) -> str:
            return "Nothing to recover."

    monkeypatch.setattr(sensors, "RecoveryTick", Tick)
    one, other = build_recovery_sensor(), build_recovery_sensor(name="other")
    with dg.DagsterInstance.ephemeral() as instance:
        for sensor in (one, one, other):
            sensor.evaluate_tick(dg.build_sensor_context(instance, resources={"resilient": "a resource"}))
    assert seen[0] is seen[1]
    assert seen[2] is not seen[0]


def test_connections_are_kept_for_a_tick_only(whole: ScaleWorld) -> None:
    """Inside the block one connection serves all queries, also after an error; then the instance is as it was."""
    storage: Any = whole.instance.run_storage
    engine = storage._engine
    kept: list[Any] = []

    def fail_inside() -> None:
        with counted_queries() as costs, compat.kept_connections(whole.instance):
            kept.append(storage._engine)
            for _ in range(3):
                whole.instance.get_runs(limit=1)
            assert (costs.queries, costs.connections) == (3, 1)
            raise TimeoutError("as a query that takes too long")

    with pytest.raises(TimeoutError):
        fail_inside()
    assert kept[0] is not engine
    assert kept[0].pool.checkedin() == 0
    assert storage._engine is engine
