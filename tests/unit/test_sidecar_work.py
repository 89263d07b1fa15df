"""What the sidecar does with the store: when it calls, for how long, and how it beats while calls hang or fail."""

from __future__ import annotations

import heapq
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sidecar_doubles import KEY, Clock, Objects, a_caller, config, me

from dagster_resilient.state import _sidecar, _sidecar_work
from dagster_resilient.state._processes import Watched
from dagster_resilient.state._sidecar_store import Directory, Patience, Schedule
from dagster_resilient.state._sidecar_work import AT_ONCE, Beater, Caller


def a_beater(store: Objects | None = None, **beat: object) -> Beater:
    """Return a beater that is not started."""
    whole = config(beat={"interval": 0.01, "ttl": 1.0, **beat})
    return Beater(whole, Watched(*me()), Caller(lambda: store or Objects(), Patience(5.0, 22.5), lambda message: None))


# ---- when to call, and for how long


def test_beats_keep_to_the_clock() -> None:
    """Each is due an interval after the one before, however late it was asked for: lag does not add up."""
    schedule = Schedule(10.0, 100.0, share=0.5)
    assert schedule.advance(100.0) == 7.5
    assert [schedule.advance(schedule.due + lag) for lag in (0.1, 9.0, 0.0)] == pytest.approx([9.9, 1.0, 10.0])


def test_beats_that_were_missed_are_left_out() -> None:
    """After a machine has slept, one beat goes out at once and the rest at their old times."""
    schedule = Schedule(10.0, 0.0, share=0.0)
    schedule.advance(0.0)
    assert schedule.advance(47.0) == 0.0
    assert schedule.advance(47.0) == 8.0


def test_processes_that_start_together_beat_apart() -> None:
    """Chance moves the second beat by up to half an interval, and all later ones with it."""
    assert [Schedule(10.0, 0.0, share=share).advance(0.0) for share in (0.0, 0.5, 0.9)] == [5.0, 7.5, 9.5]


def test_patience_grows_with_calls_that_are_cut_off_and_shrinks_with_quick_ones() -> None:
    """It doubles up to its bound, and a call that is refused at once, or just fits, changes nothing."""
    patience = Patience(5.0, 22.5)
    seen = []
    for took, ok in [(5.0, False), (10.0, False), (20.0, False), (0.1, False), (8.0, True), (2.0, True), (1.0, True)]:
        patience.learn(patience.seconds, took, ok=ok)
        seen.append(patience.seconds)
    assert seen == [10.0, 20.0, 22.5, 22.5, 22.5, 11.25, 5.625]
    patience.learn(5.625, 1.0, ok=True)
    assert patience.seconds == 5.0


def test_calls_that_are_cut_off_together_count_once() -> None:
    """Beats that hang at the same time are one outage: the limit doubles once. A late end of an old call is no news."""
    patience = Patience(5.0, 22.5)
    for _ in range(3):
        patience.learn(5.0, 5.0, ok=False)
    assert patience.seconds == 10.0
    patience.learn(10.0, 10.0, ok=False)
    patience.learn(5.0, 5.0, ok=False)
    patience.learn(5.0, 0.1, ok=True)
    assert patience.seconds == 20.0


@pytest.mark.parametrize("needs", [0.01, 4.0, 8.0, 12.0, 20.0])
def test_a_slow_store_gets_a_beat_within_each_ttl(needs: float) -> None:
    """With the usual numbers, and seconds for each request, no two beats land further apart than the TTL."""
    schedule, patience = Schedule(10.0, 0.0, share=0.9), Patience(5.0, 22.5)
    landed, under_way, now = [0.0], list[tuple[float, float, float]](), 0.0
    while now < 600.0:
        heapq.heappush(under_way, (now + min(needs, patience.seconds), now, patience.seconds))
        now += schedule.advance(now)
        while under_way and under_way[0][0] <= now:
            end, begun, limit = heapq.heappop(under_way)
            patience.learn(limit, end - begun, ok=needs <= limit)
            if needs <= limit:
                landed.append(end)
    assert max(b - a for a, b in zip(landed, [*landed[1:], 600.0], strict=True)) < 45.0


@pytest.mark.parametrize(("interval", "ttl"), [(10.0, 45.0), (1.0, 5.0), (2.0, 60.0), (30.0, 60.0)])
def test_when_the_store_is_back_a_beat_is_free_to_go_out(interval: float, ttl: float) -> None:
    """However long it hung, fewer beats hang than may: the next one is at most an interval away."""
    patience = _sidecar.patience(config(beat={"interval": interval, "ttl": ttl}))
    for _ in range(10):
        patience.learn(patience.seconds, patience.seconds, ok=False)
    assert patience.seconds <= AT_ONCE * interval
    assert patience.seconds == max(5.0, min(ttl / 2, AT_ONCE * interval))


def test_a_failing_store_says_so_once_and_again_after_it_worked() -> None:
    """One line for a row of failures; what it was doing and why are in it."""
    told: list[dict[str, Any]] = []

    def fail(*_: object) -> None:
        raise OSError("no route\nand more")

    caller = a_caller(Objects(), Clock(), told)
    assert [caller.attempt("writing", act) for act in (fail, fail)] == [False, False]
    assert told == [{"trouble": "OSError: no route", "doing": "writing", "refused": False}]
    assert caller.attempt("writing", lambda store, limit: None)
    caller.attempt("writing", fail)
    assert len(told) == 2


