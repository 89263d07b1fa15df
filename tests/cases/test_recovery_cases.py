"""The cases of ``shared/cases/recovery.md`` (I01 to I25): the sensor, tick by tick.

What is in a re-execution (I11 to I15, I21, I25) has a file of its own. `PROVEN_ELSEWHERE` names the tests of other
files which prove a row, or the rest of it.
"""

import ast
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from recovery_place import Place
from recovery_world import FAILURE, JOB, QUEUE, At, Ticking, World, an_asset, eventually, selected

from dagster_resilient import RecoveryPolicy, ResilientResource, recover
from dagster_resilient.errors import FencedError
from dagster_resilient.recovery import Observation, Sighting, observe
from dagster_resilient.state.fences import read_fence

TESTS = Path(__file__).parent.parent
ROWS = [f"I{n:02}" for n in (1, 2, 3, 4, 6, 7, 9, 11, 12, 13, 15, 17, 18, 19, 21, 22, 23, 25)]
PROVEN_ELSEWHERE = {
    "I03": [
        "integration/test_sidecar_faults.py::test_a_parent_that_holds_the_gil_beats_on",
        "integration/test_demo.py::test_both_losses_are_recovered_and_the_result_is_equal",
    ],
    "I07": ["integration/test_recovery_tick.py::test_ticks_that_look_again_launch_nothing_more"],
    "I12": ["integration/test_recovery_tick.py::test_what_is_done_is_not_selected"],
    "I13": [
        "integration/test_recovery_tick.py::test_exactly_what_is_missing_is_re_executed",
        "integration/test_reexecution.py::test_only_the_selected_assets_and_partitions_run",
    ],
    "I18": [
        "integration/test_recovery_tick.py::test_a_cancelled_run_stays_cancelled",
        "integration/test_dagster_compat.py::test_a_cancel_is_known_even_where_the_run_then_failed",
    ],
    "I22": [
        "integration/test_executor.py::test_a_resumed_run_does_not_repeat_what_succeeded",
        "integration/test_executor.py::test_a_resumed_run_with_nothing_left_ends_in_success",
    ],
    "I23": ["integration/test_reexecution_corners.py::test_a_run_that_was_created_and_not_queued_is_queued"],
}
LETTERS = dg.StaticPartitionsDefinition(list("abcdef"))
A, B, C = an_asset("a"), an_asset("b", "a"), an_asset("c", "b")
STARTED, STARTING, QUEUED = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.QUEUED


def functions_of(file: Path) -> set[str]:
    """The names of the tests that a file holds."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_has_a_test(row: str) -> None:
    """One of the files here, or those named above; each of them is there."""
    named = [node.split("::") for node in PROVEN_ELSEWHERE.get(row, [])]
    assert [one for one in named if one[1] not in functions_of(TESTS / one[0])] == []
    here = {name for file in Path(__file__).parent.glob("test_recovery_*.py") for name in functions_of(file)}
    assert named or any(f"_{row.lower()}_" in name for name in here)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A fresh instance and store, and three assets in a chain."""
    with dg.instance_for_test(overrides=QUEUE) as instance:
        yield World(instance, str(tmp_path / "store"), A, B, C)


# ---- I04, I06, I07: how often


def test_i04_dagsters_retry_comes_first(world: World) -> None:
    """I04: 0 while Dagster will retry, 0 while its retry is there, 1 when that failed and no other will follow."""
    run = world.a_run(tags={"dagster/will_retry": "true"})
    world.tick()
    assert world.children(run) == []
    lineage = {"dagster/parent_run_id": run.run_id, "dagster/root_run_id": run.run_id}
    retry = world.a_run(
        STARTED, parent_run_id=run.run_id, root_run_id=run.run_id, tags={"dagster/is_resume_retry": "true", **lineage}
    )
    world.instance.add_run_tags(run.run_id, {"dagster/auto_retry_run_id": retry.run_id})
    world.tick()
    assert world.children(run) == [retry]
    world.instance.add_run_tags(retry.run_id, {"dagster/will_retry": "false"})
    world.fail(retry)
    for _ in range(3):
        world.tick()
    assert [one.run_id for one in world.children(run)] == [retry.run_id]
    assert len(world.children(retry)) == 1


THRICE = RecoveryPolicy(max_attempts={"crashed": 3}, first_wait=0.0)


def test_i06_a_permanent_failure_is_given_up_by_name(world: World) -> None:
    """I06: 50 ticks make 3 attempts and one visible word, which names asset and partition."""
    world.deploy(an_asset("a", partitions=LETTERS))
    last = world.until_it_always_fails(world.a_run(tags={"dagster/partition": "c"}), 50, THRICE)
    assert len(world.instance.get_runs()) == 1 + 3
    verdict = world.final(last)
    assert verdict is not None
    assert verdict.action == "gave up"
    assert "a[c]" in verdict.reason
    assert world.said(last, "gave up") == 1


