"""The search finds each bug that the protocol's rules are there to prevent, when we plant it in the real code.

A check that never fails proves nothing. Each test here breaks one rule of the design, by patching the real code, and
asks the search for an interleaving that breaks a promise by it; then it plays the same examples with the rule in place.
The actors are those that the bug needs. Where another rule covers the broken one, the docstring says which, and that
one is broken as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import actors as actors_module
import broken_tasks
import pytest
from actors import Role, publisher, reader, sensor, trainer, trimmer
from moves import END, Disturb, Proceed, Scenario
from scheduler import CREATE_FAULTS, Fault

from dagster_resilient.errors import ObjectNotFoundError
from dagster_resilient.state import task as task_module
from dagster_resilient.state.fences import claim_attempt
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import Claim, Entry, Fence
from dagster_resilient.state.store import ObjectRecords, RecordStore
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.manifest import Record, StoredObject

Expect = Callable[..., None]


def _use(patch: pytest.MonkeyPatch, kind: type[DurableTask]) -> None:
    patch.setattr(actors_module, "DurableTask", kind)


# ---- finding the head


def _walk(log: NumberedLog, known: Entry | None) -> Entry | None:
    newest = known
    while following := log.get((newest.n if newest else 0) + 1):
        newest = following
    return newest


def test_walking_forward_from_a_known_number_is_found(expect: Expect) -> None:
    """The head is found by LIST. Walking on from entry 1, or from the last known one, ends at the first trimmed number.

    Seen by a reader, as a head that went back, and by a taker, that begins a generation which has an owner.
    """

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(NumberedLog, "head", lambda log, **_: _walk(log, None))
        patch.setattr(NumberedLog, "stands", lambda log, entry: _walk(log, entry) == entry)

    roles = {
        "owner": Role("R1", "a", trainer(3, publishes=False)),
        "taker": Role("R2", "a", trainer(2, publishes=False), after="+owner"),
        "trimmer": Role("G", "g", trimmer(4)),
    }
    expect(Scenario(roles, faults=(), timed=False), plant, "lost", "two owners", "stale read")


def test_an_empty_listing_that_is_believed_by_readers_is_found(expect: Expect) -> None:
    """A listing that races with deletes comes back empty. A reader that believes it redoes what is finished.

    A writer that believes it is covered: it would create entry 1, which is kept for ever.
    """

    def head(log: NumberedLog, **_: Any) -> Entry | None:
        return log.get(newest) if (newest := max(log.numbers(), default=0)) else None

    roles = {
        "owner": Role("R1", "a", trainer(3, publishes=False)),
        "trimmer": Role("G", "g", trimmer(1)),
        "reader": Role("D", "d", reader(2)),
    }
    scenario = Scenario(roles, faults=(Fault.EMPTY_LISTING,), timed=False)
    expect(scenario, lambda patch: patch.setattr(NumberedLog, "head", head), "stale read")


# ---- leased writers

_TAKERS = {
    "owner": Role("R1", "a", trainer(3, publishes=False)),
    "taker": Role("R2", "a", trainer(1, publishes=False), after="+owner"),
    "second taker": Role("R3", "a", trainer(1, publishes=False), after="+owner"),
    "trimmer": Role("G", "g", trimmer(4)),
}


def test_no_listing_after_acquire_is_found(expect: Expect) -> None:
    """A sleepy taker creates a number that was trimmed meanwhile, and owns a generation that has an owner."""
    stands = NumberedLog.stands

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(NumberedLog, "stands", lambda log, entry: entry.kind == "acquire" or stands(log, entry))

    scenario = Scenario(_TAKERS, faults=(), timed=False, prelude=(Proceed("owner", ("call", 4)),))
    expect(scenario, plant, "two owners", "lost")


def test_an_empty_listing_that_is_believed_after_acquire_is_found(expect: Expect) -> None:
    """As without the listing: it must show at least the entry that was just created, or be repeated.

    The story begins where one taker sleeps before its create, the owner and the other taker have moved on, and trimming
    has begun.
    """

    def stands(log: NumberedLog, entry: Entry) -> bool:
        if max(log.numbers(), default=0) <= entry.n:
            return True
        following = log.get(entry.n + 1)
        return following is not None and following.parent_op == entry.op

    prelude = (
        Proceed("owner", ("call", 4)),
        Proceed("taker", ("CREATE", 1)),
        Proceed("owner", END),
        Proceed("second taker", END),
        Proceed("trimmer", ("DELETE", 1)),
    )
    scenario = Scenario(_TAKERS, faults=(Fault.EMPTY_LISTING,), timed=False, crashes=False, prelude=prelude)
    expect(scenario, lambda patch: patch.setattr(NumberedLog, "stands", stands), "two owners")


def test_trimming_the_first_entries_of_generations_is_found(expect: Expect) -> None:
    """A superseded owner's next create meets the free number of its successor's first entry, and is acknowledged.

    Leased commits have no LIST behind them. The rule that they have one after half an hour covers this where clocks can
    be trusted; the scenario has no clocks.
    """
    trim = NumberedLog.trim

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            NumberedLog, "trim", lambda log, head: trim(log, head.model_copy(update={"generation_starts": ()}))
        )

    expect(Scenario(_TAKERS, faults=(), timed=False), plant, "lost", "two owners")


_SLEEPER = {
    "owner": Role("R1", "a", trainer(2, publishes=False)),
    "stranger": Role("Q", "q", publisher(4)),
    "trimmer": Role("G", "g", trimmer(4)),
}


def test_no_second_look_after_half_an_hour_is_found(expect: Expect) -> None:
    """An owner slept while values of others came behind its last entry, and were trimmed: its create succeeds there.

    Values begin no generation, so the kept first entries do not help.
    """
    scenario = Scenario(_SLEEPER, faults=(), crashes=False, prelude=(Proceed("owner", ("CREATE", 2)),))
    expect(scenario, lambda patch: patch.setattr(task_module, "_FRESH_SECONDS", float("inf")), "lost")


def test_no_listing_after_a_value_is_found(expect: Expect) -> None:
    """A lease-less writer that slept between its reads and its create needs the LIST behind it each time.

    The story begins where it sleeps so.
    """
    stands = NumberedLog.stands

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(NumberedLog, "stands", lambda log, entry: entry.kind == "value" or stands(log, entry))

    roles = {
        "zombie": Role("Z", "z", publisher()),
        "stranger": Role("Q", "q", publisher(4)),
        "trimmer": Role("G", "g", trimmer(4)),
    }
    prelude = (Proceed("stranger", ("call", 3)), Proceed("zombie", ("CREATE", 1)))
    expect(Scenario(roles, faults=(), crashes=False, prelude=prelude), plant, "lost")


def test_measuring_the_age_of_the_parent_from_its_reply_is_found(expect: Expect) -> None:
    """An owner that slept between a request and its reply must count from the request, or it looks too late.

    The story begins where it sleeps so, in its acquire.
    """
    prelude = (Disturb("owner", ("LIST", 2), 0),)
    scenario = Scenario(_SLEEPER, faults=(Fault.SLOW_REPLY,), crashes=False, prelude=prelude)
    expect(scenario, lambda patch: _use(patch, broken_tasks.Late), "lost")


def test_check_then_write_is_found(expect: Expect) -> None:
    """Only the store can decide who creates an entry. A look before the write lets both write it."""

    def create(records: ObjectRecords, key: str, record: Record) -> bool:
        try:
            records._store.get(key)
        except ObjectNotFoundError:
            records._store.put(key, record.to_bytes())
            return True
        return False

    roles = {name: Role(name, name, publisher()) for name in ("first", "second")}
    scenario = Scenario(roles, faults=())
    expect(scenario, lambda patch: patch.setattr(ObjectRecords, "create", create), "one number twice", "lost")


def test_numbers_that_begin_again_are_found(expect: Expect) -> None:
    """A log that is deleted as a whole gives its numbers to a new owner, and an old owner's number is free again.

    What covers this is that no code deletes the head or entry 1.
    """

    def retire(log: NumberedLog, head: Entry) -> list[int]:
        numbers = sorted(log.numbers())
        log._records.delete([log.key(n) for n in numbers])
        return numbers

    roles = {
        "owner": Role("R1", "a", trainer(3, publishes=False)),
        "stranger": Role("P", "p", trainer(1, publishes=False)),
        "trimmer": Role("G", "g", trimmer(1)),
    }
    scenario = Scenario(roles, faults=(), timed=False, retires=True)
    expect(scenario, lambda patch: patch.setattr(NumberedLog, "trim", retire), "lost", "went back")


# ---- fences


def _fenced_by(first: str) -> dict[str, Role]:
    return {
        "zombie": Role("R1", "a", publisher()),
        "sensor": Role("S", "s", sensor("R1")),
        "successor": Role("R2", first, publisher(), after="sensor"),
    }


def test_reading_the_fence_before_the_head_is_found(expect: Expect) -> None:
    """A run is fenced between its two reads, and its value lands on its successor's.

    Where the successor is of the same lineage, the rule of attempts covers it. Here the user starts anew.
    """
    expect(Scenario(_fenced_by("u"), faults=()), lambda patch: _use(patch, broken_tasks.FenceFirst), "fenced run")


def test_reading_the_fence_before_the_head_without_attempts_is_found(expect: Expect) -> None:
    """The same within one lineage, with the covering rule broken as well."""
    scenario = Scenario(_fenced_by("a"), faults=())
    expect(scenario, lambda patch: _use(patch, broken_tasks.NoAttempts), "fenced run", "older try")


def _no_fence(records: RecordStore, run_id: str) -> Fence | None:
    return None


@pytest.mark.parametrize("successor", ["u", "a"])
def test_no_look_at_the_fence_is_found(expect: Expect, successor: str) -> None:
    """A fenced run that nobody stops overwrites what its successor has committed.

    Within one lineage ("a") the rule of attempts covers it only where the fenced run claimed its try first: a run that
    was declared lost and then starts after all has the higher number.
    """
    scenario = Scenario(_fenced_by(successor), faults=())
    expect(scenario, lambda patch: patch.setattr(task_module, "read_fence", _no_fence), "fenced run")


def test_an_owner_that_writes_behind_its_successors_value_is_found(expect: Expect) -> None:
    """A successor needs no lease for a value. The owner's next commit must see that it is superseded, or fenced."""
    roles = _fenced_by("u") | {"zombie": Role("R1", "a", trainer(2, publishes=False))}
    expect(Scenario(roles, faults=()), lambda patch: _use(patch, broken_tasks.Stubborn), "fenced run")


