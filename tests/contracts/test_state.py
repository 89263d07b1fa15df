"""What the state layer promises, on memory, a directory and a real S3 server: records, log, leases, fences, claims, sets."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dagster_resilient.errors import (
    ConfigurationError,
    FencedError,
    IntegrityError,
    OwnershipError,
    SchemaVersionError,
    StoreUnavailableError,
    TaskHeldError,
)
from dagster_resilient.state import log as log_module
from dagster_resilient.state.fences import claim_attempt, fence_run, read_fence
from dagster_resilient.state.log import KEEP_ENTRIES, NumberedLog
from dagster_resilient.state.members import MemberSet
from dagster_resilient.state.owner import Verdict, local_verdict, this_process
from dagster_resilient.state.records import Claim, Entry, Fence, Member
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import StoredObject
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.storage.probe import PROBE_KEY, require_create
from dagster_resilient.storage.retry import RetryingStore
from dagster_resilient.testing import Fault, FaultStore, Operation

PREFIX = "tasks/a/%-"


def manifest(name: str) -> StoredObject:
    """A manifest's name, as a writer hands it in. The state layer does not look inside."""
    return StoredObject(key=f"data/{name}", size=1, blake3=name)


def make_task(
    store: ObjectStore,
    *,
    root: str = "root",
    run: str = "run",
    attempt: int = 1,
    series: str | None = None,
    **more: Any,
) -> DurableTask:
    """One try of a lineage, in this process."""
    claim = Claim(root=root, attempt=attempt, run_id=run, series=series or root, op=uuid.uuid4().hex)
    owner = this_process(claim, heartbeat=None, interval=10.0, ttl=45.0)
    return DurableTask(store, ("a",), None, claim, owner, now=lambda: datetime.now(UTC), **more)


def with_dead_owner(task: DurableTask) -> DurableTask:
    """The same try, by a process of this machine that has ended: its pid now belongs to another one."""
    task.owner = task.owner.model_copy(update={"started": task.owner.started + 1})
    return task


def steps(task: DurableTask) -> list[int]:
    """The training steps of the checkpoints in the head."""
    head = task.head()
    return [] if head is None else [checkpoint.step for checkpoint in head.checkpoints]


# ---- records


def test_a_record_is_created_once(store: ObjectStore) -> None:
    """The first one stands. The same record again is success: it is the writer's own, whose reply was lost."""
    records = ObjectRecords(store)
    first, other = (Fence(run_id="r", reason=reason, failure_class="lost", by="t") for reason in ("one", "two"))
    assert records.create("fences/r.json", first)
    assert not records.create("fences/r.json", other)
    assert records.create("fences/r.json", first)
    assert records.get("fences/r.json", Fence) == first


def test_an_absent_record_is_none_and_a_broken_one_an_error(store: ObjectStore) -> None:
    """Only absence is None: what cannot be read, or is of a newer version, is never taken for it."""
    records = ObjectRecords(store)
    assert records.get("fences/r.json", Fence) is None
    store.put("fences/torn.json", b'{"run_id": "r"')
    store.put("fences/newer.json", b'{"schema_version": 99, "run_id": "r"}')
    with pytest.raises(IntegrityError, match=f"{store.url}/fences/torn.json"):
        records.get("fences/torn.json", Fence)
    with pytest.raises(SchemaVersionError, match=f"{store.url}/fences/newer.json"):
        records.get("fences/newer.json", Fence)


def test_records_are_listed_in_order_and_deleted_by_name(store: ObjectStore) -> None:
    """As the store does it."""
    records = ObjectRecords(store)
    for name in ("b", "a", "c"):
        records.create(f"x/{name}.json", Fence(run_id=name, reason="", failure_class="", by=""))
    assert [info.key for info in records.list("x/")] == ["x/a.json", "x/b.json", "x/c.json"]
    records.delete(["x/a.json", "x/absent.json"])
    assert [info.key for info in records.list("x/")] == ["x/b.json", "x/c.json"]


def test_create_if_absent_is_probed(store: ObjectStore) -> None:
    """A store that decides it passes, at the first use and later; one that ignores the condition is refused by name."""
    require_create(store)
    counting = FaultStore(store)
    require_create(counting)
    assert counting.count("create") == 1
    store.delete([PROBE_KEY])
    with pytest.raises(ConfigurationError, match=store.url):
        require_create(FaultStore(store, honours_conditions=False))