def test_i06_new_code_arms_it_again(world: World) -> None:
    """I06: and a whole count of attempts with it; the same code does not."""
    world.deploy(an_asset("a", partitions=LETTERS))
    last = world.until_it_always_fails(world.a_run(tags={"dagster/partition": "c"}), 6, THRICE)
    world.deploy(an_asset("a", partitions=LETTERS, version="2"))
    last = world.until_it_always_fails(last, 10, THRICE)
    assert len(world.instance.get_runs()) == 1 + 3 + 3
    assert world.said(last, "gave up") == 1


@pytest.mark.parametrize(("partition", "runs"), [(None, 7), ("c", 7), ("d", 4)])
def test_i06_new_data_above_arms_it_again(world: World, partition: str | None, runs: int) -> None:
    """I06: of the whole asset above, or of the same partition; another partition has no part in the failure."""
    above = None if partition is None else LETTERS
    world.deploy(an_asset("above", partitions=above), an_asset("a", "above", partitions=LETTERS))
    run = world.a_run(tags={"dagster/partition": "c"}, asset_selection=frozenset({dg.AssetKey("a")}))
    last = world.until_it_always_fails(run, 6, THRICE)
    world.instance.report_runless_asset_event(dg.AssetMaterialization("above", partition=partition))
    world.until_it_always_fails(last, 10, THRICE)
    assert len(world.instance.get_runs()) == runs


def test_i07_two_failures_of_one_partition_in_one_tick(world: World) -> None:
    """I07: one run per failure; runs of one group that failed are one failure."""
    world.deploy(an_asset("a", partitions=LETTERS))
    tags = {"dagster/partition": "c"}
    one, other = world.a_run(tags=tags), world.a_run(tags=tags)
    lineage = {"dagster/parent_run_id": one.run_id, "dagster/root_run_id": one.run_id}
    again = world.a_run(tags=tags | lineage, parent_run_id=one.run_id, root_run_id=one.run_id)
    for _ in range(3):
        world.tick()
        world.cursor = None
    assert [run.run_id for run in world.children(one)] == [again.run_id]
    assert (len(world.children(again)), len(world.children(other))) == (1, 1)


# ---- I23: a tick that dies


class Died(BaseException):
    """What ends a code server."""


@pytest.mark.parametrize("at", ["fence", "create_run", "submit_run", "records"])
@pytest.mark.parametrize("call", [1, 2])
def test_i23_a_tick_that_dies_is_made_up_for(world: World, monkeypatch: pytest.MonkeyPatch, at: str, call: int) -> None:
    """I23, I07: in the middle of one of two runs; the next tick launches each exactly once."""
    runs = [world.a_run() for _ in range(2)]
    calls = iter(range(1, 100))

    def dies(real: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                raise Died
            return real(*args, **kwargs)

        return wrapped

    owner, name = {
        "fence": (recover, "fence_run"),
        "records": (type(world.resource.records), "create"),
    }.get(at, (world.instance, at))
    with monkeypatch.context() as dying:
        dying.setattr(owner, name, dies(getattr(owner, name)))
        with pytest.raises(Died):
            world.tick()
    for _ in range(2):
        world.tick()
    assert [world.only_child(run).status for run in runs] == [QUEUED] * 2


# ---- I09, I17: many


def test_i09_more_than_a_tick_can_do(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """I09: each tick ends in time, and over the ticks all are requested, none twice and none lost."""
    monkeypatch.setattr("dagster_resilient.tick._RUNS_PER_QUERY", 5)
    monkeypatch.setattr("dagster_resilient.tick._LAUNCHES_PER_TICK", 8)
    world.deploy(an_asset("a", partitions=LETTERS))
    runs = [world.a_run(tags={"dagster/partition": "abcdef"[n % 6]}) for n in range(18)]
    ticks = 0
    while "left for the next tick" in world.tick() or not ticks:
        ticks += 1
        assert ticks < 6
    assert ticks >= 2
    assert [len(world.children(run)) for run in runs] == [1] * 18


def test_i09_a_tick_ends_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """I09: a slow store makes more ticks, not longer ones, and each of them gets further."""
    runs = [world.a_run() for _ in range(8)]
    monkeypatch.setattr("dagster_resilient.tick.time", Ticking(10.0))
    done = [0]
    while done[-1] < len(runs):
        world.tick()
        done.append(sum(len(world.children(run)) for run in runs))
        assert done[-2] < done[-1] <= done[-2] + 4
    monkeypatch.undo()
    world.tick()
    assert [len(world.children(run)) for run in runs] == [1] * 8


def test_i17_the_cursor_stays_small() -> None:
    """I17: 5,000 live runs, all silent or all suspect, fit in 100 KB; who is not remembered is not convicted early."""
    ids = [str(uuid.uuid4()) for _ in range(5_000)]
    options: dict[str, Any] = {"ttl": 45.0, "interval": 10.0, "start_allowance": 300.0}
    for beat in (None, 0.0):
        memory, lost = Observation(), 0
        for now in range(0, 400, 40):
            look = observe(memory, float(now), [Sighting(run_id, beat) for run_id in ids], **options)
            memory, lost = look.observation, lost + len(look.lost)
            assert len(memory.model_dump_json()) < 100_000
            assert len(look.lost) == 0 or now > 45
        assert lost > 0


def test_i17_a_tick_launches_a_limited_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: the others come with the next tick."""
    monkeypatch.setattr("dagster_resilient.tick._LAUNCHES_PER_TICK", 3)
    runs = [world.a_run() for _ in range(5)]
    assert "3 re-executed" in world.tick()
    assert "2 re-executed" in world.tick()
    assert [len(world.children(run)) for run in runs] == [1] * 5


# ---- I19: a start that takes too long


def test_i19_a_run_that_never_starts_and_then_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: one request; its worker, which comes alive after all, is fenced."""
    run, now = world.a_run(STARTING), [0.0]
    monkeypatch.setattr("dagster_resilient.tick.store_now", lambda *_: At(now[0]))
    policy = RecoveryPolicy(first_wait=0.0, start_allowance=60.0)
    while world.now(run).status is STARTING:
        world.tick(policy)
        now[0] += 20.0
        assert now[0] < 200.0
    assert now[0] > 60.0
    world.tick(policy)
    child = world.only_child(run)
    world.instance.report_engine_event("late", run)
    with pytest.raises(FencedError):
        world.commit(run, "a")
    for status in (dg.DagsterEventType.PIPELINE_START, dg.DagsterEventType.PIPELINE_FAILURE):
        event = dg.DagsterEvent(event_type_value=status.value, job_name=JOB)
        world.instance.report_dagster_event(event, run.run_id)
        world.tick(policy)
    assert [one.run_id for one in world.instance.get_runs()] == [child.run_id, run.run_id]


# ---- I01, I02, I03: real processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "outputs"), [("lost in compute", {"first"}), ("lost in handle_output", {"first", "second"})]
)
def test_i01_i02_a_lost_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, outputs: set[str]) -> None:
    """I01, I02: one request, of `second` in partition a alone, though its output is in the log; the run is closed."""
    place = Place(tmp_path, monkeypatch)
    run = place.execute(mode, **{"dagster/partition": "a"})
    assert run.status is STARTED
    events = place.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_OUTPUT)
    assert {event.step_key for event in events} == outputs
    child = place.ticks_until_relaunched(run)
    assert (selected(child), child.tags["dagster/partition"]) == ({"second"}, "a")
    assert place.world.now(run).status is FAILURE
    failures = place.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.PIPELINE_FAILURE)
    assert ["sent no heartbeat" in (event.get_dagster_event().message or "") for event in failures] == [True]
    place.instance.dispose()