def test_a_store_that_cannot_be_opened_is_tried_again() -> None:
    """An open that failed once (no descriptors left) is not remembered."""
    shared = _sidecar_work.Shared({"kind": "none yet"})
    with pytest.raises(ValueError, match="none yet"):
        shared()
    shared._config = {"kind": "local", "path": "/nowhere"}
    assert isinstance(shared(), Directory)
    assert shared() is shared()


# ---- beats


def test_progress_is_merged_within_a_step() -> None:
    """Two reports of different fields both stand; a field reported again has its last value."""
    beater = a_beater()
    beater.update({"progress": {"step": 1, "loss": 0.5}})
    beater.update({"progress": {"step": 2}})
    assert beater.progress == {"step": 2, "loss": 0.5}


def test_a_new_step_starts_without_the_progress_of_the_last() -> None:
    """A loss of step a is never shown as one of step b."""
    beater = a_beater(step_key="a")
    beater.update({"progress": {"loss": 0.5}})
    beater.update({"step_key": "b", "progress": {"step": 1}})
    assert (beater.step_key, beater.progress) == ("b", {"step": 1})


def test_a_beat_that_hangs_delays_no_other() -> None:
    """The next ones land while the first still waits for its answer; the goodbye then removes them all."""
    go, third = threading.Event(), threading.Event()
    waiting: list[str] = []

    def before(verb: str, *_: object) -> None:
        waiting.append(verb)
        if len(waiting) == 1:
            go.wait(30)
        if len(waiting) == 3:
            third.set()

    store = Objects(before)
    beater = a_beater(store)
    beater.start()
    assert third.wait(30)
    beater.finish("delete")
    assert not beater.finished.is_set()
    go.set()
    assert beater.finished.wait(30)
    assert store.objects == {}


def test_a_hung_mount_holds_a_bounded_number_of_beats() -> None:
    """Where no call can be cut off, no more threads pile up than `AT_ONCE`, and beats go on when it is back."""
    go = threading.Event()
    store = Objects(lambda verb, key, limit: go.wait(30))
    beater = a_beater(store)
    for _ in range(3 * AT_ONCE):
        beater.beat()
    assert len(beater._calls) == AT_ONCE
    go.set()
    for call in beater._calls:
        call.join(30)
    beater.beat()
    beater._calls[0].join(30)
    assert store.count("put") == AT_ONCE + 1


def test_a_process_without_a_thread_to_spare_still_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of processes the beat is written where it is."""

    class Refused:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    store = Objects()
    beater = a_beater(store)
    monkeypatch.setattr(_sidecar_work.threading, "Thread", Refused)
    beater.beat()
    assert json.loads(store.objects[KEY])["seq"] == 1


def test_a_beat_that_is_asked_for_goes_out_between_two_others() -> None:
    """With newer credentials, nobody waits for the next interval; the end comes no later for it."""
    landed = threading.Semaphore(0)
    store = Objects(lambda *_: landed.release())
    beater = a_beater(store, interval=600.0)
    beater.start()
    for _ in range(3):
        assert landed.acquire(timeout=30)
        beater.again()
    beater.finish("delete")
    assert beater.finished.wait(30)
    assert store.objects == {}


def test_the_last_words_are_tried_again_while_the_store_fails() -> None:
    """A store that is away when the parent dies is told when it is back."""
    failures = iter([OSError("away")] * 3)

    def before(*_: object) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    store = Objects(before)
    beater = a_beater(store)
    beater.finish("exited")
    beater.run()
    assert json.loads(store.objects[KEY])["state"] == "exited"


# ---- local directories


def test_a_directory_that_has_gone_is_not_made_again(tmp_path: Path) -> None:
    """An unmounted or renamed root gets no stray heartbeat in its place; a root that never was is made."""
    root = tmp_path / "root"
    directory = Directory(str(root))
    directory.put("live/r/a.json", b"1", 1.0)
    root.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        directory.put("live/r/a.json", b"2", 1.0)
    assert not root.exists()
    (tmp_path / "away").rename(root)
    directory.put("live/r/a.json", b"3", 1.0)
    assert directory.get("live/r/a.json", 1.0) == b"3"


def test_beats_that_wake_together_do_not_tear_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount held several up between write and rename: each is whole, and nothing is left beside the last."""
    together, replace = threading.Barrier(4), os.replace
    directory, bodies = Directory(str(tmp_path)), [bytes([n]) * 100 for n in range(4)]

    def held_up(source: str, target: str) -> None:
        together.wait(30)
        replace(source, target)

    monkeypatch.setattr(os, "replace", held_up)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda body: directory.put("live/r/a.json", body, 1.0), bodies))
    assert directory.get("live/r/a.json", 1.0) in bodies
    assert directory.names("live/r/", None, 1.0) == ["a.json"]
    assert directory.names("live/none/", None, 1.0) == []