# ---- the log


def entry(n: int, **fields: Any) -> Entry:
    """An entry of a log."""
    return Entry(n=n, op=f"op-{n}", kind="value", asset=("a",), **{"parent_op": f"op-{n - 1}", **fields})


def filled(store: ObjectStore, count: int, **fields: Any) -> NumberedLog:
    """A log with so many entries."""
    log = NumberedLog(ObjectRecords(store), PREFIX)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(log.append, [entry(n, **fields) for n in range(1, count + 1)]))
    return log


def test_a_log_that_was_never_begun_has_no_head(store: ObjectStore) -> None:
    """None, not an error: there is nothing to resume."""
    assert NumberedLog(ObjectRecords(store), PREFIX).head() is None


def test_the_head_is_the_highest_number(store: ObjectStore) -> None:
    """By number, over gaps, and whatever else lies beside the entries."""
    log = filled(store, 12)
    for junk in ("9999999999", "0000000099.tmp", "x.json", "0000000099.json.bak", "deep/0000000099.json"):
        store.put(f"{PREFIX}/log/{junk}", b"junk")
    store.delete([log.key(5), log.key(11)])
    assert log.head() == entry(12)
    assert [found.n for found in log.history()] == [1, 2, 3, 4, 6, 7, 8, 9, 10, 12]


def test_a_number_is_taken_once(store: ObjectStore) -> None:
    """Of two entries with one number the first stands."""
    log = filled(store, 2)
    assert not log.append(entry(2, parent_op="other"))
    assert log.get(2) == entry(2)


def test_an_empty_listing_is_not_believed_where_entry_1_exists(store: ObjectStore) -> None:
    """A listing raced by deletes can come back empty: look again; if it stays so, it is an error, never "new task"."""

    class Emptying(FaultStore):
        empty = 3

        def list(self, prefix: str, start_after: str | None = None) -> Any:
            self.empty -= 1
            return iter([]) if self.empty >= 0 else super().list(prefix, start_after)

    filled(store, 3)
    emptying = Emptying(store)
    assert NumberedLog(ObjectRecords(emptying), PREFIX).head() == entry(3)
    emptying.empty = 10_000
    with pytest.raises(StoreUnavailableError, match=PREFIX):
        NumberedLog(ObjectRecords(emptying), PREFIX).head()


def test_a_listing_that_names_a_trimmed_entry_is_read_again(store: ObjectStore) -> None:
    """Between LIST and GET the head can be trimmed by a faster writer: the newer one is found."""
    log = filled(store, 3)

    def plan(number: int, operation: Operation) -> None:
        if number == 1:  # the GET behind the first LIST
            log.append(entry(4))
            store.delete([log.key(3)])

    assert NumberedLog(ObjectRecords(FaultStore(store, plan)), PREFIX).head() == entry(4)


def test_an_entry_stands_if_it_is_the_head_or_the_next_one_builds_on_it(store: ObjectStore) -> None:
    """An entry created far behind the head, where its number had been trimmed, is no part of the history."""
    log = filled(store, 5)
    assert log.stands(entry(5))
    assert log.stands(entry(3))
    assert not log.stands(entry(3, op="mine"))
    store.delete([log.key(2), log.key(3), log.key(4)])
    assert log.append(entry(3, op="mine"))
    assert not log.stands(entry(3, op="mine"))


def test_nothing_young_is_trimmed(store: ObjectStore) -> None:
    """Within the hour every entry stays: a process that sleeps so long still meets the entry behind its own."""
    log = filled(store, KEEP_ENTRIES + 5)
    assert log.trim(entry(KEEP_ENTRIES + 5)) == []
    assert len(log.numbers()) == KEEP_ENTRIES + 5


