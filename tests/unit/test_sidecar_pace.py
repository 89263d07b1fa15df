"""When a sidecar thinks that its parent hangs, and how it shows that in the store."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from sidecar_doubles import HUNG, Clock, Objects, a_caller, config

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.state._sidecar_pace import FACTOR, KEPT, SHORTEST_LIMIT, Expected, Marker, Pace
from dagster_resilient.state.hangs import Hang, check_hung_after


class Time:
    """A pace whose watch turns every five seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = Pace([], 0.0)

    def expect(self, task: str, limit: float | None = None, first: float | None = SHORTEST_LIMIT) -> None:
        """Expect progress of a task from now on."""
        self.pace.expect({"task": task, "limit": limit, "first": first})

    def wait(self, seconds: float, *, counts: bool = True) -> str | None:
        """Let time pass; return what hangs after it."""
        while seconds > 0:
            self.now += min(5.0, seconds)
            self.pace.turn(self.now, counts=counts)
            seconds -= 5.0
        hung = self.pace.hung()
        return None if hung is None else hung.task

    def steps(self, *seconds: float, task: str = "train") -> None:
        """Make progress after each of these times."""
        for one in seconds:
            assert self.wait(one) is None, f"{one} s were taken for a hang"
            self.pace.progress(task)


@pytest.fixture
def time() -> Time:
    """At the beginning."""
    return Time()


def test_nothing_hangs_that_is_not_expected_to_progress(time: Time) -> None:
    """Between loops a step may be silent for as long as it likes."""
    assert time.wait(1e5) is None
    time.expect("train")
    time.pace.relax("train")
    assert time.wait(1e5) is None
    assert time.pace.is_idle


def test_the_first_step_gets_a_time_of_its_own(time: Time) -> None:
    """Nothing is known of a training that has not begun: compiling and loading take their time."""
    time.expect("train")
    assert time.wait(SHORTEST_LIMIT - 1) is None
    assert time.wait(1) == "train"


def test_quick_steps_are_no_reason_to_be_quick_with_a_verdict(time: Time) -> None:
    """An evaluation may take a thousand times as long as a step."""
    time.expect("train")
    time.steps(*[1.0] * 30, SHORTEST_LIMIT - 1, *[1.0] * 30, SHORTEST_LIMIT - 1)
    time.steps(*[1.0] * KEPT)
    assert time.wait(SHORTEST_LIMIT) == "train"


def test_slow_steps_get_ten_times_the_longest_of_the_last_ones(time: Time) -> None:
    """Three are enough to know, and what is long past is forgotten."""
    time.expect("train")
    time.steps(600.0, 900.0, 600.0)
    assert time.wait(FACTOR * 900 - 1) is None
    time.pace.progress("train")
    time.steps(*[600.0] * KEPT)
    assert time.wait(FACTOR * 600) == "train"


def test_two_intervals_are_not_enough_to_learn_from(time: Time) -> None:
    """Until then half an hour counts, or nothing at all where steps may be of any size."""
    time.expect("train")
    time.expect("loop", first=None)
    time.steps(900.0, 900.0, task="loop")
    assert time.wait(SHORTEST_LIMIT) == "train"
    time.pace.relax("train")
    assert time.wait(1e5) is None
    time.pace.progress("loop")
    assert time.wait(1e7) == "loop"


def test_the_users_limit_is_the_limit(time: Time) -> None:
    """From the first step on, whatever was learned."""
    time.expect("train", limit=60.0)
    time.steps(50.0, 55.0, 59.0, 55.0)
    assert time.wait(60.0) == "train"


def test_time_in_which_the_parent_could_not_run_does_not_count(time: Time) -> None:
    """Stopped, or with the store away; what passed before goes on counting after it."""
    time.expect("train", limit=60.0)
    assert time.wait(50.0) is None
    assert time.wait(1e5, counts=False) is None
    assert time.wait(9.0) is None
    assert time.wait(1.0) == "train"


def test_a_watch_that_slept_itself_counts_little_of_it(time: Time) -> None:
    """A frozen container thaws with its parent well: one turn is worth ten seconds at most."""
    time.expect("train", limit=60.0)
    time.pace.turn(1e6, counts=True)
    assert time.pace.hung() is None


def test_progress_ends_a_hang_and_is_learned_from(time: Time) -> None:
    """Whatever took so long once may do so again."""
    time.expect("train")
    time.steps(1.0, 1.0, 1.0)
    assert time.wait(SHORTEST_LIMIT) == "train"
    time.pace.progress("train")
    assert time.pace.hung() is None
    assert time.wait(FACTOR * SHORTEST_LIMIT - 1) is None
    assert time.wait(1) == "train"


def test_reports_that_are_read_together_are_one(time: Time) -> None:
    """A sidecar that was slow to read does not take the steps for infinitely fast."""
    time.expect("train", first=None)
    time.steps(1000.0, 1000.0, 1000.0)
    for _ in range(50):
        time.pace.progress("train")
    assert time.wait(FACTOR * 1000 - 1) is None
    assert time.wait(1) == "train"


