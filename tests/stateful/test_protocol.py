"""The state protocol under every interleaving that hypothesis finds: real code, one store operation at a time.

Whatever the order, the crashes, the late requests and lost replies:

- what was acknowledged is in the head, until a newer value or an owner that starts afresh replaces it;
- the head's number and generation never go back, and no two owners were told that they own one generation;
- an older try of a lineage never follows a newer one, nor a fenced run its successor;
- nobody is told "fenced" for what the head holds; nobody reads less than what was there;
- what the head refers to exists, whatever garbage collection deletes;
- every call ends within a bounded number of operations, and none gives up unless the store did not answer.

RESILIENT_SOAK=1 plays thousands of examples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest
from actors import Role, collector, publisher, reader, retirer, sensor, trainer, trimmer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moves import Game, Move, Scenario, draw_move, draw_names, search, set_stage

T = TypeVar("T")
SOAK = os.environ.get("RESILIENT_SOAK") == "1"
EXAMPLES = 4000 if SOAK else 100
WALKS = 20_000 if SOAK else 300

pytestmark = pytest.mark.timeout(3600 if SOAK else 300)

LEASES = {
    "owner": Role("R1", "a", trainer(3, publishes=False)),
    "taker": Role("R2", "a", trainer(2, end="release", publishes=False), after="+owner"),
    "second taker": Role("R3", "a", trainer(1, end="crash", publishes=False), after="+owner"),
    "stranger": Role("P", "p", trainer(1, publishes=False)),
    "trimmer": Role("G1", "g1", trimmer(5)),
    "second trimmer": Role("G2", "g2", trimmer(2)),
    "reader": Role("D", "d", reader(2)),
}
VALUES = {
    "zombie": Role("R1", "a", publisher()),
    "second try": Role("R1", "a", publisher(), after="+zombie"),
    "re-execution": Role("R2", "a", publisher(2)),
    "stranger": Role("Q", "q", publisher(3)),
    "trimmer": Role("G1", "g1", trimmer(5)),
    "second trimmer": Role("G2", "g2", trimmer(2)),
    "reader": Role("D", "d", reader(2)),
}
FENCED = {
    "owner": Role("R1", "a", trainer(2)),
    "zombie": Role("R1", "a", publisher()),
    "sensor": Role("S1", "s1", sensor("R1")),
    "second sensor": Role("S2", "s2", sensor("R1")),
    "successor": Role("R4", "a", publisher(), after="sensor"),
    "trained successor": Role("R5", "a", trainer(1), after="second sensor"),
    "user's successor": Role("R6", "u", publisher(), after="sensor"),
    "trimmer": Role("G1", "g1", trimmer(5)),
}
MIXED = {
    "owner": Role("R1", "a", trainer(2)),
    "taker": Role("R2", "a", trainer(1), after="+owner"),
    "re-execution": Role("R3", "a", publisher()),
    "stranger": Role("Q", "q", publisher(4)),
    "trimmer": Role("G1", "g1", trimmer(5)),
    "reader": Role("D", "d", reader(2)),
}
GARBAGE = {
    "owner": Role("R1", "a", trainer(2)),
    "zombie": Role("R1", "a", publisher()),
    "taker": Role("R2", "a", trainer(1), after="+owner"),
    "stranger": Role("Q", "q", publisher(2)),
    "collector": Role("C1", "c1", collector(3)),
    "second collector": Role("C2", "c2", collector(1)),
    "retirer": Role("T", "t", retirer()),
    "trimmer": Role("G1", "g1", trimmer(3)),
    "reader": Role("D", "d", reader(2)),
}
SCENARIOS = {
    "leases alone, entries trimmed at once": Scenario(LEASES, timed=False, drawn=5),
    "leases alone": Scenario(LEASES, drawn=5),
    "tries of one lineage": Scenario(VALUES, drawn=5),
    "fences and successors": Scenario(FENCED, drawn=5),
    "leases and values": Scenario(MIXED, drawn=4),
    "garbage": Scenario(GARBAGE, drawn=4, data=True),
    "garbage in a crowd": Scenario(GARBAGE | {"sensor": Role("S1", "s1", sensor("R1"))}, length=14, data=True),
    "crowd": Scenario(FENCED | MIXED | VALUES | {"late owner": Role("R1", "a", trainer(1))}, length=14),
}


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """One of the companies of actors."""
    chosen = SCENARIOS[request.param]
    set_stage(monkeypatch, chosen)
    return chosen


@st.composite
def examples(draw: st.DrawFn, scenario: Scenario) -> tuple[list[str], list[Move]]:
    """Who takes part, and the moves."""

    def pick(options: Sequence[T]) -> T:
        return draw(st.sampled_from(options))

    return draw_names(pick, scenario), [draw_move(pick) for _ in range(scenario.length)]


def test_every_promise_holds_in_every_interleaving(scenario: Scenario) -> None:
    """Nothing acknowledged is lost, nothing superseded lands, whatever hypothesis does to the actors."""

    # The same examples each time, so that a change of the code is what makes a difference. A soak looks for new ones.
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not SOAK,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(example=examples(scenario))
    def play(example: tuple[list[str], list[Move]]) -> None:
        names, moves = example
        Game(scenario, names).play(moves)

    play()


def test_every_promise_holds_on_random_walks(scenario: Scenario) -> None:
    """Nor whatever a plain random generator does, which repeats itself less and so comes further."""
    _, violation = search(scenario, WALKS)

    assert violation is None