def test_trim_keeps_the_last_ones_the_first_one_and_each_generations_first(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is old goes, but for entry 1 and the starts of generations, which stop a zombie for ever."""
    monkeypatch.setattr(log_module, "KEEP_FOR", timedelta(0))
    log = filled(store, KEEP_ENTRIES + 10, generation_starts=(1, 4, 8))
    assert log.trim(entry(KEEP_ENTRIES + 10, generation_starts=(1, 4, 8))) == [2, 3, 5, 6, 7, 9, 10]
    assert sorted(log.numbers()) == [1, 4, 8, *range(11, KEEP_ENTRIES + 11)]
    assert log.trim(entry(KEEP_ENTRIES + 10, generation_starts=(1, 4, 8))) == []


def test_a_head_that_is_gone_trims_nothing(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer whose entry is not listed knows too little to delete anything."""
    monkeypatch.setattr(log_module, "KEEP_FOR", timedelta(0))
    log = filled(store, KEEP_ENTRIES + 10)
    assert log.trim(entry(KEEP_ENTRIES + 11)) == []


# ---- fences and claims


def test_a_fence_is_set_once_and_its_first_reason_stands(store: ObjectStore) -> None:
    """A run is fenced or not; who fences it again changes nothing. Any run id has a fence of its own."""
    records = ObjectRecords(store)
    assert read_fence(records, "r/1") is None
    assert fence_run(records, "r/1", reason="no heartbeat", failure_class="lost", by="sensor")
    assert not fence_run(records, "r/1", reason="again", failure_class="hung", by="sensor")
    fence = read_fence(records, "r/1")
    assert fence is not None
    assert (fence.reason, fence.failure_class) == ("no heartbeat", "lost")
    assert read_fence(records, "r") is None


def test_tries_are_numbered_in_the_order_of_their_claims(store: ObjectStore) -> None:
    """Each lineage counts from 1; the same run claims a new number for each try."""
    records = ObjectRecords(store)
    claims = [claim_attempt(records, root="r", run_id="r", series="r", previous_attempt_count=n) for n in range(3)]
    assert [claim.attempt for claim in claims] == [1, 2, 3]
    assert claim_attempt(records, root="other", run_id="x", series="x").attempt == 1
    assert records.get(f"{keys.claim_prefix('r')}{keys.numbered(2)}.json", Claim) == claims[1]


def test_racing_tries_have_distinct_numbers(store: ObjectStore) -> None:
    """No number twice, and none left out."""
    records = ObjectRecords(store)
    together = threading.Barrier(4)

    def claim(n: int) -> int:
        together.wait(timeout=30)
        return claim_attempt(records, root="r", run_id=f"run-{n}", series="r").attempt

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(claim, range(4))) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_a_claim_survives_lost_messages(store: ObjectStore, kind: Any) -> None:
    """Whichever message is lost, the try has one number, and it is written once."""
    for number in range(2):
        faulty = RetryingStore(FaultStore(store, {number: Fault(kind)}))
        claim = claim_attempt(ObjectRecords(faulty), root="r", run_id="r", series="r")
        assert claim.attempt == number + 1
    assert len(list(store.list(keys.claim_prefix("r")))) == 2


# ---- sets


def test_a_set_keeps_the_first_record_of_each_member(store: ObjectStore) -> None:
    """A second attempt that finishes the same member is told what stands."""
    members = MemberSet(ObjectRecords(store), PREFIX, epoch=1)
    first, second = (Member(member="m/1", attempt=n, payload={"rows": n, "loss": 0.5, "ok": True}) for n in (1, 2))
    assert members.add(first) == first
    assert members.add(second) == first
    assert members.finished() == {"m/1": first}


def test_a_member_whose_objects_were_lost_is_committed_again(store: ObjectStore) -> None:
    """Under the next g; the highest stands."""
    members = MemberSet(ObjectRecords(store), PREFIX, epoch=1)
    lost, again = Member(member="m", attempt=1), Member(member="m", attempt=2, manifest=manifest("x"))
    members.add(lost)
    members.add(again, g=1)
    assert members.finished() == {"m": again}


def test_members_of_any_name_are_told_apart(store: ObjectStore) -> None:
    """Long names of which storage keeps a hash, names that look like our own suffixes, and other epochs."""
    names = ["", "a", "a/b", "A", "a.g0001", "a.g0000.json", "k" * 300, "k" * 299 + "x", "2024-01-01|x", "漢字"]
    members = MemberSet(ObjectRecords(store), PREFIX, epoch=1)
    for name in names:
        members.add(Member(member=name, attempt=1))
    MemberSet(ObjectRecords(store), PREFIX, epoch=2).add(Member(member="later", attempt=1))
    assert sorted(members.finished()) == sorted(names)
    assert MemberSet(ObjectRecords(store), PREFIX, epoch=3).finished() == {}