def test_a_training_within_a_loop_is_progress_of_both(time: Time) -> None:
    """Also its beginning and its end; the loop alone tells nothing of the training."""
    time.expect("loop", limit=60.0)
    assert time.wait(50.0) is None
    time.expect("other[a]", limit=60.0)
    time.steps(50.0, 50.0, task="other[a]")
    time.pace.relax("other[a]")
    time.steps(50.0, task="loop[b]")
    time.expect("loop[b]", limit=101.0)
    time.steps(50.0, 50.0, task="loop")
    assert time.wait(1.0) == "loop[b]"


def test_reports_of_others_are_no_progress(time: Time) -> None:
    """Of another task, of a task whose name only begins alike, and lines without any."""
    time.expect("train", limit=60.0)
    assert time.wait(50.0) is None
    for task in ("other", "training", None, 5):
        time.pace.progress(task)
    assert time.wait(10.0) == "train"


def test_what_hung_first_is_named_for_as_long_as_it_does(time: Time) -> None:
    """The mark is not made anew, and younger, because something around it hangs as well."""
    time.expect("loop", limit=90.0)
    time.expect("loop[a]", limit=60.0)
    assert time.wait(60.0) == "loop[a]"
    first = time.pace.hung()
    assert time.wait(60.0) == "loop[a]"
    assert time.pace.hung() is first


def test_the_watch_knows_when_to_look_again(time: Time) -> None:
    """At the first limit that is still ahead; never, where none is."""
    assert time.pace.left() == float("inf")
    time.expect("a", limit=60.0)
    time.expect("b", limit=90.0)
    time.wait(20.0)
    assert time.pace.left() == 40.0
    time.wait(50.0)
    assert time.pace.left() == 20.0


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "5"])
def test_a_limit_that_is_none_is_refused(seconds: Any) -> None:
    """By name, with what to do."""
    with pytest.raises(ConfigurationError, match="hung_after"):
        check_hung_after(seconds)


# ---- the mark


def a_marker(store: Objects, *, restarted: bool = False) -> Marker:
    """Return a marker that is not started."""
    return Marker(config(restarted=restarted, beat={"interval": 0.01, "host": "h", "pid": 7}), a_caller(store, Clock()))


def a_hang() -> Expected:
    """Return something that hangs."""
    return Expected({"task": "train", "limit": 60.0, "first": None}, 0.0)


def test_the_mark_says_what_hangs() -> None:
    """An observer reads task, limit, last progress and process."""
    store = Objects()
    marker = a_marker(store)
    hung = a_hang()
    hung.look(61.0)
    marker.show(hung, {"task": "train", "step": 730})
    assert marker.settle()
    hang = Hang.from_bytes(store.objects[HUNG], HUNG)
    assert (hang.task, hang.seconds, hang.limit, hang.host, hang.pid) == ("train", 61.0, 60.0, "h", 7)
    words = "its step train made no progress for 1,850 s (limit 60 s), after step 730, in process 7 on h"
    assert hang.words(1789.0) == words


def test_a_process_that_gets_on_costs_no_request() -> None:
    """Neither a write nor a delete, also at its end."""
    store = Objects()
    marker = a_marker(store)
    assert marker.settle()
    marker.finish(1.0)
    marker.run()
    assert store.calls == []
    assert marker.finished.is_set()


def test_the_mark_is_written_once_and_deleted_once() -> None:
    """However often the watch turns."""
    store = Objects()
    marker = a_marker(store)
    marker.show(a_hang(), {})
    assert marker.settle()
    assert marker.settle()
    marker.show(None, {})
    assert marker.settle()
    assert marker.settle()
    assert store.calls == [("put", HUNG), ("delete", HUNG)]


def test_a_mark_that_could_not_be_written_in_time_is_deleted_more_than_once() -> None:
    """Its write may land behind the first delete, and must not convict."""
    away = [True]

    def before(verb: str, _key: str, _limit: float) -> None:
        if away[0]:
            raise TimeoutError(verb)

    store = Objects(before)
    marker = a_marker(store)
    marker.show(a_hang(), {})
    assert not marker.settle()
    marker.show(None, {})
    assert not marker.settle()
    away[0] = False
    assert not marker.settle()
    store.objects[HUNG] = json.dumps({}).encode()
    while not marker.settle():
        pass
    assert HUNG not in store.objects


def test_who_ends_takes_the_mark_away() -> None:
    """A step that failed is tried again in the same run, and does not hang any more."""
    store = Objects()
    marker = a_marker(store)
    marker.start()
    marker.show(a_hang(), {})
    seen = threading.Event()
    store.before = lambda verb, *_: seen.set() if verb == "delete" else None
    while HUNG not in store.objects:
        seen.wait(0.01)
    marker.finish(1.0)
    assert marker.finished.wait(30)
    marker.join(30)
    assert not marker.is_alive()
    assert HUNG not in store.objects


def test_a_sidecar_that_was_replaced_may_have_left_a_mark() -> None:
    """The one after it begins without."""
    store = Objects()
    store.objects[HUNG] = b"{}"
    assert a_marker(store, restarted=True).settle()
    assert HUNG not in store.objects
