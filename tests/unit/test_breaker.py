"""The circuit breaker: when a store is not asked, who asks it again, and that recovery is never late."""

from __future__ import annotations

import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dagster_resilient.errors import (
    CircuitOpenError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage.breaker import Breaker, UndecidedError, Visit, breaker_of
from dagster_resilient.storage.memory_store import MemoryObjectStore
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.storage.retry import OUTAGE_PATIENCE, RetryingStore, hasty
from dagster_resilient.testing import FakeClock, Fault, FaultStore, Operation

PLACE = ("s3://bucket/p", "S3ObjectStore", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Waits take no time, and the clock shows how long they would have taken."""
    fake = FakeClock(start=1000.0)
    monkeypatch.setattr(time, "sleep", fake.sleep)
    monkeypatch.setattr(time, "monotonic", fake)
    return fake


@pytest.fixture
def faulty() -> FaultStore:
    """A store with one object, that can be down."""
    memory = MemoryObjectStore(uuid.uuid4().hex)
    memory.put("a", b"1")
    return FaultStore(memory)


def dead_until(inner: ObjectStore, clock: FakeClock, end: float) -> FaultStore:
    """A store that does not answer before a time."""
    return FaultStore(inner, lambda _number, _operation: Fault("fail") if clock() < end else None)


def opened(faulty: FaultStore) -> RetryingStore:
    """The store, after five failed requests in a row, without patience."""
    store = RetryingStore(faulty, patience=0.0)
    faulty.down = True
    for _ in range(5):
        with pytest.raises(StoreUnavailableError):
            store.get("a")
    return store


def unavailable() -> None:
    """A request that is not answered."""
    raise StoreUnavailableError("no answer.", store="s3://bucket/p")


def fail(breaker: Breaker, times: int = 5, request: Callable[[], object] = unavailable) -> None:
    """Send requests that fail, each of a caller without patience."""
    for _ in range(times):
        with pytest.raises(StorageError):
            Visit(breaker, 0.0)(request)


def test_four_failures_leave_it_closed_and_five_open_it(faulty: FaultStore, clock: FakeClock) -> None:
    """The fifth request in a row without an answer is the last one that is sent."""
    store = opened(faulty)
    assert faulty.count("get") == 5
    with pytest.raises(CircuitOpenError):
        store.get("a")
    assert faulty.count("get") == 5


def test_an_answer_between_two_failures_starts_the_count_anew(clock: FakeClock) -> None:
    """Only failures in a row count: a store that answers now and then is asked."""
    breaker = Breaker(PLACE)
    for _ in range(3):
        fail(breaker, 4)
        assert Visit(breaker, 0.0)(lambda: "answer") == "answer"
    fail(breaker, 4)
    assert breaker.turn() == (0.0, None)


@pytest.mark.parametrize("error", [ObjectNotFoundError, StoragePermissionError, StorageError, UndecidedError])
def test_any_answer_of_the_store_is_an_answer(clock: FakeClock, error: type[StorageError]) -> None:
    """Refusals, absence and "somebody else writes" are no outage: they never open the circuit, and they close it."""

    def refuse() -> None:
        raise error("no.")

    breaker = Breaker(PLACE)
    fail(breaker, 20, refuse)
    assert breaker.turn() == (0.0, None)
    fail(breaker)
    clock.advance(5.0)
    fail(breaker, 1, refuse)
    assert breaker.turn() == (0.0, None)


def test_a_hasty_call_fails_at_once_and_says_why(faulty: FaultStore, clock: FakeClock) -> None:
    """Since when the circuit is open, after which error, and when the store is asked again. No request, no wait."""
    store = opened(faulty)
    before = clock()
    with pytest.raises(StoreUnavailableError, match=r"open since 20\d\d-.*the last: .*the store is down.*in \d\.\d s"):
        store.get("a")
    with pytest.raises(StoreUnavailableError, match="circuit"):
        store.with_patience(breaker_of(faulty).turn()[0] / 2).get("a")
    assert clock() == before
    assert faulty.count("get") == 5


def test_a_patient_call_waits_and_goes_on(faulty: FaultStore, clock: FakeClock) -> None:
    """It sends nothing until the half-open moment, then one request, which is answered."""
    store = opened(faulty)
    faulty.down = False
    assert store.with_patience(60.0).get("a") == b"1"
    assert faulty.count("get") == 6
    assert 0.0 < clock() - 1000.0 <= 1.0
    assert store.get("a") == b"1"


@pytest.mark.parametrize("seconds", [10.0, 180.0, 880.0])
def test_work_goes_on_within_seconds_of_the_end_of_an_outage(
    faulty: FaultStore, clock: FakeClock, seconds: float
) -> None:
    """However long it lasted, and it is not asked more often than the backoff allows."""
    for _ in range(20):
        end = clock() + seconds
        cut_off = dead_until(faulty, clock, end)
        assert RetryingStore(cut_off, OUTAGE_PATIENCE).get("a") == b"1"
        assert clock() - end <= 5.0
        assert cut_off.count("get") <= 20 + seconds


def test_open_times_grow_are_spread_and_end(clock: FakeClock) -> None:
    """Uniform up to 1 s at first, then 2 s, then 4 s, then 5 s, also after days of an outage."""
    first, second, last = [], [], []
    for _ in range(50):
        breaker = Breaker(PLACE)
        fail(breaker)
        waits = []
        for _ in range(12):
            waits.append(breaker.turn()[0])
            clock.advance(waits[-1])
            fail(breaker, 1)
        first.append(waits[0])
        second.append(waits[1])
        last += waits[4:]
    assert max(first) <= 1.0 < max(second) <= 2.0
    assert 4.0 < max(last) <= 5.0
    assert min(last) < 1.0
    for _ in range(2000):
        clock.advance(5.0)
        fail(breaker, 1)
    assert breaker.turn()[0] <= 5.0


def test_one_probe_at_a_time(clock: FakeClock) -> None:
    """While it is under way nobody else asks, a hasty caller is refused, and its failure opens the circuit again."""
    breaker = Breaker(PLACE)
    fail(breaker)
    clock.advance(1.0)
    asked = []

    def probe() -> None:
        with pytest.raises(CircuitOpenError):
            Visit(breaker, 0.0)(lambda: asked.append("another"))
        asked.append("probe")
        unavailable()

    fail(breaker, 1, probe)
    assert asked == ["probe"]
    assert breaker.turn()[0] > 0.0


def test_a_probe_that_hangs_does_not_keep_others_from_asking(clock: FakeClock) -> None:
    """After 5 s the next one may: a silent connection, or a large write, must not delay all work."""
    breaker = Breaker(PLACE)
    fail(breaker)
    clock.advance(1.0)

    def hang() -> str:
        clock.advance(4.9)
        assert breaker.turn()[1] is None
        clock.advance(0.2)
        assert Visit(breaker, 0.0)(lambda: "answer") == "answer"
        raise StoreUnavailableError("timed out.")

    fail(breaker, 1, hang)
    assert breaker.turn() == (0.0, None)


def test_a_straggler_does_not_prolong_it(clock: FakeClock) -> None:
    """A request that was sent before the circuit opened, and fails later, says nothing new."""
    breaker = Breaker(PLACE)

    def slow() -> None:
        fail(breaker)
        wait = breaker.turn()[0]
        for _ in range(20):
            breaker.failed(None, StoreUnavailableError("late."))
        assert breaker.turn()[0] == wait
        unavailable()

    fail(breaker, 1, slow)


def test_a_probe_that_was_interrupted_leaves_its_turn(clock: FakeClock) -> None:
    """Ctrl-C says nothing about the store; the next caller probes at once."""
    breaker = Breaker(PLACE)
    fail(breaker)
    clock.advance(1.0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Visit(breaker, 0.0)(interrupt)
    assert Visit(breaker, 0.0)(lambda: "answer") == "answer"


def test_all_views_of_a_place_share_it(faulty: FaultStore, clock: FakeClock) -> None:
    """Whatever their patience, and however often the place was opened; other places have their own."""
    store = opened(faulty)
    for view in (store.with_patience(0.0), hasty(store, 0.0), RetryingStore(faulty, 0.0)):
        with pytest.raises(CircuitOpenError):
            view.get("a")
    assert breaker_of(open_store("/one")) is breaker_of(open_store("file:///one/"))
    assert breaker_of(open_store("/one")) is not breaker_of(open_store("/two"))


def test_faults_of_a_test_do_not_open_the_breaker_of_the_store_inside(faulty: FaultStore, clock: FakeClock) -> None:
    """Two fault stores around one store stand for two machines: only one is cut off."""
    opened(faulty)
    assert RetryingStore(FaultStore(faulty._inner), 0.0).get("a") == b"1"


def test_threads_send_one_probe_and_all_go_on(faulty: FaultStore) -> None:
    """Eight threads meet a dead store. While it is down they ask in turns; when it is back all get their answer."""
    store = opened(faulty).with_patience(60.0)
    running, most, lock = [0], [0], threading.Lock()

    def plan(_number: int, _operation: Operation) -> Fault:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return Fault("fail" if len(faulty.operations) < 7 else "delay")

    faulty._plan = plan
    faulty.down = False
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(store.get, "a") for _ in range(8)]
        while len(faulty.operations) < 7:
            assert most[0] <= 1
            time.sleep(0.001)
        assert [future.result() for future in futures] == [b"1"] * 8


def test_a_forked_process_begins_with_a_closed_one(faulty: FaultStore) -> None:
    """Even where a thread that the fork left behind held its lock; the parent's stays as it was."""
    store = opened(faulty)
    breaker, held, done = breaker_of(faulty), threading.Event(), threading.Event()

    def hold() -> None:
        with breaker._lock:
            held.set()
            done.wait(timeout=30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(timeout=30)
    child = os.fork()
    if child == 0:
        try:
            faulty.down = False
            os._exit(0 if store.get("a") == b"1" and breaker_of(faulty) is breaker else 1)
        finally:
            os._exit(2)
    done.set()
    holder.join(timeout=30)
    assert os.waitpid(child, 0)[1] == 0
    assert breaker._openings == 1


def test_a_store_can_be_sent_to_another_process() -> None:
    """A copy has that process's breaker of the place."""
    store: ObjectStore = open_store(f"/sent/{uuid.uuid4().hex}")
    again = pickle.loads(pickle.dumps(store))
    assert again._breaker is store._breaker  # type: ignore[attr-defined]
