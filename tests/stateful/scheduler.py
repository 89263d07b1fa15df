"""A world in which exactly one store operation happens at a time, and a test decides whose.

Each actor runs real code in a thread of its own, over a `Client`: the real `RetryingStore` around a store whose every
operation stops the thread. The test then lets one actor proceed: the operation takes effect, the actor runs on to its
next operation, and stops again. So an interleaving is a list of choices, and the same choices give the same run.

At any operation the test may choose a fault instead: see `Fault`. A zombie needs no fault: nobody lets it proceed.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from dagster_resilient.errors import ObjectExistsError, ObjectNotFoundError, ResilientError, StoreUnavailableError
from dagster_resilient.storage.object_store import Buffer, ObjectInfo, ObjectStore, as_buffers
from dagster_resilient.storage.retry import RetryingStore

T = TypeVar("T")

# Operations that one call of the task may cost. Each repetition inside a call is caused by progress of another actor,
# of which there is little here: more than this is a loop that does not end.
CALL_BUDGET = 150
_WATCHDOG_SECONDS = 60.0


class Violation(AssertionError):  # noqa: N818 - what the search looks for; no error of the test itself
    """The protocol broke a promise. `rule` names which; the message ends in the interleaving."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class Crashed(BaseException):
    """Unwinds the thread of an actor that never proceeds again. No code under test may catch it."""


class GivenUpError(StoreUnavailableError):
    """The client has used up its retries. The request may still be under way."""


class Fault(enum.Enum):
    """What may happen at one operation, besides that it happens.

    Attributes:
        LOST_REPLY: It takes effect, its reply is lost, the client retries.
        DELAYED: The client retries; the first request may take effect at any later moment.
        GIVEN_UP: As DELAYED, but the client gives up and the caller sees `StoreUnavailableError`.
        GIVEN_UP_APPLIED: It takes effect at once; the caller sees `StoreUnavailableError`.
        SLOW_REPLY: It takes effect now; the actor learns of it when it is next let proceed.
        EMPTY_LISTING: A listing that races with a delete comes back empty, as on directories.
    """

    LOST_REPLY = "reply lost"
    DELAYED = "delayed, retried"
    GIVEN_UP = "given up, under way"
    GIVEN_UP_APPLIED = "applied, given up"
    SLOW_REPLY = "reply slow"
    EMPTY_LISTING = "comes back empty"


CREATE_FAULTS = (Fault.LOST_REPLY, Fault.DELAYED, Fault.GIVEN_UP, Fault.GIVEN_UP_APPLIED)


@dataclass
class Request:
    """One operation that an actor waits for, and its outcome once it took effect."""

    actor: Actor
    verb: str
    key: str
    body: bytes = b""
    outcome: Callable[[], Any] | None = None

    def __str__(self) -> str:
        return f"{self.verb} {'/'.join(self.key.split('/')[-2:])}"


