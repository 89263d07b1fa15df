"""What makes the sidecar end its parent: a fence, or a newer generation, that was read. Nothing else does."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest
from sidecar_doubles import FENCE, LOG, Clock, Objects, a_caller, config, me

from dagster_resilient.state import _sidecar
from dagster_resilient.state._sidecar_work import Lookout


def a_lookout(store: Objects, clock: Clock, told: list[dict[str, Any]] | None = None, **changes: Any) -> Lookout:
    """Return a lookout that is not started."""
    return Lookout(config(**changes), a_caller(store, clock, told), threading.Event())


def a_watch(generation: int = 3) -> dict[str, Any]:
    """What the parent says when it holds a lease."""
    return {"prefix": LOG, "generation": generation, "task": "train"}


def look_for(lookout: Lookout, clock: Clock, seconds: float) -> None:
    """Let the lookout do what it does in a time."""
    end = clock.now + seconds
    while clock.now < end:
        pause = lookout.turn()  # first: a look may take time too
        clock.now += max(pause, 0.001)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [(b'{"reason": "lost"}', "lost"), (b"torn", "the fence gives no reason"), (b"[]", "the fence gives no reason")],
)
def test_a_fence_counts_whatever_is_in_it(raw: bytes, reason: str) -> None:
    """A fence is an object that exists; its reason is only for people."""
    store, clock = Objects(), Clock()
    lookout = a_lookout(store, clock)
    lookout.turn()
    assert lookout.fence is None
    store.objects[FENCE] = raw
    look_for(lookout, clock, 12.0)
    assert lookout.fence == reason


def test_a_newer_generation_is_found_and_reported_with_both_numbers() -> None:
    """Entries of the own generation mean nothing, also when there are many."""
    store, clock = Objects(), Clock()
    store.append(1, 3)
    lookout = a_lookout(store, clock)
    lookout.watch(a_watch())
    for n in range(2, 6):
        look_for(lookout, clock, 10.0)
        store.append(n, 3)
    assert lookout.taken() == []
    store.append(6, 4)
    look_for(lookout, clock, 12.0)
    assert [watch.reason().split(";")[0] for watch in lookout.taken()] == [
        "a newer attempt took over train (generation 4, ours was 3)"
    ]


def test_a_new_lease_of_the_same_process_takes_nothing_over() -> None:
    """A notebook that begins its training anew after an error must not be ended by its own sidecar."""
    store, clock = Objects(), Clock()
    store.append(1, 3)
    lookout = a_lookout(store, clock)
    lookout.watch(a_watch())
    pid, started = me()
    store.append(2, 4, owner={"host": os.uname().nodename, "pid": pid, "started": started})
    look_for(lookout, clock, 25.0)
    assert lookout.taken() == []
    store.append(3, 5, owner={"host": os.uname().nodename, "pid": pid, "started": started + 1})
    look_for(lookout, clock, 25.0)
    assert [watch.found for watch in lookout.taken()] == [5]


def test_a_watch_costs_one_list_per_interval_and_reads_only_what_is_new() -> None:
    """Nothing in the first interval; after that a LIST each, and one GET for each look that finds another number."""
    store, clock = Objects(), Clock()
    store.append(1, 3)
    lookout = a_lookout(store, clock)
    lookout.watch(a_watch())
    look_for(lookout, clock, 9.9)
    assert store.count("list") == 0
    look_for(lookout, clock, 90.0)
    assert 8 <= store.count("list") <= 9
    assert sum(key.startswith(LOG) for verb, key in store.calls if verb == "get") == 1


def test_a_look_at_a_log_never_pushes_the_fence_aside() -> None:
    """With more logs than an interval has time for, the fence is still looked for in every one."""
    clock = Clock()

    def slowly(*_: object) -> None:
        clock.now += 1.0

    store = Objects(slowly)
    lookout = a_lookout(store, clock)
    for n in range(100):
        lookout.watch({**a_watch(), "prefix": f"tasks/t/log/{n}/"})
    look_for(lookout, clock, 60.0)
    store.calls.clear()
    look_for(lookout, clock, 60.0)
    assert store.calls.count(("get", FENCE)) >= 5
    assert store.count("list") >= 50


@pytest.mark.parametrize("raw", [b"torn", b"{}", b"[]", b'{"generation": null}'])
def test_a_head_that_cannot_be_read_takes_nothing_over(raw: bytes) -> None:
    """Only a generation that was read counts; the trouble is told, and the next entry is judged again."""
    store, clock, told = Objects(), Clock(), list[dict[str, Any]]()
    store.objects[f"{LOG}{7:010d}.json"] = raw
    lookout = a_lookout(store, clock, told)
    lookout.watch(a_watch())
    look_for(lookout, clock, 30.0)
    assert lookout.taken() == []
    assert [message["doing"] for message in told] == ["looking at the log of train"]
    store.append(8, 4)
    look_for(lookout, clock, 12.0)
    assert len(lookout.taken()) == 1


@pytest.mark.parametrize("verb", ["list", "get"])
def test_a_store_that_fails_takes_nothing_over(verb: str) -> None:
    """A LIST or GET that fails, or finds nothing, says nothing; when the store is back the newer entry is found."""
    clock, errors = Clock(), iter([OSError("away"), TimeoutError(), FileNotFoundError("trimmed"), PermissionError()])

    def before(called: str, key: str, _: float) -> None:
        if called == verb and key.startswith(LOG) and (error := next(errors, None)) is not None:
            raise error

    store = Objects(before)
    store.append(2, 4)
    lookout = a_lookout(store, clock)
    lookout.watch(a_watch())
    look_for(lookout, clock, 40.0)
    assert lookout.taken() == []
    look_for(lookout, clock, 30.0)
    assert len(lookout.taken()) == 1


def test_a_listing_that_comes_back_empty_says_nothing() -> None:
    """Directory listings raced by deletes do that."""
    store, clock = Objects(), Clock()
    lookout = a_lookout(store, clock, watches=[a_watch()])
    store.objects[f"{LOG}stray.txt"] = b""
    look_for(lookout, clock, 25.0)
    assert lookout.taken() == []
    assert store.count("get") == store.calls.count(("get", FENCE))


def a_guard(monkeypatch: pytest.MonkeyPatch) -> tuple[_sidecar.Guard, int, list[dict[str, Any]]]:
    """Return a guard that is not started, the pipe into it, and what it tells."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(_sidecar, "tell", told.append)
    receiver, sender = os.pipe()
    os.set_blocking(receiver, False)
    guard = _sidecar.Guard(config(watches=[a_watch()]), _sidecar.Inbox(receiver))
    return guard, sender, told


