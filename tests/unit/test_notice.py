"""Being told to leave: what a session and a loop do about it, and that nobody else's handlers suffer."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from training_doubles import Killed, World, raising

from dagster_resilient.checkpoint import EverySteps
from dagster_resilient.errors import FencedError, PreemptedError, StoreUnavailableError
from dagster_resilient.state import notice as module
from dagster_resilient.state.notice import Notice, listening
from dagster_resilient.state.preemption import mark_preempted, read_preemption
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.task import Attempt, Task, open_task

NEVER = 100_000


class Interrupted(BaseException):
    """What a host's handler raises."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Fail where a test leaves a handler behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.fixture
def world() -> World:
    """A fresh store, log and clock."""
    return World()


@pytest.fixture
def previous() -> Iterator[list[int]]:
    """A handler from before that notes what it gets."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def telling(at: int, number: int = signal.SIGTERM, times: int = 1) -> Any:
    """Return a step function that has this process told to leave within one step."""

    def each(_session: Any, step: int) -> None:
        for _ in range(times if step == at else 0):
            signal.raise_signal(number)

    return each


@pytest.fixture(autouse=True)
def fresh_handlers() -> Iterator[None]:
    """Those of a new process: tests before this one may have left others."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---- a training


def test_a_training_saves_at_the_end_of_the_step_and_leaves(world: World) -> None:
    """However rare saves are, and however often it is told; the next try goes on behind that step."""
    with pytest.raises(PreemptedError, match="by SIGTERM after step 4: it is saved up to step 4"):
        world.train(10, telling(3, times=3), save=EverySteps(NEVER))
    assert world.last.calls == ["acquire", "commit", "preempted by SIGTERM", "release"]
    session = world.train(10)
    assert (session.resumed_from, session.step) == (4, 10)


def test_what_was_just_saved_is_not_saved_again(world: World) -> None:
    """The policy saved the same state a moment before."""
    with pytest.raises(PreemptedError):
        world.train(10, telling(3), save=EverySteps(2))
    assert world.last.saved == [2, 4]


def test_a_training_that_is_at_its_goal_completes_first(world: World) -> None:
    """Told in the last step: the next try finds it done."""
    with pytest.raises(PreemptedError):
        world.train(4, telling(3))
    assert world.last.calls == ["acquire", "commit", "complete", "preempted by SIGTERM", "release"]


def test_a_break_after_the_signal_ends_nothing_for_good(world: World, previous: list[int]) -> None:
    """A script's own handler makes it leave the loop: saved, and the next try goes on to the same goal."""

    def script() -> None:
        with world.session(save=EverySteps(NEVER)) as session:
            for step in session.steps(10):
                telling(3)(session, step)
                if previous:
                    break

    with pytest.raises(PreemptedError):
        script()
    assert world.last.saved == [4]
    assert world.train(10).step == 10


@pytest.mark.parametrize(
    "ask",
    [lambda session: next(session.steps(5)), lambda session: session.save(), lambda session: None],
    ids=["a loop", "a save", "the end"],
)
def test_told_outside_of_a_loop(world: World, ask: Any) -> None:
    """The next boundary is where the script next asks for anything, or leaves."""

    def script() -> None:
        with world.session() as session:
            signal.raise_signal(signal.SIGTERM)
            ask(session)

    with pytest.raises(PreemptedError):
        script()
    assert "complete" not in world.last.calls


def test_a_store_that_is_down_is_the_cause(world: World) -> None:
    """Nothing more can be done within the grace; the message says what stands."""
    down = StoreUnavailableError("down")

    def each(session: Any, step: int) -> None:
        if step == 5:
            world.store.fails = lambda verb, key: down if verb == "put" else None
        telling(5)(session, step)

    with pytest.raises(PreemptedError, match="after step 6: it is saved up to step 4") as caught:
        world.train(10, each, save=EverySteps(4))
    assert caught.value.__cause__ is down


def test_a_fence_goes_before_it(world: World) -> None:
    """SIGTERM of the heartbeat process, since a newer try has taken over: nothing is saved, and the reason is told."""

    def each(session: Any, step: int) -> None:
        world.last.fence = "taken over"
        telling(0)(session, step)

    with pytest.raises(FencedError):
        world.train(10, each)
    assert world.last.calls == ["acquire", "release"]