class World:
    """The objects, the clocks, the requests under way, and the actors."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.boot = 1000.0
        self.under_way: list[Request] = []
        self.actors: dict[str, Actor] = {}
        self.time = 0
        self.trace: list[str] = []
        self.effect: Callable[[Request], None] = lambda request: None
        self.back = _closed_gate()

    def advance(self, store_seconds: float, boot_seconds: float) -> None:
        """Let time pass, for the store and for all processes."""
        self.now += timedelta(seconds=store_seconds)
        self.boot += boot_seconds
        self.trace.append(f"-- {store_seconds:g} s pass ({boot_seconds:g} s by the processes' clocks)")

    def deliver(self, index: int) -> None:
        """Let a request that its client gave up waiting for arrive at the store."""
        request = self.under_way.pop(index % len(self.under_way))
        landed = request.key not in self.objects
        self.trace.append(f"-- late {request} of {request.actor.name} {'lands' if landed else 'is refused'}")
        self._apply(request)

    def perform(self, request: Request, fault: Fault | None) -> None:
        """Let a request take effect, or not, and fix its outcome."""
        self.time += 1
        self.trace.append(f"{request.actor.name}: {request}{f' [{fault.value}]' if fault else ''}")
        if fault is Fault.EMPTY_LISTING:
            request.outcome = list
        elif fault is Fault.DELAYED or fault is Fault.GIVEN_UP:
            self.under_way.append(Request(request.actor, request.verb, request.key, request.body))
            request.outcome = _raiser(GivenUpError if fault is Fault.GIVEN_UP else StoreUnavailableError)
        else:
            request.outcome = self._apply(request)
        if fault is Fault.LOST_REPLY or fault is Fault.GIVEN_UP_APPLIED:
            request.outcome = _raiser(GivenUpError if fault is Fault.GIVEN_UP_APPLIED else StoreUnavailableError)

    def _apply(self, request: Request) -> Callable[[], Any]:
        outcome = getattr(self, f"_{request.verb.lower()}")(request)
        self.effect(request)
        return outcome  # type: ignore[no-any-return]

    def _create(self, request: Request) -> Callable[[], Any]:
        if request.key in self.objects:
            self.trace[-1] += " -> refused"
            return _raiser(ObjectExistsError)
        return self._put(request)

    def _put(self, request: Request) -> Callable[[], Any]:
        self.objects[request.key] = (request.body, self.now)
        return lambda: None

    def _get(self, request: Request) -> Callable[[], Any]:
        if request.key not in self.objects:
            self.trace[-1] += " -> absent"
            return _raiser(ObjectNotFoundError)
        body = self.objects[request.key][0]
        return lambda: body

    def _head(self, request: Request) -> Callable[[], Any]:
        if request.key not in self.objects:
            return _raiser(ObjectNotFoundError)
        body, modified = self.objects[request.key]
        return lambda: ObjectInfo(request.key, len(body), modified)

    def _list(self, request: Request) -> Callable[[], Any]:
        found = [
            ObjectInfo(key, len(body), modified)
            for key, (body, modified) in sorted(self.objects.items())
            if key.startswith(request.key)
        ]
        return lambda: found

    def _delete(self, request: Request) -> Callable[[], Any]:
        self.objects.pop(request.key, None)
        return lambda: None


def _raiser(kind: type[Exception]) -> Callable[[], Any]:
    def outcome() -> Any:
        raise kind("by the test's choice")

    return outcome


def _closed_gate() -> threading.Lock:
    """A lock that one thread releases to let another one through. Lighter than a semaphore, and there are many."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Actor:
    """One process: a script of real calls in a thread that proceeds only when it is let.

    Attributes:
        failed: The error that ended the script early.
        began, claimed: When it started and when its try was numbered, in operations of the world; None: not yet.
        calls, spent: How many calls it has begun, and operations in the one that runs.
    """

    def __init__(self, world: World, name: str, script: Callable[[Actor], None], may_start: Callable[[], bool]) -> None:
        self.world, self.name = world, name
        self.store = Client(StoppingStore(self))
        self.may_start = may_start
        self.pending: Request | None = None
        self.failed: ResilientError | None = None
        self.began: int | None = None
        self.claimed: int | None = None
        self.calls = 0
        self.spent = 0
        self._script = script
        self._go = _closed_gate()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._error: BaseException | None = None
        self._over = False
        world.actors[name] = self

    @property
    def alive(self) -> bool:
        """Whether it can be let proceed now."""
        return not self._over and (self.began is not None or self.may_start())

    def step(self, fault: Fault | None = None) -> None:
        """Let it start, or let its operation take effect and run on to the next one."""
        if self.began is None:
            self.began = self.world.time
            self._thread.start()
        else:
            self._answer(fault)
            if fault is Fault.SLOW_REPLY:
                return
            self._go.release()
        if not self.world.back.acquire(timeout=_WATCHDOG_SECONDS):
            raise Violation("deadlock", f"{self.name} neither ended nor asked the store for anything")
        if self._error is not None:
            raise self._error

    def begin_call(self) -> None:
        """Note that the script begins its next call."""
        self.calls += 1
        self.spent = 0

    def _answer(self, fault: Fault | None) -> None:
        assert self.pending is not None
        if self.pending.outcome is None:
            self.world.perform(self.pending, fault)

    def crash(self) -> None:
        """End it here; what it has sent stays sent."""
        if self.began is not None and not self._over:
            self._over = True
            self._go.release()
            self._thread.join(_WATCHDOG_SECONDS)
        self._over = True

    def request(self, verb: str, key: str, body: bytes = b"") -> Any:
        """Stop until the operation has taken effect; called by the code under test."""
        self.spent += 1
        if self.spent > CALL_BUDGET:
            raise Violation("unbounded", f"{self.name} spent more than {CALL_BUDGET} operations in one call")
        self.pending = request = Request(self, verb, key, body)
        self.world.back.release()
        self._go.acquire()
        if self._over:
            raise Crashed
        self.pending = None
        assert request.outcome is not None
        return request.outcome()

    def _run(self) -> None:
        try:
            self._script(self)
        except Crashed:
            return
        except ResilientError as error:
            self.failed = error
        except BaseException as error:
            self._error = error
        self._over = True
        self.world.back.release()


class StoppingStore(ObjectStore):
    """The world's objects as one actor sees them: every operation waits for its turn."""

    is_shared = True
    url = "test://world"

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def get(self, key: str) -> bytes:
        """Return an object."""
        return self._actor.request("GET", key)  # type: ignore[no-any-return]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Not used by the state layer."""
        raise NotImplementedError

    def put(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object."""
        self._actor.request("PUT", key, b"".join(as_buffers(buffers)))

    def create(self, key: str, buffers: Buffer | Iterable[Buffer]) -> None:
        """Write an object if there is none."""
        self._actor.request("CREATE", key, b"".join(as_buffers(buffers)))

    def head(self, key: str) -> ObjectInfo:
        """Tell the size of an object."""
        return self._actor.request("HEAD", key)  # type: ignore[no-any-return]

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """List the objects under a prefix."""
        assert start_after is None
        return iter(self._actor.request("LIST", prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, one operation each."""
        for key in keys:
            self._actor.request("DELETE", key)

    def sidecar_config(self) -> Mapping[str, Any]:
        """Only asked whether there are heartbeats at all."""
        return {}


class Client(RetryingStore):
    """The real retries and reading back, without waiting in between. Faults are few, so it ends."""

    def with_patience(self, seconds: float) -> Client:
        """Nobody waits in this model."""
        return self

    def _retry(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except GivenUpError:
                raise
            except StoreUnavailableError:
                continue
