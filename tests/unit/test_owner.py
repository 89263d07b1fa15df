"""Whether another process that holds a lease lives: by its machine's process table, or by its heartbeat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dagster_resilient.errors import StoreUnavailableError
from dagster_resilient.state.beats import Beat
from dagster_resilient.state.owner import OwnerWatch, Verdict, local_verdict, start_ticks, this_process
from dagster_resilient.state.records import Claim, Owner
from dagster_resilient.storage.memory_store import MemoryObjectStore
from dagster_resilient.storage.object_store import ObjectInfo
from dagster_resilient.testing import FakeClock, Fault, FaultStore

BEAT = "live/run/step-0a.json"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def owner(**changes: Any) -> Owner:
    """This process as an owner that beats every 10 s, or another one."""
    claim = Claim(root="r", attempt=1, run_id="run", series="r", op="op")
    return this_process(claim, heartbeat=BEAT, interval=10.0, ttl=45.0).model_copy(update=changes)


class Watching:
    """A watch over an owner elsewhere. Store and observer have clocks of their own, which pass time together."""

    def __init__(self, **changes: Any) -> None:
        self.clock = FakeClock()
        self.beat: datetime | None = NOON
        self.faulty = FaultStore(_Beating(self))
        self.watch = OwnerWatch(self.faulty, owner(**changes), lambda: self.now, self.clock)

    @property
    def now(self) -> datetime:
        """The store's clock."""
        return NOON + timedelta(seconds=self.clock())

    def look_after(self, seconds: float, *, beating: bool = False) -> Verdict:
        """Let time pass, and look."""
        self.clock.advance(seconds)
        if beating:
            self.beat = self.now
        return self.watch.look()


class _Beating(MemoryObjectStore):
    def __init__(self, watching: Watching) -> None:
        super().__init__(uuid.uuid4().hex)
        self._watching = watching

    def head(self, key: str) -> ObjectInfo:
        if self._watching.beat is None:
            return super().head(key)
        return ObjectInfo(key, 1, self._watching.beat)


def test_this_process_is_alive_and_one_that_ended_is_dead() -> None:
    """By pid and start time: a zombie that nobody has waited for counts as dead."""
    assert local_verdict(owner()) is Verdict.ALIVE
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = owner(pid=process.pid, started=start_ticks(process.pid))
    assert local_verdict(other) is Verdict.ALIVE
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert local_verdict(other) is Verdict.DEAD
    assert process.wait() == -signal.SIGKILL
    assert process.stdin is not None
    process.stdin.close()
    assert local_verdict(other) is Verdict.DEAD


def test_a_recycled_pid_is_another_process() -> None:
    """The same pid with another start time is not the owner."""
    assert local_verdict(owner(started=1)) is Verdict.DEAD


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": "another"}, {"boot": ""}])
def test_a_pid_of_another_machine_or_boot_says_nothing(change: dict[str, str]) -> None:
    """Neither alive nor dead."""
    assert local_verdict(owner(**change)) is Verdict.UNKNOWN


def test_an_owner_that_beats_is_alive() -> None:
    """The first look tells nothing; a beat after it does, however old the first one was."""
    watching = Watching()
    assert watching.look_after(10_000) is Verdict.UNKNOWN
    assert watching.look_after(5) is Verdict.UNKNOWN
    assert watching.look_after(5, beating=True) is Verdict.ALIVE


def test_an_owner_that_stopped_beating_is_dead_after_its_ttl() -> None:
    """No beat for longer than the TTL, and none over two intervals of our own looks."""
    watching = Watching()
    verdicts = [watching.look_after(seconds) for seconds in (0, 20, 24, 2)]
    assert verdicts == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.DEAD]


def test_an_owner_that_was_seen_to_live_can_die() -> None:
    """Who waits for a task sees its owner beat, and then its silence."""
    watching = Watching()
    watching.look_after(0)
    assert watching.look_after(10, beating=True) is Verdict.ALIVE
    assert [watching.look_after(seconds) for seconds in (20, 24, 2)] == [*[Verdict.UNKNOWN] * 2, Verdict.DEAD]


def test_an_old_beat_alone_is_no_death() -> None:
    """At the end of an outage every beat is old: two intervals of looks must pass first."""
    watching = Watching()
    assert watching.look_after(3600) is Verdict.UNKNOWN
    assert watching.look_after(19) is Verdict.UNKNOWN
    assert watching.look_after(2) is Verdict.DEAD


