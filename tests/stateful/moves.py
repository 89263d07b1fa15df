"""The choices that make an interleaving, and what plays them.

A move names an actor and how far it goes. The moves are made for the bugs of such protocols: an actor stops just before
a create or between two reads, others take turns or come to their end, an hour passes, and then the actor goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import pytest
from actors import Cast, Role
from scheduler import CREATE_FAULTS, Actor, Fault, Request, Violation, World

from dagster_resilient.state import garbage as garbage_module
from dagster_resilient.state import log as log_module
from dagster_resilient.state import task as task_module
from dagster_resilient.state.owner import Verdict

T = TypeVar("T")
Stop = tuple[str, int]
Gap = tuple[float, float]

END: Stop = ("call", 99)
_STOPS: tuple[Stop, ...] = (
    *(("now", 0), ("call", 1), ("call", 2), END),
    *((verb, count) for verb in ("LIST", "GET", "CREATE", "DELETE") for count in (1, 2)),
)
# Seconds that pass for the store, and for the processes, whose clocks may run at little more than half the speed.
_GAPS: tuple[Gap, ...] = ((1900.0, 1900.0), (3700.0, 3700.0), (3700.0, 1900.0))
_FAULTS_AT_MOST = 5
_EMPTY_LISTINGS_AT_MOST = 6


@dataclass(frozen=True)
class Scenario:
    """Who takes part, and what may happen.

    Attributes:
        roles: The actors.
        faults: What may happen to operations.
        timed: Whether entries must be superseded for an hour before they are trimmed, and leased writers look twice
            after half an hour, as in real life. Where False, entries go at once and an old parent is no reason to look.
            Then, among leased writers, the first entries of the generations must be enough: what another one writes
            behind an owner's last entry is such an entry, is kept, and so refuses the owner for ever. What the owner
            itself wrote there may be gone; therefore it looks wherever an earlier create of its own may have landed.
        crashes: Whether actors may end at any point.
        drawn: How many of the actors take part in one example; None: all. Few go deeper.
        prelude: Moves that come first, where a bug needs a long story.
        retires: Whether the log may vanish as a whole: an abandoned task was deleted.
        length: Moves to draw.
        data: Whether the objects that entries refer to are written and deleted too.
    """

    roles: dict[str, Role]
    faults: tuple[Fault, ...] = tuple(Fault)
    timed: bool = True
    crashes: bool = True
    drawn: int | None = None
    prelude: tuple[Move, ...] = ()
    retires: bool = False
    length: int = 8
    data: bool = False


class Move(Protocol):
    """One choice."""

    def play(self, game: Game) -> None:
        """Play it."""


@dataclass(frozen=True)
class Proceed:
    """One actor goes on to some point, and stops there: perhaps for long."""

    actor: int | str
    stop: Stop

    def play(self, game: Game) -> None:
        """Play it."""
        if actor := game.pick(self.actor):
            game.run_to(actor, self.stop)


@dataclass(frozen=True)
class Disturb:
    """One actor goes on to some point, where a fault happens to it: one of those that fit there."""

    actor: int | str
    stop: Stop
    fault: int

    def play(self, game: Game) -> None:
        """Play it."""
        if actor := game.pick(self.actor):
            game.run_to(actor, self.stop)
            game.disturb(actor, self.fault)


@dataclass(frozen=True)
class Strand:
    """One actor is a zombie from some point on until all others have ended, which take turns."""

    actor: int | str
    stop: Stop
    fault: int | None
    first: int
    calls: int
    gap: Gap | None

    def play(self, game: Game) -> None:
        """Play it."""
        zombie = game.pick(self.actor)
        if zombie is None:
            return
        game.run_to(zombie, self.stop)
        if self.fault is not None:
            game.disturb(zombie, self.fault)
        while others := [actor for actor in game.alive() if actor is not zombie]:
            for index in range(len(others)):
                game.run_to(others[(self.first + index) % len(others)], ("call", self.calls))
                game.let_pass(self.gap)


@dataclass(frozen=True)
class Crash:
    """One actor never goes on again. What it has sent stays sent."""

    actor: int | str
    stop: Stop

    def play(self, game: Game) -> None:
        """Play it."""
        if (actor := game.pick(self.actor)) and game.scenario.crashes:
            game.run_to(actor, self.stop)
            game.world.trace.append(f"{actor.name}: CRASH")
            actor.crash()


@dataclass(frozen=True)
class Arrive:
    """A request arrives that its client gave up waiting for."""

    request: int

    def play(self, game: Game) -> None:
        """Play it."""
        if game.world.under_way:
            game.world.deliver(self.request)


@dataclass(frozen=True)
class Pass:
    """Time passes: enough for a second look, or for a trim."""

    gap: Gap

    def play(self, game: Game) -> None:
        """Play it."""
        game.let_pass(self.gap)


class Pick(Protocol):
    """Chooses one of some options: hypothesis, or a random generator."""

    def __call__(self, options: Sequence[T], /) -> T:
        """Return one."""


def draw_move(pick: Pick) -> Move:
    """Return any move."""
    numbers, turns = range(8), (1, 2, 99)
    kind = pick(("proceed", "disturb", "strand", "proceed", "disturb", "strand", "crash", "arrive", "pass"))
    if kind == "pass":
        return Pass(pick(_GAPS))
    if kind == "arrive":
        return Arrive(pick(numbers))
    actor, stop = pick(numbers), pick(_STOPS)
    if kind == "strand":
        return Strand(actor, stop, pick((None, *numbers)), pick(numbers), pick(turns), pick((None, *_GAPS)))
    if kind == "disturb":
        return Disturb(actor, stop, pick(numbers))
    return Crash(actor, stop) if kind == "crash" else Proceed(actor, stop)


def draw_names(pick: Pick, scenario: Scenario) -> list[str]:
    """Return who takes part in one example."""
    names = list(scenario.roles)
    while scenario.drawn is not None and len(names) > scenario.drawn:
        names.remove(pick(names))
    return names


class Game:
    """One example: a cast, and the moves that are played with it. Everything is checked after every operation."""

    def __init__(self, scenario: Scenario, names: Sequence[str]) -> None:
        self.scenario = scenario
        self.cast = Cast({name: scenario.roles[name] for name in names}, retires=scenario.retires, data=scenario.data)
        self._faults_left = _FAULTS_AT_MOST
        self._empty_left = _EMPTY_LISTINGS_AT_MOST

    @property
    def world(self) -> World:
        """The objects, clocks and actors."""
        return self.cast.world

    def play(self, moves: Sequence[Move]) -> None:
        """Play the moves; then let all who live come to their end, one after the other.

        Raises:
            Violation: The protocol broke a promise.
        """
        try:
            for move in (*self.scenario.prelude, *moves):
                move.play(self)
            while living := self.alive():
                self.run_to(living[0], END)
        finally:
            for actor in self.world.actors.values():
                actor.crash()

    def alive(self) -> list[Actor]:
        """Return who can go on."""
        return [actor for actor in self.world.actors.values() if actor.alive]

    def pick(self, actor: int | str) -> Actor | None:
        """Return one who can go on, by name or number."""
        if isinstance(actor, str):
            return self.world.actors[actor]
        living = self.alive()
        return living[actor % len(living)] if living else None

    def run_to(self, actor: Actor, stop: Stop) -> None:
        """Let an actor go on to before its nth operation of a kind, or to the end of its nth call."""
        kind, left = stop
        goal = actor.calls + left
        while actor.alive and left and not (kind == "call" and actor.calls >= goal):
            actor.step()
            left -= actor.pending is not None and _is_stop(actor.pending, kind)

    def disturb(self, actor: Actor, number: int) -> None:
        """Let a fault happen to the operation that an actor waits for, if one fits."""
        fitting = [fault for fault in self.scenario.faults if actor.alive and self._fits(actor, fault)]
        if fitting:
            fault = fitting[number % len(fitting)]
            self._empty_left -= fault is Fault.EMPTY_LISTING
            self._faults_left -= fault in CREATE_FAULTS
            actor.step(fault)

    def let_pass(self, gap: Gap | None) -> None:
        """Let time pass, where it matters."""
        if gap is not None and self.scenario.timed:
            self.world.advance(*gap)

    def _fits(self, actor: Actor, fault: Fault) -> bool:
        waits = actor.pending
        if waits is None or waits.outcome is not None:
            return False
        if fault is Fault.EMPTY_LISTING:
            return self._empty_left > 0 and waits.verb == "LIST" and self._deletes_under(waits.key)
        return fault is Fault.SLOW_REPLY or (self._faults_left > 0 and waits.verb == "CREATE")

    def _deletes_under(self, prefix: str) -> bool:
        """Whether a listing can race with a delete now."""
        waiting = [actor.pending for actor in self.alive() if actor.pending]
        return any(request.verb == "DELETE" and request.key.startswith(prefix) for request in waiting)


def _is_stop(waits: Request, kind: str) -> bool:
    """Whether a request is of a kind. The claims are left out: nothing in them depends on others."""
    return kind == {"PUT": "CREATE", "HEAD": "GET"}.get(waits.verb, waits.verb) and not waits.key.startswith("lineage/")


def set_stage(patch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    """Let logs of five entries meet what else needs fifty, and let everybody believe that every owner is dead."""
    patch.setattr(log_module, "KEEP_ENTRIES", 1)
    patch.setattr(task_module, "local_verdict", lambda owner: Verdict.DEAD)
    patch.setattr(garbage_module, "SHORTEST_GRACE", timedelta(0))
    patch.setattr(garbage_module, "_READERS_GRACE", timedelta(0))
    if not scenario.timed:
        patch.setattr(log_module, "KEEP_FOR", timedelta(0))
        patch.setattr(task_module, "_FRESH_SECONDS", float("inf"))


def search(scenario: Scenario, examples: int) -> tuple[int, Violation | None]:
    """Play examples by a random generator with fixed seeds; return how many, and the violation that ended it."""
    for seed in range(examples):
        pick: Callable[[Sequence[T]], T] = random.Random(seed).choice
        names = draw_names(pick, scenario)
        try:
            Game(scenario, names).play([draw_move(pick) for _ in range(scenario.length)])
        except Violation as violation:
            return seed + 1, violation
    return examples, None