# ---- attempts


def _tries(**more: Role) -> dict[str, Role]:
    return {"zombie": Role("R1", "a", publisher()), "re-execution": Role("R2", "a", publisher()), **more}


def test_no_rule_of_attempts_is_found(expect: Expect) -> None:
    """A step that its user re-executed, and that nobody fenced, overwrites the newer value."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(DurableTask, "_refuse_superseded", lambda task, head: None)

    expect(Scenario(_tries(), faults=()), plant, "older try")


def test_a_rule_of_attempts_for_the_heads_writer_only_is_found(expect: Expect) -> None:
    """An unrelated run in between hides the newer try: each entry must carry the highest attempt of every lineage."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def refuse(task: DurableTask, head: Entry | None) -> None:
            if head is not None and list(head.attempts)[-1] == task.claim.root:
                original(task, head)

        patch.setattr(DurableTask, "_refuse_superseded", refuse)

    original = DurableTask._refuse_superseded
    roles = _tries(stranger=Role("Q", "q", publisher()))
    expect(Scenario(roles, faults=()), plant, "older try")


def test_tries_of_one_run_that_share_a_number_are_found(expect: Expect) -> None:
    """Dagster retries a step inside its run, which no fence tells apart: each try must claim a number of its own."""

    def claim(records: RecordStore, *, root: str, run_id: str, series: str) -> Claim:
        return claim_attempt(records, root=root, run_id=run_id, series=series).model_copy(update={"attempt": 1})

    roles = {
        "zombie": Role("R1", "a", publisher()),
        "second try": Role("R1", "a", publisher(), after="+zombie"),
    }
    scenario = Scenario(roles, faults=())
    expect(scenario, lambda patch: patch.setattr(actors_module, "claim_attempt", claim), "older try")