def test_an_error_after_the_signal_is_its_consequence(world: World) -> None:
    """A loader's worker that was told too, for one. Half a step is not saved; the error is the cause."""

    def each(session: Any, step: int) -> None:
        telling(3)(session, step)
        raising(RuntimeError("DataLoader worker exited"), 3)(session, step)

    with pytest.raises(PreemptedError, match="up to step 2") as caught:
        world.train(10, each, save=EverySteps(2))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_exception_that_is_no_error_passes(world: World) -> None:
    """Ctrl-C, or an exit, is somebody's will."""

    def each(session: Any, step: int) -> None:
        telling(3)(session, step)
        raising(Killed(), 3)(session, step)

    with pytest.raises(Killed):
        world.train(10, each)


# ---- a loop over partitions


def a_task(attempt: Attempt, *keys: str) -> Task:
    """Return a task with several partitions."""
    return Task(attempt, ("parts",), keys)


@pytest.fixture
def attempt() -> Attempt:
    """A try in this process's memory."""
    return open_task(f"memory://{uuid.uuid4().hex}", "parts").attempt


def test_a_loop_finishes_the_partition_in_work_and_no_other(attempt: Attempt) -> None:
    """What comes in time is committed; the next try does the rest."""
    seen = []

    def script(told_in: str) -> None:
        for part in a_task(attempt, *"abcd").partitions():
            seen.append(part.key)
            if part.key == told_in:
                signal.raise_signal(signal.SIGTERM)
            part.save(1)

    with pytest.raises(PreemptedError, match="2 of 4 partitions are committed"):
        script("b")
    assert seen == ["a", "b"]
    script("nowhere")
    assert seen == ["a", "b", "c", "d"]


def test_a_training_within_a_loop_ends_both(attempt: Attempt) -> None:
    """The training saves; the loop hands out nothing more; the handler is given back once."""

    def script() -> None:
        for part in a_task(attempt, "a", "b").partitions():
            with part.training() as session:
                for step in session.steps(5):
                    telling(2)(session, step)
            part.save(1)

    with pytest.raises(PreemptedError, match="The training was told"):
        script()


def test_a_loop_that_is_left_takes_the_signal_with_it(attempt: Attempt, previous: list[int]) -> None:
    """It was put off for the loop's sake: with nobody left who would answer it, it comes again."""
    loop = a_task(attempt, "a", "b").partitions()
    next(loop)
    signal.raise_signal(signal.SIGTERM)
    loop.close()
    assert len(previous) == 2


# ---- others' handlers


def test_the_handler_from_before_is_called_at_once_and_comes_back(world: World, previous: list[int]) -> None:
    """Once, however often the signal comes; afterwards it is as if nothing had been."""
    handler = signal.getsignal(signal.SIGTERM)

    def each(session: Any, step: int) -> None:
        telling(3, times=2)(session, step)
        assert previous == [signal.SIGTERM] * (step == 3)

    with pytest.raises(PreemptedError):
        world.train(10, each)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_what_the_handler_from_before_raises_is_raised_at_the_boundary(world: World) -> None:
    """A script whose handler exits with 0 exits with 0, after the save; a host's interrupt ends all of its run."""

    def handler(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit) as caught:
            world.train(10, telling(3))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (world.last.saved, caught.value.code) == ([4], 0)
    assert isinstance(caught.value.__cause__, PreemptedError)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_of_one_step_ends_with_our_error(number: int) -> None:
    """Its host waits for it, and hands on by SIGINT that it was told itself."""
    with pytest.raises(PreemptedError), listening(Notice(bool, alone=True)) as told:  # noqa: PT012 - the last one raises
        signal.raise_signal(number)
        told.leave("saved")


def test_ctrl_c_stays_what_it_is_where_a_person_sits_before_it(world: World) -> None:
    """At once, and nothing is saved."""
    with pytest.raises(KeyboardInterrupt):
        world.train(10, telling(3, signal.SIGINT))
    assert world.last.saved == []


