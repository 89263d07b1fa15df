"""The search finds an owner that trusts its earlier creates to have failed, when we plant it in the real code.

Entries are trimmed at once here, and there are no clocks. In real life an hour of grace and the look after half an hour
cover both bugs as well, wherever a process's clock runs at more than half the speed of the store's.
"""

from __future__ import annotations

from collections.abc import Callable

import actors as actors_module
import broken_tasks
import pytest
from actors import Role, trainer, trimmer
from moves import END, Disturb, Move, Proceed, Scenario
from scheduler import Fault

from dagster_resilient.state.task import DurableTask

Expect = Callable[..., None]

_REPEATER = {
    "owner": Role("R1", "a", trainer(2, publishes=False)),
    "sleeper": Role("R3", "a", trainer(0, end="crash", publishes=False), after="+owner"),
    "taker": Role("R2", "a", trainer(0, end="crash", publishes=False), after="+owner"),
    "trimmer": Role("G", "g", trimmer(2)),
}
_TRIMMED_ONCE = Proceed("trimmer", ("call", 3))  # it reads, it trims, and it is about to read again


def _story(fault: Fault, *moves: Move) -> Scenario:
    """One example, which is the story and nothing more."""
    return Scenario(_REPEATER, faults=(fault,), timed=False, prelude=moves, length=0)


def _use(patch: pytest.MonkeyPatch, kind: type[DurableTask]) -> None:
    patch.setattr(actors_module, "DurableTask", kind)


def test_no_look_after_a_create_that_nobody_answered_is_found(expect: Expect) -> None:
    """An owner creates the number of its own unanswered entry again, which was built upon and trimmed.

    Entry 2 landed unanswered, its repetition is refused, the taker begins a generation with entry 3, and 2 is trimmed.
    The head carries the owner's first checkpoint, which is therefore acknowledged. Its second one meets the free number
    2; the kept entry 3 does not stand in the way.
    """
    scenario = _story(
        Fault.GIVEN_UP_APPLIED,
        Disturb("owner", ("CREATE", 2), 0),
        Proceed("owner", ("LIST", 1)),
        Proceed("taker", END),
        _TRIMMED_ONCE,
        Proceed("owner", END),
    )
    expect(scenario, lambda patch: _use(patch, broken_tasks.Trusting), "lost")


def test_no_look_after_a_create_that_was_refused_is_found(expect: Expect) -> None:
    """The same, where the owner hears of a refusal: its entry was trimmed, and a sleepy taker's took its place.

    That one is trimmed in its turn. So a refusal does not prove that nothing of the owner's has landed.
    """
    scenario = _story(
        Fault.LOST_REPLY,
        Proceed("owner", ("CREATE", 2)),
        Proceed("sleeper", ("CREATE", 1)),
        Disturb("owner", ("now", 0), 0),
        Proceed("taker", END),
        _TRIMMED_ONCE,
        Proceed("sleeper", ("LIST", 1)),
        Proceed("owner", ("LIST", 1)),
        Proceed("trimmer", END),
        Proceed("owner", END),
    )
    expect(scenario, lambda patch: _use(patch, broken_tasks.TrustingRefusals), "lost")
