"""`build_gave_up_sensor` on an instance whose runs were given up: whom it tells, and of what."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from recovery_world import AT_ONCE, World, an_asset

from dagster_resilient import RecoveryPolicy
from dagster_resilient.alerts import RunGaveUp, build_gave_up_sensor
from dagster_resilient.errors import ConfigurationError, StoreUnavailableError

NEVER = RecoveryPolicy(max_attempts=dict.fromkeys(RecoveryPolicy().max_attempts, 0))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A fresh instance and store."""
    with dg.instance_for_test() as instance:
        yield World(instance, str(tmp_path / "store"), an_asset("a"), an_asset("b", "a"))


@pytest.fixture
def told() -> list[RunGaveUp]:
    """What people were told."""
    return []


def look(world: World, tell: Callable[[RunGaveUp], None], cursor: str | None = None, **options: Any) -> Any:
    """Evaluate the sensor; return what it said, and its cursor."""
    sensor = build_gave_up_sensor(tell, **options)
    with dg.build_sensor_context(world.instance, resources={"resilient": world.resource}, cursor=cursor) as context:
        said = sensor.evaluate_tick(context)
    return said.skip_message, said.cursor


def test_the_alert_says_what_was_given_up_and_why(world: World, told: list[RunGaveUp]) -> None:
    """The run, its assets, the class of its failure, the attempts, and what is left undone."""
    run = world.a_run(asset_selection=frozenset({dg.AssetKey("b")}))
    world.tick(NEVER)
    look(world, told.append)
    (alert,) = told
    assert (alert.run.run_id, alert.assets, alert.failure_class, alert.attempts) == (run.run_id, ("b",), "crashed", 0)
    assert "left undone: redo b" in alert.reason


def test_a_run_that_cannot_be_re_executed_is_told_of(world: World, told: list[RunGaveUp]) -> None:
    """It never had an attempt; people must know all the same."""
    world.a_run(job_code_origin=None)
    world.tick(AT_ONCE)
    look(world, told.append)
    assert [(alert.failure_class, alert.attempts) for alert in told] == [("recovery", 0)]
    assert "cannot be re-executed" in told[0].reason


def test_the_record_and_not_the_cursor_keeps_it_from_telling_twice(world: World, told: list[RunGaveUp]) -> None:
    """A sensor that was reset has no cursor; nor has one that reads that of another version."""
    world.a_run()
    world.tick(NEVER)
    for cursor in (None, None, "of another version"):
        look(world, told.append, cursor)
    assert len(told) == 1


def test_two_sensors_each_tell(world: World, told: list[RunGaveUp]) -> None:
    """One writes to the channel, another calls the pager."""
    world.a_run()
    world.tick(NEVER)
    for name in ("channel", "pager", "pager"):
        look(world, told.append, name=name)
    assert len(told) == 2


def test_what_is_waiting_or_re_executed_alerts_nobody(world: World, told: list[RunGaveUp]) -> None:
    """Nobody is woken for a failure that recovery repairs."""
    world.a_run()
    assert look(world, told.append)[0] == "Nothing to tell."
    world.tick(AT_ONCE)
    look(world, told.append)
    assert told == []


def test_runs_of_other_code_locations_are_left_to_their_sensors(world: World, told: list[RunGaveUp]) -> None:
    """Where each team has a sensor of its own on a store that all share."""
    world.a_run()
    world.tick(NEVER)
    look(world, told.append, code_locations=["elsewhere"])
    assert told == []


def test_one_alert_that_cannot_be_sent_does_not_keep_back_the_others(world: World, told: list[RunGaveUp]) -> None:
    """It is tried again; the others were told of meanwhile, and are not told of again."""
    bad, good = world.a_run(), world.a_run()
    world.tick(NEVER)

    def tell(alert: RunGaveUp) -> None:
        if alert.run.run_id == bad.run_id:
            raise ConnectionError("no answer")
        told.append(alert)

    said, cursor = look(world, tell)
    assert said == "1 told, 1 could not be told"
    look(world, told.append, cursor)
    assert [alert.run.run_id for alert in told] == [good.run_id, bad.run_id]


def test_a_store_that_does_not_answer_delays_the_alert(
    world: World, told: list[RunGaveUp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensor says so, and tells at a later tick."""
    world.a_run()
    world.tick(NEVER)

    def refuse(*_: Any) -> Any:
        raise StoreUnavailableError("down")

    with monkeypatch.context() as outage:
        outage.setattr(type(world.resource.records), "get", refuse)
        assert "does not answer" in look(world, told.append)[0]
    look(world, told.append)
    assert len(told) == 1


def test_a_failure_of_long_ago_alerts_nobody(world: World, told: list[RunGaveUp]) -> None:
    """A sensor that is new does not tell of the past."""
    world.a_run()
    world.tick(NEVER)
    look(world, told.append, lookback=0.0)
    assert told == []


def test_a_look_back_into_the_future_is_refused() -> None:
    """At definition, by name."""
    with pytest.raises(ConfigurationError, match="lookback=-1"):
        build_gave_up_sensor(print, lookback=-1)
