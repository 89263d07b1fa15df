"""Log, fences, claims and sets, on every kind of records."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from dagster_resilient.errors import ConfigurationError, StoreUnavailableError
from dagster_resilient.state import log as log_module
from dagster_resilient.state.fences import claim_attempt, fence_run, read_fence
from dagster_resilient.state.log import KEEP_ENTRIES, NumberedLog
from dagster_resilient.state.members import MemberSet
from dagster_resilient.state.records import Claim, Entry, Member
from dagster_resilient.state.store import ObjectRecords, RecordStore
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import StoredObject
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.storage.probe import PROBE_KEY, require_create
from dagster_resilient.storage.retry import RetryingStore
from dagster_resilient.testing import Fault, FaultStore, Operation

PREFIX = "tasks/a/log/%-"


def test_create_if_absent_is_probed(store: ObjectStore) -> None:
    """A store that decides it passes, at the first use and later; one that ignores the condition is refused by name."""
    require_create(store)
    counting = FaultStore(store)
    require_create(counting)
    assert counting.count("create") == 1
    store.delete([PROBE_KEY])
    with pytest.raises(ConfigurationError, match=re.escape(store.url)):
        require_create(FaultStore(store, honours_conditions=False))


# ---- the log


def entry(n: int, **fields: Any) -> Entry:
    """An entry of a log."""
    return Entry(**{"n": n, "op": f"op-{n}", "parent_op": f"op-{n - 1}", "kind": "value", "asset": ("a",), **fields})


def filled(records: RecordStore, count: int, **fields: Any) -> NumberedLog:
    """A log with so many entries."""
    log = NumberedLog(records, PREFIX)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(log.append, [entry(n, **fields) for n in range(1, count + 1)]))
    return log


def test_a_log_that_was_never_begun_has_no_head(records: RecordStore) -> None:
    """None, not an error: there is nothing to resume."""
    assert NumberedLog(records, PREFIX).head() is None


def test_the_head_is_the_highest_number(records: RecordStore, put_raw: Callable[[str, str], None]) -> None:
    """By number, over gaps, and whatever else lies beside the entries."""
    log = filled(records, 12)
    for junk in ("9999999999", "0000000099.tmp", "x.json", "0000000099.json.bak", "deep/0000000099.json"):
        put_raw(f"{PREFIX}/{junk}", "junk")
    records.delete([log.key(5), log.key(11)])
    assert log.head() == entry(12)
    assert [found.n for found in log.history()] == [1, 2, 3, 4, 6, 7, 8, 9, 10, 12]


def test_a_number_is_taken_once(records: RecordStore) -> None:
    """Of two entries with one number the first stands."""
    log = filled(records, 2)
    assert not log.append(entry(2, parent_op="other"))
    assert log.get(2) == entry(2)


def test_an_empty_listing_is_not_believed_where_entry_1_exists(store: ObjectStore) -> None:
    """A listing raced by deletes can come back empty: look again; if it stays so, it is an error, never "new task"."""

    class Emptying(FaultStore):
        empty = 3

        def list(self, prefix: str, start_after: str | None = None) -> Any:
            self.empty -= 1
            return iter([]) if self.empty >= 0 else super().list(prefix, start_after)

    filled(ObjectRecords(store), 3)
    emptying = Emptying(store)
    assert NumberedLog(ObjectRecords(emptying), PREFIX).head() == entry(3)
    emptying.empty = 10_000
    with pytest.raises(StoreUnavailableError, match=PREFIX):
        NumberedLog(ObjectRecords(emptying), PREFIX).head()


def test_a_listing_that_names_a_trimmed_entry_is_read_again(store: ObjectStore) -> None:
    """Between LIST and GET the head can be trimmed by a faster writer: the newer one is found."""
    log = filled(ObjectRecords(store), 3)

    def plan(number: int, operation: Operation) -> None:
        if number == 1:  # the GET behind the first LIST
            log.append(entry(4))
            store.delete([log.key(3)])

    assert NumberedLog(ObjectRecords(FaultStore(store, plan)), PREFIX).head() == entry(4)


def test_an_entry_stands_if_it_is_the_head_or_the_next_one_builds_on_it(records: RecordStore) -> None:
    """An entry created far behind the head, where its number had been trimmed, is no part of the history."""
    log = filled(records, 5)
    assert log.stands(entry(5))
    assert log.stands(entry(3))
    assert not log.stands(entry(3, op="mine"))
    records.delete([log.key(2), log.key(3), log.key(4)])
    assert log.append(entry(3, op="mine"))
    assert not log.stands(entry(3, op="mine"))


def test_nothing_young_is_trimmed(records: RecordStore) -> None:
    """Within the hour every entry stays: a process that sleeps so long still meets the entry behind its own."""
    log = filled(records, KEEP_ENTRIES + 5)
    assert log.trim(entry(KEEP_ENTRIES + 5)) == []
    assert len(log.numbers()) == KEEP_ENTRIES + 5


def test_trim_keeps_the_last_ones_the_first_one_and_each_generations_first(
    records: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is old goes, but for entry 1 and the starts of generations, which stop a zombie for ever."""
    # Less than nothing: `filled` writes side by side, so that the head can be older than what it follows.
    monkeypatch.setattr(log_module, "KEEP_FOR", timedelta(hours=-1))
    log = filled(records, KEEP_ENTRIES + 10, generation_starts=(1, 4, 8))
    assert log.trim(entry(KEEP_ENTRIES + 10, generation_starts=(1, 4, 8))) == [2, 3, 5, 6, 7, 9, 10]
    assert sorted(log.numbers()) == [1, 4, 8, *range(11, KEEP_ENTRIES + 11)]
    assert log.trim(entry(KEEP_ENTRIES + 10, generation_starts=(1, 4, 8))) == []