def find_takeover(guard: _sidecar.Guard) -> None:
    """Let the lookout have read the entry of a successor."""
    watch = guard._lookout._watches[LOG]
    watch.found = 4
    guard._lookout._taken.append(watch)


def test_a_takeover_gives_the_parent_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once, with log and generation, and the end is set as for a fence."""
    guard, _, told = a_guard(monkeypatch)
    for _ in range(2):
        find_takeover(guard)
        guard._judge(100.0)
    assert guard._ends == {LOG: 110.0}
    assert [(message["prefix"], message["generation"]) for message in told] == [(LOG, 3)]


@pytest.mark.parametrize("line", [{"unwatch": LOG}, {"watch": a_watch(4)}])
def test_a_lease_that_was_given_away_is_not_taken_over(monkeypatch: pytest.MonkeyPatch, line: dict[str, Any]) -> None:
    """The parent's word that it gave the lease away, or has it anew, lies in the pipe: it is read before judging."""
    guard, pipe, told = a_guard(monkeypatch)
    os.write(pipe, json.dumps(line).encode() + b"\n")
    find_takeover(guard)
    guard._judge(100.0)
    assert (guard._ends, told) == ({}, [])


def test_a_parent_that_lets_go_of_a_taken_task_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its grace it may give up the one task and keep the others; a fence of the whole run stays."""
    guard, pipe, _ = a_guard(monkeypatch)
    find_takeover(guard)
    guard._lookout.fence = "lost"
    guard._judge(100.0)
    assert set(guard._ends) == {LOG, "fence"}
    os.write(pipe, json.dumps({"unwatch": LOG}).encode() + b"\n")
    guard._read_inbox()
    assert set(guard._ends) == {"fence"}