def test_a_third_interrupt_is_impatience() -> None:
    """Ctrl-C reaches a step twice: from the terminal and from its run worker. The next one is meant."""
    with pytest.raises(KeyboardInterrupt), listening(Notice(bool, alone=True)):  # noqa: PT012 - the third one raises
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored(world: World) -> None:
    """Whoever had it ignored wanted that."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert world.train(10, telling(3)).step == 10
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_was_put_over_ours_stays(world: World) -> None:
    """Only what is ours is taken away; the other one may go on calling ours, which then passes on."""
    heard: list[int] = []
    with world.session() as session:
        ours = signal.getsignal(signal.SIGTERM)
        assert callable(ours)
        theirs = lambda number, frame: (heard.append(number), ours(number, frame))  # noqa: E731 - compared below
        before = signal.signal(signal.SIGTERM, theirs)
        list(session.steps(1))
    assert before is ours
    assert signal.getsignal(signal.SIGTERM) is theirs
    with pytest.raises(PreemptedError):
        world.train(10, telling(3))
    assert heard == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_another_thread_trains_without_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Only the main thread may handle signals; it is said once, for whoever looks."""
    caplog.set_level("DEBUG")
    module._ear._said_why_not = False
    threads = [threading.Thread(target=world.train, args=(2,)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert caplog.text.count("only the main thread can handle signals") == 1


def test_a_forked_child_obeys_as_if_nobody_listened() -> None:
    """A pool's worker that its parent ends must end."""
    with listening(Notice()):
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


# ---- a user's cancel


def host(_number: int, _frame: object) -> None:
    """Do what Dagster's handler does."""
    raise Interrupted


@pytest.fixture
def hosted() -> Iterator[None]:
    """Under a host that handles both signals alike, as Dagster does."""
    before = {number: signal.signal(number, host) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("hosted")
def test_a_users_cancel_does_not_wait_for_a_boundary() -> None:
    """It is asked for at each signal, also behind one that came from a machine; then the host's handler acts."""
    cancelled = threading.Event()
    with pytest.raises(Interrupted), listening(Notice(cancelled.is_set, alone=True)) as told:  # noqa: PT012 - it waits
        signal.raise_signal(signal.SIGTERM)
        assert told.told == "SIGTERM"
        cancelled.set()
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(30)  # a signal that is let through ends it


@pytest.mark.usefixtures("hosted")
def test_a_late_answer_meets_no_later_work() -> None:
    """The host was asked twice. One answer ended the work; the other one comes while the next work listens."""
    late, hosts = threading.Event(), iter([lambda: late.wait(30), lambda: True])
    others = _thread._count()
    with pytest.raises(Interrupted), listening(Notice(lambda: next(hosts)(), alone=True)):  # noqa: PLW0108, PT012 - two hosts; waits
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        time.sleep(30)  # a signal that is let through ends it
    with pytest.raises(PreemptedError), listening(Notice(lambda: False, alone=True)) as told:  # noqa: PT012 - it waits
        signal.raise_signal(signal.SIGTERM)
        late.set()
        deadline = time.monotonic() + 30
        while _thread._count() > others and time.monotonic() < deadline:
            time.sleep(0.01)
        told.leave("saved")


@pytest.mark.usefixtures("hosted")
def test_a_host_that_cannot_tell_is_no_cancel(caplog: pytest.LogCaptureFixture) -> None:
    """Its database may be down: then it ends at the boundary, with the question in the log."""
    asked = threading.Event()

    def fails() -> bool:
        asked.set()
        raise ConnectionError("no database")

    with pytest.raises(PreemptedError), listening(Notice(fails, alone=True)) as told:  # noqa: PT012 - it waits
        signal.raise_signal(signal.SIGTERM)
        assert asked.wait(30)
        deadline = time.monotonic() + 30
        while "no database" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        told.leave("saved")
    assert "no database" in caplog.text


# ---- the record


def test_the_first_word_of_a_run_stands() -> None:
    """Several steps of a run may be told at once."""
    records = ObjectRecords(open_store(f"memory://{uuid.uuid4().hex}"))
    assert read_preemption(records, "run") is None
    for task in ("one", "two"):
        mark_preempted(records, "run", task=task, signal="SIGTERM", host="h")
    found = read_preemption(records, "run")
    assert found is not None
    assert (found.task, found.signal, found.host) == ("one", "SIGTERM", "h")


def test_a_record_that_cannot_be_written_is_a_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The process has better things to do than to fail for it."""
    world.store.fails = lambda verb, key: StoreUnavailableError("down")
    mark_preempted(ObjectRecords(world.store), "run", task="t", signal="SIGTERM", host="h")
    assert "could not be recorded: down" in caplog.text


def test_a_script_records_nothing(attempt: Attempt) -> None:
    """No sensor looks after it; the records would only pile up."""
    attempt.mark_preempted("parts", "SIGTERM")
    assert read_preemption(attempt.records, attempt.claim.run_id) is None