# ---- leases


def test_acquire_commit_complete(store: ObjectStore) -> None:
    """The whole life of a training task: each operation is one entry, and the head tells the state."""
    task = make_task(store)
    assert task.acquire().generation == task.generation == 1
    for step in (100, 200, 300):
        task.commit_checkpoint(step, manifest(str(step)), keep=2)
    assert [checkpoint.step for checkpoint in task.checkpoints] == steps(task) == [200, 300]
    task.complete()
    head = task.head()
    assert head is not None
    assert (head.n, head.kind, head.owner, head.training_done) == (5, "complete", None, True)
    assert [found.kind for found in task.log.history()] == ["acquire", *["checkpoint"] * 3, "complete"]


def test_a_commit_names_the_checkpoints_that_dropped_out(store: ObjectStore) -> None:
    """Exactly those that nothing refers to any more, so that their objects may go; one more save of a step replaces it."""
    task = make_task(store)
    task.acquire()
    assert task.commit_checkpoint(1, manifest("1"), keep=2) == ()
    assert task.commit_checkpoint(2, manifest("2"), keep=2) == ()
    assert [old.step for old in task.commit_checkpoint(3, manifest("3"), keep=2)] == [1]
    assert [old.manifest for old in task.commit_checkpoint(3, manifest("3 again"), keep=2)] == [manifest("3")]
    assert [old.step for old in task.commit_checkpoint(4, manifest("4"), keep=0)] == [2, 3]


def test_commits_need_the_lease(store: ObjectStore) -> None:
    """Before acquire and after release nothing leased is written."""
    task = make_task(store)
    with pytest.raises(OwnershipError, match="acquire"):
        task.commit_checkpoint(1, manifest("1"), keep=1)
    task.acquire()
    task.release()
    with pytest.raises(OwnershipError, match="acquire"):
        task.complete()
    task.release()
    assert [found.kind for found in task.log.history()] == ["acquire", "release"]


def test_a_released_task_is_resumed_from_its_checkpoints(store: ObjectStore) -> None:
    """The next try of the series, under the same fingerprint, begins a new generation with all that was retained."""
    first = make_task(store, fingerprint="f")
    first.acquire()
    first.commit_checkpoint(7, manifest("7"), keep=3)
    first.release()
    second = make_task(store, run="run-2", attempt=2, fingerprint="f")
    taken = second.acquire()
    assert (taken.generation, taken.failures) == (2, 0)
    assert [checkpoint.step for checkpoint in second.checkpoints] == [7]


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"series": "other"}])
def test_other_inputs_or_a_fresh_start_begin_from_nothing(store: ObjectStore, change: dict[str, str]) -> None:
    """State is reused within one series and under one fingerprint only."""
    first = make_task(store, fingerprint="f")
    first.acquire()
    first.commit_checkpoint(7, manifest("7"), keep=3)
    first.complete()
    second = make_task(store, run="run-2", attempt=2, **{"fingerprint": "f", **change})
    taken = second.acquire()
    assert (taken.checkpoints, taken.training_done, taken.failures, taken.generation) == ((), False, 0, 2)


def test_a_live_owner_of_another_lineage_keeps_its_task(store: ObjectStore) -> None:
    """The error names the owner's run, try, process and host; nothing was written."""
    task = make_task(store, root="first", run="run-1")
    task.acquire()
    with pytest.raises(TaskHeldError, match=rf"try 1 of run run-1 \(process {task.owner.pid} on {task.owner.host}\)"):
        make_task(store, root="second", run="run-2").acquire()
    assert len(task.log.numbers()) == 1
    task.commit_checkpoint(1, manifest("1"), keep=1)


def test_a_dead_owner_loses_its_task_at_once(store: ObjectStore) -> None:
    """The process table of its machine tells; a pid that was given to another process does not protect it."""
    dead = with_dead_owner(make_task(store, root="first"))
    dead.acquire()
    dead.commit_checkpoint(5, manifest("5"), keep=1)
    assert local_verdict(dead.owner) is Verdict.DEAD
    successor = make_task(store, root="second", series="first")
    taken = successor.acquire()
    assert (taken.generation, taken.failures) == (2, 1)
    assert [checkpoint.step for checkpoint in successor.checkpoints] == [5]