def test_a_head_that_is_gone_trims_nothing(records: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer whose entry is not listed knows too little to delete anything."""
    monkeypatch.setattr(log_module, "KEEP_FOR", timedelta(0))
    log = filled(records, KEEP_ENTRIES + 10)
    assert log.trim(entry(KEEP_ENTRIES + 11)) == []


# ---- fences and claims


def test_a_fence_is_set_once_and_its_first_reason_stands(records: RecordStore) -> None:
    """A run is fenced or not; who fences it again changes nothing. Any run id has a fence of its own."""
    assert read_fence(records, "r/1") is None
    assert fence_run(records, "r/1", reason="no heartbeat", failure_class="lost", by="sensor")
    assert not fence_run(records, "r/1", reason="again", failure_class="hung", by="sensor")
    fence = read_fence(records, "r/1")
    assert fence is not None
    assert (fence.reason, fence.failure_class) == ("no heartbeat", "lost")
    assert read_fence(records, "r") is None


def test_tries_are_numbered_in_the_order_of_their_claims(records: RecordStore) -> None:
    """Each lineage counts from 1; the same run claims a new number for each try."""
    claims = [claim_attempt(records, root="r", run_id="r", series="r", previous_attempt_count=n) for n in range(3)]
    assert [claim.attempt for claim in claims] == [1, 2, 3]
    assert claim_attempt(records, root="other", run_id="x", series="x").attempt == 1
    assert records.get(f"{keys.claim_prefix('r')}{keys.numbered(2)}.json", Claim) == claims[1]


def test_racing_tries_have_distinct_numbers(records: RecordStore) -> None:
    """No number twice, and none left out."""
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


def test_a_set_keeps_the_first_record_of_each_member(records: RecordStore) -> None:
    """A second attempt that finishes the same member is told what stands."""
    members = MemberSet(records, PREFIX, epoch=1)
    first, second = (Member(member="m/1", attempt=n, payload={"rows": n, "loss": 0.5, "ok": True}) for n in (1, 2))
    assert members.add(first) == first
    assert members.add(second) == first
    assert members.finished() == {"m/1": first}


def test_a_member_whose_objects_were_lost_is_committed_again(records: RecordStore) -> None:
    """Under the next g; the highest stands."""
    members = MemberSet(records, PREFIX, epoch=1)
    lost, again = (
        Member(member="m", attempt=1),
        Member(member="m", attempt=2, manifest=StoredObject(key="x", size=1, blake3="x")),
    )
    members.add(lost)
    members.add(again, g=1)
    assert members.finished() == {"m": again}


def test_members_of_any_name_are_told_apart(records: RecordStore) -> None:
    """Long names of which storage keeps a hash, names that look like our own suffixes, and other epochs."""
    names = ["", "a", "a/b", "A", "a.g0001", "a.g0000.json", "k" * 300, "k" * 299 + "x", "2024-01-01|x", "漢字"]
    members = MemberSet(records, PREFIX, epoch=1)
    for name in names:
        members.add(Member(member=name, attempt=1))
    MemberSet(records, PREFIX, epoch=2).add(Member(member="later", attempt=1))
    assert sorted(members.finished()) == sorted(names)
    assert MemberSet(records, PREFIX, epoch=3).finished() == {}