def test_an_owner_that_adopts_a_newer_trys_entry_is_found(expect: Expect) -> None:
    """An owner's late commit is carried on by a newer try's value. It is acknowledged; the owner goes no further."""
    roles = {
        "owner": Role("R1", "a", trainer(2, publishes=False)),
        "re-execution": Role("R2", "a", publisher(), after="+owner"),
    }
    scenario = Scenario(roles, faults=CREATE_FAULTS, crashes=False)
    expect(scenario, lambda patch: _use(patch, broken_tasks.Adopting), "older try")


# ---- "fenced", said of what is committed

_TAKEN_OVER = {
    "owner": Role("R1", "a", trainer(1, publishes=False)),
    "taker": Role("R2", "a", trainer(1, publishes=False), after="+owner"),
}


def test_fenced_for_a_checkpoint_that_the_head_holds_is_found(expect: Expect) -> None:
    """A commit whose reply was lost, and which the successor carries on, was a success."""
    commit = DurableTask._commit

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            DurableTask, "_commit", lambda task, kind, change, holds: commit(task, kind, change, lambda _: False)
        )

    expect(Scenario(_TAKEN_OVER, faults=CREATE_FAULTS), plant, "false fence")


def test_fenced_for_a_completion_that_a_successor_carries_on_is_found(expect: Expect) -> None:
    """That the training is done is true under every later generation of the series."""
    commit = DurableTask._commit

    def same_generation(task: DurableTask, kind: Any, change: Any, holds: Any) -> Entry:
        generation = task.generation
        return commit(task, kind, change, lambda head: holds(head) and head.generation == generation)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(DurableTask, "_commit", same_generation)

    roles = _TAKEN_OVER | {"owner": Role("R1", "a", trainer(0, publishes=False))}
    expect(Scenario(roles, faults=CREATE_FAULTS), plant, "false fence")


def test_fenced_for_a_value_that_the_head_holds_is_found(expect: Expect) -> None:
    """A value that landed late is looked for before the fence is."""
    commit_value = DurableTask.commit_value

    def admitted_first(task: DurableTask, manifest: StoredObject) -> Entry:
        task._admit(task.log.head())
        return commit_value(task, manifest)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(DurableTask, "commit_value", admitted_first)

    roles = {"zombie": Role("R1", "a", publisher()), "sensor": Role("S", "s", sensor("R1"))}
    expect(Scenario(roles, faults=CREATE_FAULTS), plant, "false fence")