def test_an_owner_without_its_heartbeat_object_is_dead_after_its_ttl() -> None:
    """Perhaps its first beat is still under way."""
    watching = Watching()
    watching.beat = None
    verdicts = [watching.look_after(seconds) for seconds in (0, 44, 2)]
    assert verdicts == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.DEAD]


def a_beat(**changes: Any) -> bytes:
    """The body of a heartbeat."""
    fields = {"process": "0a", "run_id": "run", "root": "r", "role": "step", "instance_id": "i", "host": "h"}
    numbers = {"pid": 1, "seq": 1, "interval": 10.0, "ttl": 45.0}
    return Beat.model_validate({**fields, **numbers, **changes}).to_bytes()


def test_an_owner_whose_sidecar_saw_it_end_is_dead_at_once() -> None:
    """The last beat is fresh, and a sign of death all the same, at the first look; and it stays one."""
    watching = Watching()
    watching.faulty.put(BEAT, a_beat(state="exited"))
    assert watching.look_after(0) is Verdict.DEAD
    watching.faulty.put(BEAT, a_beat())  # one that was held up, and lands behind the last one
    assert watching.look_after(5, beating=True) is Verdict.DEAD


def test_an_owner_that_ends_while_it_is_watched_is_dead_at_once() -> None:
    """The new beat, which would count as life, is read."""
    watching = Watching()
    watching.faulty.put(BEAT, a_beat())
    assert watching.look_after(0) is Verdict.UNKNOWN
    assert watching.look_after(5, beating=True) is Verdict.ALIVE
    watching.faulty.put(BEAT, a_beat(state="exited"))
    assert watching.look_after(5, beating=True) is Verdict.DEAD


def test_a_last_beat_within_the_same_second_is_read() -> None:
    """Stores tell times by the second: the version differs."""
    store = MemoryObjectStore(uuid.uuid4().hex)
    store.put(BEAT, a_beat())
    watch = OwnerWatch(store, owner(), lambda: NOON)
    watch.look()
    moment = store.head(BEAT).last_modified
    store.put(BEAT, a_beat(state="exited"))
    store.head = lambda key: replace(MemoryObjectStore.head(store, key), last_modified=moment)  # type: ignore[method-assign]
    assert watch.look() is Verdict.DEAD


def test_a_beat_is_read_once() -> None:
    """One that does not change costs no second read."""
    watching = Watching()
    watching.faulty.put(BEAT, a_beat())
    for _ in range(5):
        watching.look_after(1)
    assert watching.faulty.count("get") == 1


@pytest.mark.parametrize("raw", [b"torn", b"{}", b'{"state": "exited"}', b'{"schema_version": 99}'])
def test_a_damaged_beat_says_nothing(raw: bytes) -> None:
    """Its time is that of a sign of life, as before; its text is no proof of a death."""
    watching = Watching()
    watching.faulty.put(BEAT, raw)
    assert watching.look_after(0) is Verdict.UNKNOWN
    assert watching.look_after(5, beating=True) is Verdict.ALIVE
    assert [watching.look_after(seconds) for seconds in (44, 2)] == [Verdict.UNKNOWN, Verdict.DEAD]


def test_a_beat_that_cannot_be_read_now_is_read_at_the_next_look() -> None:
    """The store fails between the two requests of a look."""
    watching = Watching()
    watching.faulty.put(BEAT, a_beat(state="exited"))
    watching.faulty._plan = {2: Fault("fail")}  # behind the put and the head
    with pytest.raises(StoreUnavailableError):
        watching.look_after(0)
    assert watching.look_after(1) is Verdict.DEAD


def test_a_first_beat_that_comes_late_is_life() -> None:
    """From no heartbeat to one."""
    watching = Watching()
    watching.beat = None
    assert watching.look_after(0) is Verdict.UNKNOWN
    assert watching.look_after(10, beating=True) is Verdict.ALIVE


def test_an_outage_declares_nobody_dead() -> None:
    """A look that fails is an error, no verdict."""
    watching = Watching()
    watching.look_after(0)
    with watching.faulty.outage(), pytest.raises(StoreUnavailableError):
        watching.look_after(3600)


def test_an_owner_without_a_heartbeat_is_of_this_process() -> None:
    """A store in memory: who else could it be."""
    assert Watching(heartbeat=None).look_after(0) is Verdict.ALIVE