def test_a_higher_try_of_the_lineage_displaces_a_lower_one(store: ObjectStore) -> None:
    """Even where the lower one lives: its commits are refused from then on, for ever, and are not visible."""
    zombie, successor = make_task(store), make_task(store, run="run-2", attempt=2)
    zombie.acquire()
    zombie.commit_checkpoint(5, manifest("5"), keep=2)
    successor.acquire()
    successor.commit_checkpoint(8, manifest("8"), keep=2)
    for _ in range(2):
        with pytest.raises((FencedError, OwnershipError)):
            zombie.commit_checkpoint(6, manifest("6"), keep=2)
    with pytest.raises(FencedError, match="try 1 .* superseded by try 2"):
        zombie.commit_value(manifest("zombie"))
    with pytest.raises(FencedError, match="try 1 .* superseded by try 2"):
        make_task(store).acquire()
    assert steps(successor) == [5, 8]
    head = successor.head()
    assert head is not None
    assert head.value is None


def test_the_first_refusal_of_a_displaced_owner_says_fenced(store: ObjectStore) -> None:
    """It names who took over, and tells to stop."""
    zombie = make_task(store)
    zombie.acquire()
    make_task(store, run="run-2", attempt=2).acquire()
    with pytest.raises(FencedError, match=r"run run-2 on .* took the task over \(generation 2, ours was 1\); stop"):
        zombie.commit_checkpoint(6, manifest("6"), keep=2)


def test_a_second_start_of_a_script_displaces_nobody(store: ObjectStore) -> None:
    """Where a second start may be a mistake, a live lower try keeps the task."""
    make_task(store).acquire()
    with pytest.raises(TaskHeldError):
        make_task(store, attempt=2, displaces_live=False).acquire()


def test_acquire_can_wait_for_the_owner(store: ObjectStore) -> None:
    """Until it releases, looking again and again; the wait ends with the time given."""
    holder, waiting = make_task(store, root="first"), make_task(store, root="second")
    holder.acquire()
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            holder.release()

    waiting.sleep = sleep
    assert waiting.acquire(wait=3600.0).generation == 2
    assert len(looks) == 3
    with pytest.raises(TaskHeldError):
        make_task(store, root="third", sleep=lambda _: None).acquire(wait=0.0)


def test_an_owner_may_acquire_its_own_task_again(store: ObjectStore) -> None:
    """A process that left its session by an exception enters the next one as a new generation."""
    task = make_task(store)
    task.acquire()
    task.commit_checkpoint(1, manifest("1"), keep=1)
    assert task.acquire().generation == 2
    assert steps(task) == [1]


def test_of_racing_tries_one_owns_each_generation(store: ObjectStore) -> None:
    """Lineages that acquire at the same time: no generation has two owners, and the holder is the last who got it."""
    tasks = [with_dead_owner(make_task(store, root=f"root-{n}", run=f"run-{n}")) for n in range(4)]
    together = threading.Barrier(4)

    def acquire(task: DurableTask) -> int:
        together.wait(timeout=30)
        return task.acquire().generation

    with ThreadPoolExecutor(4) as pool:
        generations = list(pool.map(acquire, tasks))
    assert sorted(generations) == [1, 2, 3, 4]
    head = tasks[0].head()
    assert head is not None
    assert head.owner is not None
    assert head.owner.run_id == f"run-{generations.index(4)}"


# ---- values without a lease


def test_a_value_is_visible_when_it_is_committed(store: ObjectStore) -> None:
    """The head names it, for its series and fingerprint only; the next value takes its place."""
    task = make_task(store, fingerprint="f")
    assert task.committed_value(task.head()) is None
    task.commit_value(manifest("1"))
    value = task.committed_value(task.head())
    assert value is not None
    assert (value.manifest, value.run_id, value.attempt) == (manifest("1"), "run", 1)
    assert make_task(store, fingerprint="g").committed_value(task.head()) is None
    assert make_task(store, root="other", fingerprint="f").committed_value(task.head()) is None
    task.commit_value(manifest("2"))
    head = task.head()
    assert head is not None
    assert head.value is not None
    assert (head.n, head.value.manifest, head.committed_by) == (2, manifest("2"), ("root",))


