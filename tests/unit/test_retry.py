"""Retries: finite, spaced, only where asking again can help; and the lost reply of a create."""

from __future__ import annotations

import http.server
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dagster_resilient.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage.memory_store import MemoryObjectStore
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.storage.retry import DEFAULT_PATIENCE, RetryingStore
from dagster_resilient.testing import FakeClock, Fault, FaultStore


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Waits take no time, and the clock shows how long they would have taken."""
    fake = FakeClock()
    monkeypatch.setattr(time, "sleep", fake.sleep)
    monkeypatch.setattr(time, "monotonic", fake)
    return fake


@pytest.fixture
def memory() -> MemoryObjectStore:
    """An empty store."""
    return MemoryObjectStore(uuid.uuid4().hex)


def dead(memory: MemoryObjectStore) -> FaultStore:
    """A store that never answers, with a circuit breaker of its own."""
    return FaultStore(memory, lambda _number, _operation: Fault("fail"))


def calls_of(store: RetryingStore) -> list[Callable[[], Any]]:
    """Every operation of a store once."""
    return [
        lambda: store.get("a"),
        lambda: store.get_ranges("a", [(0, 1)]),
        lambda: store.put("a", b"1"),
        lambda: store.create("b", b"1"),
        lambda: store.head("a"),
        lambda: list(store.list("")),
        lambda: store.delete(["b"]),
    ]


def test_every_operation_survives_one_lost_request(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """One failure of any kind of call is not seen by the caller."""
    memory.put("a", b"1")
    faulty = FaultStore(memory, lambda number, _: Fault("fail") if number % 2 == 0 else None)
    for call in calls_of(RetryingStore(faulty)):
        call()
    assert len(faulty.operations) == 14


def test_patience_ends(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """A store that stays away is given up when the patience ends, with the last error; each wait is at most 5 s."""
    for number in range(len(calls_of(RetryingStore(memory)))):
        call = calls_of(RetryingStore(dead(memory)))[number]
        started, before = clock(), len(clock.slept)
        with pytest.raises(StoreUnavailableError, match="the request was lost"):
            call()
        waits = clock.slept[before:]
        assert clock() - started == pytest.approx(DEFAULT_PATIENCE)
        assert len(waits) >= DEFAULT_PATIENCE / 5 - 1
        assert max(waits) <= 5.0


def test_the_patience_can_be_chosen(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """`with_patience` bounds a call; none at all means one try."""
    for patience in (0.0, 7.0):
        started = clock()
        with pytest.raises(StoreUnavailableError):
            RetryingStore(dead(memory)).with_patience(patience).get("a")
        assert clock() - started == pytest.approx(patience)
    faulty = dead(memory)
    with pytest.raises(StoreUnavailableError):
        RetryingStore(faulty, patience=0.0).get("a")
    assert len(faulty.operations) == 1


def test_an_outage_that_ends_before_the_patience_is_no_failure(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """However long it was: the last try is made when the patience ends."""
    memory.put("a", b"1")
    ends = [0.0]
    for patience in (0.5, 5.0, 60.0, 900.0):
        ends[0] = clock() + patience - 0.001
        store = RetryingStore(FaultStore(memory, lambda _n, _operation: Fault("fail") if clock() < ends[0] else None))
        assert store.with_patience(patience).get("a") == b"1"


def test_waits_grow_and_are_spread(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """Before retry n the wait is anywhere up to 0.1 s x 2^n: who failed together does not come back together."""
    first_waits, late_waits = [], []
    for _ in range(20):
        clock.slept.clear()
        with pytest.raises(StoreUnavailableError):
            RetryingStore(dead(memory)).get("a")
        first_waits.append(clock.slept[0])
        late_waits += clock.slept[8:]
    assert max(first_waits) <= 0.1
    assert max(late_waits) > 1.0
    assert len(set(first_waits)) > 10


@pytest.mark.parametrize("error", [StoragePermissionError, ObjectNotFoundError, StorageError])
def test_what_asking_again_does_not_change_is_asked_once(
    memory: MemoryObjectStore, clock: FakeClock, error: type[StorageError]
) -> None:
    """Refusals, absence and a full disk are final."""
    calls = []

    class Refusing(MemoryObjectStore):
        def get(self, key: str) -> bytes:
            calls.append(key)
            raise error("no", store=self.url, key=key)

    with pytest.raises(error):
        RetryingStore(Refusing("refusing")).get("a")
    assert calls == ["a"]
    assert clock.slept == []


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_second_try_writes_the_whole_body_again(memory: MemoryObjectStore, clock: FakeClock, verb: str) -> None:
    """A generator of buffers can be consumed once only, and still the second try has all of them."""
    store = RetryingStore(FaultStore(memory, {0: Fault("torn")}))
    getattr(store, verb)("a", (bytes([n]) for n in range(4)))
    assert memory.get("a") == bytes(range(4))


def test_a_create_whose_reply_was_lost_has_succeeded(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """The second try meets our own object and says success: nothing was written twice."""
    faulty = FaultStore(memory, {0: Fault("lose_reply")})
    RetryingStore(faulty).create("a", b"op 1")
    assert [operation.verb for operation in faulty.operations] == ["create", "create", "get"]
    assert memory.get("a") == b"op 1"


def test_a_create_that_lost_to_another_one_is_refused(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """Also after a lost request: only an object with our own bytes is ours."""
    faulty = FaultStore(memory, {0: Fault("fail")})
    memory.create("a", b"op 2")
    with pytest.raises(ObjectExistsError):
        RetryingStore(faulty).create("a", b"op 1")
    assert memory.get("a") == b"op 2"


def test_a_create_is_not_refused_while_nobody_has_won(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """S3 answers "conflict" while another create is under way; if that one fails, the key is still free."""
    conflicts = iter([True, True, False])

    class Undecided(MemoryObjectStore):
        def create(self, key: str, buffers: Any) -> None:
            if next(conflicts):
                raise ObjectExistsError("conflict", store=self.url, key=key)
            memory.create(key, buffers)

    RetryingStore(Undecided("undecided")).create("a", b"op 1")
    assert memory.get("a") == b"op 1"


def test_a_listing_that_breaks_off_shows_nothing_twice(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """A listing is begun anew after a failure in the middle, and yields only then."""
    for n in range(5):
        memory.put(f"p/{n}", b"")
    broken = iter([True, False])

    class Breaking(MemoryObjectStore):
        def list(self, prefix: str, start_after: str | None = None) -> Iterator[Any]:
            for n, info in enumerate(memory.list(prefix, start_after)):
                if n == 3 and next(broken):
                    raise StoreUnavailableError("page 2 is gone", store=self.url)
                yield info

    assert [info.key for info in RetryingStore(Breaking("breaking")).list("p/")] == [f"p/{n}" for n in range(5)]


def test_a_delete_that_broke_off_is_finished(memory: MemoryObjectStore, clock: FakeClock) -> None:
    """After a lost reply the keys are gone already; deleting them again is no error."""
    memory.put("a", b"1")
    RetryingStore(FaultStore(memory, {0: Fault("lose_reply")})).delete(["a", "b"])
    assert list(memory.list("")) == []


# ---- against a server that misbehaves as real ones do


class FlakyServer(http.server.ThreadingHTTPServer):
    """Answers GET of any key by a script: one answer for each request, the last one for ever."""

    def __init__(self, script: list[Callable[[http.server.BaseHTTPRequestHandler], None]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.requests = 0
        self._lock = threading.Lock()

    def next_answer(self) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
        """Count the request and return its answer."""
        with self._lock:
            answer = self.script[min(self.requests, len(self.script) - 1)]
            self.requests += 1
        return answer


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, FlakyServer)
        self.server.next_answer()(self)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the overridden method
        """Be quiet."""


BODY = b"0123456789" * 1000
HEADERS = {"ETag": '"x"', "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}


def answer(status: int, body: bytes, length: int | None = None) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    """An answer; with a length greater than the body, the connection ends in the middle."""

    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {**HEADERS, "Content-Length": str(len(body) if length is None else length)}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = length is not None

    return send


def drop(handler: http.server.BaseHTTPRequestHandler) -> None:
    """End the connection without an answer."""
    handler.close_connection = True


def failure(code: str) -> bytes:
    """The body of an S3 error."""
    return f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>m</Message></Error>".encode()


@pytest.fixture
def flaky() -> Iterator[Callable[..., tuple[Any, FlakyServer]]]:
    """Start a server with a script, and return a store on it."""
    servers = []

    def start(*script: Callable[[http.server.BaseHTTPRequestHandler], None], patience: float = 20.0) -> Any:
        server = FlakyServer(list(script))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{server.server_address[1]}"}
        store = open_store("s3://bucket/prefix", options)
        assert isinstance(store, RetryingStore)
        return store.with_patience(patience), server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_that_is_busy_or_drops_connections_is_asked_again(flaky: Callable[..., Any]) -> None:
    """Three of five requests fail (SlowDown, an internal error, a dropped socket), and every read succeeds."""
    slow, broken, good = answer(503, failure("SlowDown")), answer(500, failure("InternalError")), answer(200, BODY)
    store, server = flaky(*([slow, broken, drop, good, good] * 4), good)
    assert [store.get("a") for _ in range(6)] == [BODY] * 6
    assert server.requests > 6


def test_a_short_body_is_never_taken_for_the_object(flaky: Callable[..., Any]) -> None:
    """A connection that ends in the middle of the body is a failure to be retried, not a shorter object."""
    store, _ = flaky(answer(200, BODY[:5000], length=len(BODY)), drop, answer(200, BODY))
    assert store.get("a") == BODY


def test_a_body_that_is_always_short_is_an_error(flaky: Callable[..., Any]) -> None:
    """After all retries the caller gets an error, never the beginning of the object."""
    store, _ = flaky(answer(200, BODY[:5000], length=len(BODY)), patience=1.0)
    with pytest.raises(StoreUnavailableError, match="s3://bucket/prefix/a"):
        store.get("a")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AccessDenied", StoragePermissionError),
        (400, "ExpiredToken", StoragePermissionError),
        (403, "RequestTimeTooSkewed", StoragePermissionError),
        (404, "NoSuchKey", ObjectNotFoundError),
        (404, "NoSuchBucket", StorageError),
        (400, "InvalidRequest", StorageError),
        (301, "PermanentRedirect", StorageError),
    ],
)
def test_a_refusal_is_final_and_named(
    flaky: Callable[..., Any], status: int, code: str, kind: type[StorageError]
) -> None:
    """Each refusal is the error that fits, after one request, and says what the server said."""
    store, server = flaky(answer(status, failure(code)))
    with pytest.raises(kind) as caught:
        store.get("a")
    assert type(caught.value) is kind
    assert "s3://bucket/prefix/a" in str(caught.value)
    if kind is StoragePermissionError:
        assert code in str(caught.value)
    assert server.requests == 1


@pytest.mark.parametrize(("status", "code"), [(400, "RequestTimeout"), (429, "TooManyRequests"), (503, "SlowDown")])
def test_a_passing_refusal_is_retried(flaky: Callable[..., Any], status: int, code: str) -> None:
    """The server asks to come back later, whatever the hundreds of its status."""
    busy = answer(status, failure(code))
    store, _ = flaky(busy, busy, busy, answer(200, BODY))
    assert store.get("a") == BODY
