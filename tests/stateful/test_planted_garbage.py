"""The search finds each bug that garbage collection and retirement guard against, when we plant it in the real code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from actors import Role, collector, publisher, retirer, sensor, trainer, trimmer
from moves import Scenario

from dagster_resilient.state import garbage as garbage_module
from dagster_resilient.state import retire as retire_module
from dagster_resilient.state.garbage import Collector
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import Entry

Expect = Callable[..., None]

COLLECTED = {
    "zombie": Role("R1", "a", publisher(2)),
    "stranger": Role("Q", "q", publisher()),
    "collector": Role("C", "c", collector(2)),
}


def test_age_alone_as_a_proof_is_found(expect: Expect) -> None:
    """A writer that was stopped before its commit wakes, and commits what was deleted."""
    scenario = Scenario(COLLECTED, faults=(), data=True)
    expect(scenario, lambda patch: patch.setattr(garbage_module, "_superseded", lambda *_: True), "dangling")


def test_a_fence_without_an_entry_behind_it_is_found(expect: Expect) -> None:
    """A commit that looked for the fence just before it was there lands after it."""
    scenario = Scenario(COLLECTED, faults=(), data=True)
    expect(scenario, lambda patch: patch.setattr(garbage_module, "_sealed", NumberedLog.head), "dangling")


def test_a_generation_of_ones_own_as_superseded_is_found(expect: Expect) -> None:
    """The owner of the head's generation has written a checkpoint, and not committed it yet."""

    def superseded(head: Entry, generation: int, attempt: int, root: str) -> bool:
        return 0 < generation <= head.generation

    roles = {"owner": Role("R1", "a", trainer(2)), "collector": Role("C", "c", collector(2))}
    scenario = Scenario(roles, faults=(), data=True)
    expect(scenario, lambda patch: patch.setattr(garbage_module, "_superseded", superseded), "dangling")


def test_a_log_that_is_read_before_the_data_is_listed_is_found(expect: Expect) -> None:
    """What was committed in between is in the listing, and not among what the log refers to."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        collect, run = Collector._collect_task, Collector.run
        heads: dict[int, Any] = {}

        def first_the_log(self: Collector) -> Any:
            log = NumberedLog(self._records, "tasks/model/log/%-")
            head = log.head()
            heads[id(self)] = (head, None if head is None else self._referred(log, head))
            return run(self)

        def judge(self: Collector, task: Any, writes: Any) -> None:
            head, referred = heads[id(self)]
            if head is not None:
                patch.setattr(NumberedLog, "head", lambda _: head)
                patch.setattr(Collector, "_referred", lambda *_: referred)
                try:
                    collect(self, task, writes)
                finally:
                    patch.setattr(NumberedLog, "head", original)
                    patch.setattr(Collector, "_referred", referring)

        original, referring = NumberedLog.head, Collector._referred
        patch.setattr(Collector, "run", first_the_log)
        patch.setattr(Collector, "_collect_task", judge)
        patch.setattr(garbage_module, "_sealed", original)

    roles = {
        "publisher": Role("R1", "a", publisher(2)),
        "newer try": Role("R1", "a", publisher(), after="+publisher"),
        "collector": Role("C", "c", collector(2)),
    }
    expect(Scenario(roles, faults=(), data=True), plant, "dangling")


def test_references_of_the_value_alone_are_found(expect: Expect) -> None:
    """A checkpoint is as much in use as a value."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        referred = Collector._referred

        def of_the_value(self: Collector, log: NumberedLog, head: Entry) -> Any:
            return referred(self, log, head.model_copy(update={"checkpoints": ()}))

        patch.setattr(Collector, "_referred", of_the_value)

    roles = {"owner": Role("R1", "a", trainer(2)), "collector": Role("C", "c", collector(2))}
    expect(Scenario(roles, faults=(), data=True), plant, "dangling")


def test_a_tombstone_without_a_new_generation_is_found(expect: Expect) -> None:
    """The training that held the task goes on behind the tombstone, from checkpoints that were given up."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        tombstone = retire_module._tombstone

        def same_generation(head: Entry, by: str) -> Entry:
            starts = head.generation_starts
            return tombstone(head, by).model_copy(update={"generation": head.generation, "generation_starts": starts})

        patch.setattr(retire_module, "_tombstone", same_generation)

    roles = {
        "owner": Role("R1", "a", trainer(3, publishes=False)),
        "retirer": Role("T", "t", retirer()),
        "taker": Role("R2", "a", trainer(1, publishes=False), after="+owner"),
    }
    expect(Scenario(roles, faults=(), timed=False), plant, "given up")


def test_a_tombstone_that_forgets_the_tries_is_found(expect: Expect) -> None:
    """An older try would commit after a newer one, with the tombstone in between."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        tombstone = retire_module._tombstone
        forget = {"attempts": {}}
        patch.setattr(retire_module, "_tombstone", lambda head, by: tombstone(head, by).model_copy(update=forget))

    roles = {
        "zombie": Role("R1", "a", publisher()),
        "second try": Role("R1", "a", publisher(), after="+zombie"),
        "retirer": Role("T", "t", retirer()),
        "sensor": Role("S", "s", sensor("none")),
        "trimmer": Role("G", "g", trimmer(1)),
    }
    expect(Scenario(roles, faults=(), data=True), plant, "older try")
