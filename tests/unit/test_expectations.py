"""What trainings and partition loops tell the heartbeat process to expect, and when they take that back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import training_doubles

from dagster_resilient import Task, open_task
from dagster_resilient.errors import ConfigurationError


class Told:
    """A sidecar that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def expect(self, task: str, limit: float | None = None, *, first: float | None = 1800.0) -> None:
        """Note it."""
        self.calls.append(("expect", task, limit, first))

    def relax(self, task: str) -> None:
        """Note it."""
        self.calls.append(("relax", task))

    def progress(self, **fields: Any) -> None:
        """Note the task."""
        self.calls.append(("report", fields["task"]))

    def fenced(self) -> str | None:
        """Nothing."""
        return None

    def watch(self, *_: Any, **__: Any) -> None:
        """Not looked at here."""

    unwatch = watch


@pytest.fixture
def told() -> Told:
    """What was told."""
    return Told()


@pytest.fixture
def task(told: Told, request: pytest.FixtureRequest) -> Task:
    """A task of three partitions in a store of this test alone."""
    opened = open_task(f"memory://{request.node.nodeid}", "t")
    attempt = dataclasses.replace(opened.attempt, sidecar=told)  # type: ignore[arg-type]
    return dataclasses.replace(opened, attempt=attempt, partition_keys=["a", "b", "c"])


@pytest.fixture
def world() -> training_doubles.World:
    """The store and the log of a training."""
    return training_doubles.World()


def test_a_loop_expects_progress_from_its_beginning_to_its_end(task: Task, told: Told) -> None:
    """Each partition reports; nothing is judged by default until three have been seen."""
    for part in task.partitions():
        part.save(part.key)
    assert told.calls == [
        ("expect", "t", None, None),
        *(("report", f"t[{key}]") for key in "abc"),
        ("relax", "t"),
    ]


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_loop_that_is_left_expects_nothing_more(task: Task, told: Told, error: type[Exception] | None) -> None:
    """By `break`, or by an exception."""

    def leave() -> None:
        for _ in task.partitions(hung_after=60):
            if error is not None:
                raise error
            break

    if error is None:
        leave()
    else:
        with pytest.raises(error):
            leave()
    assert told.calls == [("expect", "t", 60, None), ("report", "t[a]"), ("relax", "t")]


def test_a_training_within_a_loop_is_expected_by_itself(task: Task, told: Told) -> None:
    """Under its own name, of which the loop's is the beginning; its first step has the usual time."""
    for part in task.partitions():
        with part.training(hung_after=5.0) as session:
            for _ in session.steps(1):
                pass
        part.save(1)
        break
    inner = told.calls.index(("expect", "t[a]", 5.0, 1800.0))
    assert 0 < inner < told.calls.index(("relax", "t[a]")) < told.calls.index(("relax", "t"))


def test_progress_is_expected_within_the_loop_only(world: training_doubles.World) -> None:
    """What stands before and behind it in the block may take its time."""
    with world.session(hung_after=7) as session:
        assert world.last.expected == []
        for _ in session.steps(2):
            assert world.last.expected == [7]
        assert world.last.expected == [7, "nothing"]
        for _ in session.steps(3):
            assert world.last.expected == [7, "nothing", 7]
    assert world.last.expected[3:] == ["nothing", "nothing"]


def test_a_loop_that_somebody_holds_expects_nothing_behind_the_block(world: training_doubles.World) -> None:
    """Left by `break`, with a variable that keeps the generator."""
    with world.session() as session:
        loop = session.steps(3)
        next(loop)
    assert world.last.expected == [None, "nothing"]


@pytest.mark.parametrize("limit", [0, -1, float("inf")])
def test_a_limit_that_is_none_is_refused_before_any_work(
    task: Task, world: training_doubles.World, limit: float
) -> None:
    """In trainings and loops alike."""
    with pytest.raises(ConfigurationError, match="hung_after"):
        world.session(hung_after=limit)
    with pytest.raises(ConfigurationError, match="hung_after"):
        next(task.partitions(hung_after=limit))
