"""The hypothesis machine that chooses the interleaving, and the casts that it plays with."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import pytest
from actors import Cast, Role, publisher, reader, sensor, trainer, trimmer
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler import CREATE_FAULTS, Actor, Fault, World

from dagster_resilient.state import log as log_module
from dagster_resilient.state import task as task_module
from dagster_resilient.state.owner import Verdict

TIMED: dict[str, Role] = {
    "old": Role("R0", "o", publisher()),
    "owner": Role("R1", "a", trainer(2)),
    "zombie": Role("R1", "a", publisher()),
    "second try": Role("R1", "a", publisher(), after="+zombie"),
    "taker": Role("R2", "a", trainer(2, end="release"), after="+owner"),
    "orphan's twin": Role("R3", "a", publisher()),
    "successor": Role("R4", "a", publisher(), after="sensor"),
    "trained successor": Role("R5", "a", trainer(1), after="sensor"),
    "user's successor": Role("R6", "u", publisher(), after="sensor"),
    "stranger": Role("Q", "q", publisher(3)),
    "training stranger": Role("P", "p", trainer(1)),
    "sensor": Role("S", "s", sensor("R1")),
    "trimmer": Role("G1", "g1", trimmer(2)),
    "second trimmer": Role("G2", "g2", trimmer(1)),
    "reader": Role("D", "d", reader(2)),
}
# Without time, nothing but the first entries of the generations stops a zombie; so these are leased writers only.
LEASED: dict[str, Role] = {
    "owner": Role("R1", "a", trainer(3, publishes=False)),
    "taker": Role("R2", "a", trainer(2, end="release", publishes=False), after="+owner"),
    "second taker": Role("R3", "a", trainer(1, end="crash", publishes=False), after="+owner"),
    "stranger": Role("P", "p", trainer(1, publishes=False)),
    "sensor": Role("S", "s", sensor("R1")),
    "trimmer": Role("G1", "g1", trimmer(3)),
    "second trimmer": Role("G2", "g2", trimmer(2)),
    "reader": Role("D", "d", reader(2)),
}
_NUMBER = st.integers(0, 7)
Stop = tuple[str, int]
_STOP = st.sampled_from(
    [("now", 0), ("LIST", 1), ("LIST", 2), ("GET", 1), ("GET", 2), ("CREATE", 1), ("CREATE", 2), ("DELETE", 1)]
    + [("DELETE", 2), ("call", 1), ("call", 2), ("call", 99)]
)
_TURNS = st.sampled_from([1, 2, 99])
# Seconds that pass for the store, and for the processes: those may notice little more than half.
_GAPS = ((1900.0, 1900.0), (3700.0, 3700.0), (3700.0, 1900.0))
Gap = tuple[float, float]
_GAP = st.none() | st.sampled_from(_GAPS)
_DRAWN_AT_MOST = 6
_FAULTS_AT_MOST = 5
_EMPTY_LISTINGS_AT_MOST = 6


def bring_trims_near(patch: pytest.MonkeyPatch, *, timed: bool) -> None:
    """Let logs of five entries meet what else needs fifty, and let everybody believe that every owner is dead.

    Args:
        patch: Undoes it.
        timed: Whether an entry must be superseded for an hour before it is trimmed, and leased writers look twice after
            half an hour, as in real life. Where False, entries go at once and leased writers never look twice: then the
            first entries of the generations must be enough.
    """
    patch.setattr(log_module, "KEEP_ENTRIES", 1)
    patch.setattr(task_module, "local_verdict", lambda owner: Verdict.DEAD)
    if not timed:
        patch.setattr(log_module, "KEEP_FOR", timedelta(0))
        patch.setattr(task_module, "_FRESH_SECONDS", float("inf"))


class ProtocolMachine(RuleBasedStateMachine):
    """Lets actors proceed, fail and die in any order. Everything is checked after every store operation.

    Attributes:
        roles: Who may take part; each example draws some of them.
        required: Who takes part in each example.
        faults: What may happen to operations.
    """

    roles: ClassVar[dict[str, Role]] = TIMED
    required: ClassVar[frozenset[str]] = frozenset()
    faults: ClassVar[tuple[Fault, ...]] = tuple(Fault)
    crashes: ClassVar[bool] = True
    jumps: ClassVar[bool] = True
    examples: ClassVar[int] = 0
    operations: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        self.cast = Cast({})
        self._faults_left = _FAULTS_AT_MOST
        self._empty_left = _EMPTY_LISTINGS_AT_MOST
        self._broken = False

    @property
    def world(self) -> World:
        return self.cast.world

    @initialize(data=st.data())
    def choose_cast(self, data: st.DataObject) -> None:
        """Draw who takes part: with few actors the search goes deeper."""
        optional = sorted(self.roles.keys() - self.required)
        drawn = data.draw(st.sets(st.sampled_from(optional), max_size=_DRAWN_AT_MOST), label="cast") if optional else set()
        names = self.required | drawn or {optional[0]}
        self.cast = Cast({name: role for name, role in self.roles.items() if name in names})

    def _pick(self, number: int) -> Actor | None:
        alive = self._alive()
        return alive[number % len(alive)] if alive else None

    def _alive(self) -> list[Actor]:
        return [actor for actor in self.world.actors.values() if actor.alive]

    def _step(self, actor: Actor, fault: Fault | None = None) -> None:
        type(self).operations += 1
        try:
            actor.step(fault)
        except BaseException:
            self._broken = True
            raise

    @rule(number=_NUMBER, stop=_STOP)
    def proceed(self, number: int, stop: Stop) -> None:
        """Let one actor go on to some point, and stop there: perhaps for long."""
        actor = self._pick(number)
        if actor is not None:
            self._run_to(actor, stop)

    @precondition(lambda self: self.faults)
    @rule(number=_NUMBER, stop=_STOP, choice=_NUMBER)
    def disturb(self, number: int, stop: Stop, choice: int) -> None:
        """Let one actor go on to some point, and let a fault happen there."""
        actor = self._pick(number)
        if actor is not None:
            self._run_to(actor, stop)
            self._disturb(actor, choice)

    @rule(number=_NUMBER, stop=_STOP, choice=st.none() | _NUMBER, first=_NUMBER, calls=_TURNS, gap=_GAP)
    def strand(self, number: int, stop: Stop, choice: int | None, first: int, calls: int, gap: Gap | None) -> None:
        """Let one actor be a zombie from some point on until all others have ended, which take turns."""
        zombie = self._pick(number)
        if zombie is None:
            return
        self._run_to(zombie, stop)
        if choice is not None:
            self._disturb(zombie, choice)
        while others := [actor for actor in self._alive() if actor is not zombie]:
            for index in range(len(others)):
                self._run_to(others[(first + index) % len(others)], ("call", calls))
                if gap is not None and self.jumps:
                    self.world.advance(*gap)

    def _run_to(self, actor: Actor, stop: Stop) -> None:
        """Let an actor go on to before its nth log or fence operation of a kind, or to the end of its nth call."""
        kind, count = stop
        goal = actor.calls + count
        while actor.alive and count and not (kind == "call" and actor.calls >= goal):
            self._step(actor)
            count -= actor.pending is not None and actor.pending.verb == kind and "lineage/" not in actor.pending.key

    def _disturb(self, actor: Actor, choice: int) -> None:
        fitting = [fault for fault in self.faults if actor.alive and self._fits(actor, fault)]
        if fitting:
            fault = fitting[choice % len(fitting)]
            self._empty_left -= fault is Fault.EMPTY_LISTING
            self._faults_left -= fault in CREATE_FAULTS
            self._step(actor, fault)

    def _fits(self, actor: Actor, fault: Fault) -> bool:
        waits = actor.pending
        if waits is None or waits.outcome is not None:
            return False
        if fault is Fault.EMPTY_LISTING:
            return self._empty_left > 0 and waits.verb == "LIST" and self._deletes_under(waits.key)
        return fault is Fault.SLOW_REPLY or (self._faults_left > 0 and waits.verb == "CREATE")

    def _deletes_under(self, prefix: str) -> bool:
        """Whether a listing can race with a delete now."""
        waiting = [actor.pending for actor in self.world.actors.values() if actor.alive and actor.pending]
        return any(request.verb == "DELETE" and request.key.startswith(prefix) for request in waiting)

    @precondition(lambda self: self.crashes)
    @rule(number=_NUMBER)
    def crash(self, number: int) -> None:
        """Let one actor never proceed again."""
        actor = self._pick(number)
        if actor is not None and actor.began is not None:
            self.world.trace.append(f"{actor.name}: CRASH")
            actor.crash()

    @precondition(lambda self: self.world.under_way)
    @rule(number=_NUMBER)
    def arrive(self, number: int) -> None:
        """Let a request arrive that its client gave up waiting for."""
        try:
            self.world.deliver(number)
        except BaseException:
            self._broken = True
            raise

    @precondition(lambda self: self.jumps)
    @rule(seconds=st.sampled_from(_GAPS))
    def let_time_pass(self, seconds: tuple[float, float]) -> None:
        """Let time pass: enough for a second look, or for a trim."""
        self.world.advance(*seconds)

    def teardown(self) -> None:
        """Let all who live come to their end, one after the other; then nothing may be left waiting."""
        try:
            while not self._broken and any(actor.alive for actor in self.world.actors.values()):
                self.proceed(0, ("call", 99))
        finally:
            for actor in self.world.actors.values():
                actor.crash()


def machine(name: str, **attributes: Any) -> type[ProtocolMachine]:
    """Return a machine with other attributes."""
    return type(name, (ProtocolMachine,), {"examples": 0, "operations": 0, **attributes})
