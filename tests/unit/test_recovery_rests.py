"""Which failed runs need no look for now."""

from __future__ import annotations

import pytest

from dagster_resilient.recovery import Rests, rests


class Clock:
    """The module `time`, with hands."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that they look at."""
    clock = Clock()
    monkeypatch.setattr(rests, "time", clock)
    return clock


def test_an_unknown_run_is_due() -> None:
    """So a lost memory costs a look, and hides nothing."""
    assert Rests().is_due("a")


def test_a_run_rests_for_its_time(clock: Clock) -> None:
    """And is due from then on."""
    memory = Rests()
    memory.rest("a", 10.0)
    clock.now += 9.9
    assert not memory.is_due("a")
    clock.now += 0.1
    assert memory.is_due("a")


def test_a_settled_run_rests_for_good(clock: Clock) -> None:
    """Nothing that is said of the run later has to be looked for."""
    memory = Rests()
    memory.rest("a")
    clock.now += 1e9
    assert not memory.is_due("a")


def test_given_up_runs_have_their_turn_one_after_the_other() -> None:
    """At most so many at a time; whose last turn is the longest ago comes first."""
    memory = Rests()
    for run_id in "abc":
        memory.give_up(run_id)
    assert [memory.turn(2) for _ in range(3)] == [{"a", "b"}, {"c", "a"}, {"b", "c"}]
    assert not memory.is_due("a")


def test_a_look_in_vain_does_not_change_the_order() -> None:
    """A run that is given up again after its turn waits for the others."""
    memory = Rests()
    for run_id in "abc":
        memory.give_up(run_id)
    assert memory.turn(1) == {"a"}
    memory.give_up("a")
    assert memory.turn(1) == {"b"}


def test_errors_let_a_run_rest_longer_each_time(clock: Clock) -> None:
    """Ten seconds, then twice as many, a minute at most; after a look without an error from the beginning."""
    memory, waits = Rests(), []
    for _ in range(5):
        memory.fail("a")
        waits.append(next(n for n in range(100) if _due_after(memory, clock, n)))
    assert waits == [10, 20, 40, 60, 60]
    memory.rest("a", 0.0)
    memory.fail("a")
    assert not _due_after(memory, clock, 9)
    assert _due_after(memory, clock, 10)


def test_what_is_gone_is_forgotten() -> None:
    """Runs that are too old are remembered no longer, in none of the memories."""
    memory = Rests()
    memory.rest("a")
    memory.give_up("b")
    memory.fail("c")
    memory.keep({"b"})
    assert memory.is_due("a")
    assert memory.is_due("c")
    assert not memory.is_due("b")
    memory.keep(set())
    assert memory.turn(5) == set()


def _due_after(memory: Rests, clock: Clock, seconds: float) -> bool:
    clock.now += seconds
    try:
        return memory.is_due("a")
    finally:
        clock.now -= seconds