# A run's worker and step in one process. It holds the GIL in one long call of C, waits for a line, and commits.
WORKER = """
import sys
from dagster_resilient.errors import FencedError
from dagster_resilient.state.heartbeat import ensure_sidecar
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.task import begin_attempt
from dagster_resilient.values import store_value

url, run_id = sys.argv[1:]
store = open_store(url)
ensure_sidecar(store, run_id=run_id, root=run_id, role="worker", instance_id="i", interval=0.3, ttl=2.0)
attempt = begin_attempt(store, run_id=run_id, root=run_id, series=run_id, instance_id="i", interval=0.3, ttl=2.0)
print("ready", flush=True)
for line in sys.stdin:
    sum(range(int(line)))
    try:
        store_value(attempt.durable(("a",), None, "code:1"), 1)
        print("committed", flush=True)
    except FencedError:
        print("fenced", flush=True)
"""


@pytest.mark.slow
def test_i03_busy_is_not_lost_and_stopped_is_fenced(world: World) -> None:
    """I03: no request while the worker holds the GIL for more than its TTL; one after a stop, and the woken is fenced.

    The heartbeat is a process of its own, so even a hold of more than the timeout, which the row does not ask for,
    makes nobody suspect.
    """
    world.resource = ResilientResource(url=world.url, heartbeat_seconds=0.3, ttl_seconds=2)
    run = world.a_run(STARTED)
    command = [sys.executable, "-c", WORKER, world.url, run.run_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            said: list[str] = []
            threading.Thread(target=said.extend, args=[worker.stdout], daemon=True).start()
            eventually(lambda: said)
            print(200_000_000, file=worker.stdin, flush=True)
            eventually(lambda: (world.tick(), said[1:])[1])
            assert (said, world.now(run).status, world.children(run)) == (["ready\n", "committed\n"], STARTED, [])
            worker.send_signal(signal.SIGSTOP)
            eventually(lambda: world.tick() and world.children(run))
            world.tick()
            assert world.now(run).status is FAILURE
            assert selected(world.only_child(run)) == {"b", "c"}
            fence = read_fence(world.records, run.run_id)
            assert fence is not None
            assert fence.failure_class == "lost"
            worker.send_signal(signal.SIGCONT)
            print(0, file=worker.stdin, flush=True)
            eventually(lambda: said[2:])
            assert said[2] == "fenced\n"
        finally:
            worker.kill()