def test_a_fenced_run_commits_nothing(store: ObjectStore) -> None:
    """Neither a value nor a lease; the message repeats the reason of the fence."""
    task = make_task(store)
    fence_run(task.records, "run", reason="No heartbeat for 60 s.", failure_class="lost", by="sensor")
    for call in (lambda: task.commit_value(manifest("1")), task.acquire):
        with pytest.raises(FencedError, match=r"run run is fenced: No heartbeat for 60 s\."):
            call()
    assert task.head() is None


def test_a_fence_that_the_sidecar_has_read_stops_the_task_without_a_request(store: ObjectStore) -> None:
    """`check_fenced` asks only the process beside it."""
    counting = FaultStore(store)
    make_task(counting).check_fenced()
    with pytest.raises(FencedError, match="taken for lost"):
        make_task(counting, fenced=lambda: "taken for lost").check_fenced()
    assert counting.operations == []


def test_a_fenced_owner_loses_its_task_at_once(store: ObjectStore) -> None:
    """Alive or not: the verdict is final."""
    holder = make_task(store, root="first", run="run-1")
    holder.acquire()
    fence_run(holder.records, "run-1", reason="r", failure_class="hung", by="sensor")
    assert make_task(store, root="second", run="run-2").acquire().generation == 2


@pytest.mark.parametrize("moment", range(4))
def test_a_fence_and_a_successor_between_any_two_requests_of_a_zombie(store: ObjectStore, moment: int) -> None:
    """The zombie's value lands before its successor's first entry, which then carries it on, or never.

    A commit is LIST, GET of the head, GET of the fence, create. At each point between, the zombie sleeps while its run
    is fenced and its successor commits.
    """
    make_task(store, root="before", run="before").commit_value(manifest("before"))
    successor = make_task(store, run="run-2", attempt=2)

    def plan(number: int, operation: Operation) -> None:
        if number == moment:
            fence_run(successor.records, "run", reason="lost", failure_class="lost", by="sensor")
            successor.commit_value(manifest("successor"))

    zombie = make_task(FaultStore(store, plan), run="run")
    with pytest.raises(FencedError):
        zombie.commit_value(manifest("zombie"))
    head = successor.head()
    assert head is not None
    assert head.value is not None
    assert head.value.manifest == manifest("successor")
    assert len(successor.log.history()) == 2


def test_a_lower_try_never_follows_a_higher_one_also_with_another_lineage_between(store: ObjectStore) -> None:
    """What the log remembers of a lineage outlives the entries of others."""
    make_task(store, run="run-2", attempt=2).commit_value(manifest("2"))
    make_task(store, root="unrelated", run="x").commit_value(manifest("x"))
    with pytest.raises(FencedError, match="superseded by try 2"):
        make_task(store, run="run-1", attempt=1).commit_value(manifest("1"))
    make_task(store, run="run-2", attempt=2).commit_value(manifest("2 again"))


def test_a_value_between_two_checkpoints_disturbs_nobody(store: ObjectStore) -> None:
    """A writer without a lease and the lease's holder share a log: both commits stand, and neither loses the other's."""
    training = make_task(store)
    training.acquire()
    training.commit_checkpoint(1, manifest("1"), keep=5)
    make_task(store).commit_value(manifest("value"))
    training.commit_checkpoint(2, manifest("2"), keep=5)
    training.complete()
    head = training.head()
    assert head is not None
    assert head.value is not None
    assert (head.value.manifest, [checkpoint.step for checkpoint in head.checkpoints]) == (manifest("value"), [1, 2])


def test_many_writers_of_values_all_get_through(store: ObjectStore) -> None:
    """Each conflict is one more look, and every value is an entry of its own."""
    tasks = [make_task(store, root=f"root-{n}", run=f"run-{n}") for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        entries = list(pool.map(lambda task: task.commit_value(manifest(task.claim.root)), tasks))
    assert sorted(entry.n for entry in entries) == [1, 2, 3, 4]
    head = tasks[0].head()
    assert head is not None
    assert sorted(head.committed_by) == [f"root-{n}" for n in range(4)]


# ---- lost messages


LIFE: list[Callable[[DurableTask], Any]] = [
    lambda task: task.acquire(),
    lambda task: task.commit_checkpoint(1, manifest("1"), keep=2),
    lambda task: task.commit_checkpoint(2, manifest("2"), keep=2),
    lambda task: task.commit_value(manifest("value")),
    lambda task: task.complete(),
]


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_one_lost_message_anywhere_changes_nothing(store: ObjectStore, kind: Any) -> None:
    """Each message of a task's life is lost once: every operation succeeds and is exactly one entry."""
    operations = FaultStore(store)
    task = replace_asset(make_task(operations), "without faults")
    for act in LIFE:
        act(task)
    for number in range(len(operations.operations)):
        faulty = RetryingStore(FaultStore(store, {number: Fault(kind)}))
        task = replace_asset(make_task(faulty), f"fault {number}")
        for act in LIFE:
            act(task)
        assert [entry.kind for entry in task.log.history()] == ["acquire", *["checkpoint"] * 2, "value", "complete"]
        assert steps(task) == [1, 2]


def replace_asset(task: DurableTask, name: str) -> DurableTask:
    """The same try, of another task."""
    return replace(task, asset=(name,))


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_a_commit_that_raised_is_whole_or_absent(store: ObjectStore, kind: Any) -> None:
    """After an error at any message the log is sound: the next try goes on from the one state or the other."""
    for number in range(14):
        name = f"fault {number}"
        first = replace_asset(make_task(FaultStore(store, {number: Fault(kind)}), root=name), name)
        done = 0
        try:
            for act in LIFE:
                act(first)
                done += 1
        except StoreUnavailableError:
            pass
        second = replace_asset(make_task(store, root=name, run="run-2", attempt=2), name)
        resumed = [checkpoint.step for checkpoint in second.acquire().checkpoints]
        known = [[], [], [1], [1, 2], [1, 2], [1, 2]]
        assert resumed in (known[done], known[min(done + 1, 5)])
        history = second.log.history()
        assert [entry.n for entry in history] == list(range(1, len(history) + 1))
        assert all(after.parent_op == before.op for before, after in zip(history, history[1:], strict=False))


def test_an_outage_during_a_commit_is_unavailable_and_not_fenced(store: ObjectStore) -> None:
    """Only a fence or a newer owner that was *read* stops a writer. When the store is back, it goes on."""
    faulty = FaultStore(store)
    task = make_task(faulty)
    task.acquire()
    with faulty.outage(), pytest.raises(StoreUnavailableError):
        task.commit_checkpoint(1, manifest("1"), keep=1)
    task.commit_checkpoint(2, manifest("2"), keep=1)
    assert steps(task) == [2]


# ---- what it costs


def test_each_operation_costs_the_requests_that_were_promised(store: ObjectStore) -> None:
    """Acquire and the first commit take five or six round trips, each further commit takes one."""
    counting = FaultStore(store)
    task = make_task(counting)
    task.acquire()
    task.commit_checkpoint(1, manifest("1"), keep=1)
    assert len(counting.operations) <= 6
    counting.operations.clear()
    task.commit_checkpoint(2, manifest("2"), keep=1)
    assert [operation.verb for operation in counting.operations] == ["create"]


def test_a_log_stays_short(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long training run leaves no more entries than are kept, and its state is the same."""
    monkeypatch.setattr(log_module, "KEEP_FOR", timedelta(0))
    task = make_task(store)
    task.acquire()
    for step in range(1, 200):
        task.commit_checkpoint(step, manifest(str(step)), keep=2)
    assert len(task.log.numbers()) < KEEP_ENTRIES + 70
    assert steps(task) == [198, 199]


def test_a_zombie_that_slept_past_a_trim_is_refused(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the numbers behind its own were trimmed: the first entry of the next generation stays for ever."""
    monkeypatch.setattr(log_module, "KEEP_FOR", timedelta(0))
    zombie, successor = make_task(store), make_task(store, run="run-2", attempt=2)
    zombie.acquire()
    successor.acquire()
    for step in range(1, 150):
        successor.commit_checkpoint(step, manifest(str(step)), keep=1)
    assert 3 not in successor.log.numbers()
    with pytest.raises(FencedError):
        zombie.commit_checkpoint(1000, manifest("zombie"), keep=1)
    with pytest.raises(FencedError):
        make_task(store).commit_value(manifest("zombie"))
    assert steps(successor) == [149]
