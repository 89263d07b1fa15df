"""Twenty real processes race for one entry and for one lease: in every round exactly one wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from racers import RACERS, opened

from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.store import RecordStore
from dagster_resilient.storage import keys

SOAK = os.environ.get("RESILIENT_SOAK") == "1"
ROUNDS = {"local": 200, "sqlite": 200, "postgres": 200, "s3": 10} if SOAK else {"s3": 3}
USUAL = 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 if SOAK else 600)]


@pytest.fixture(
    params=[
        "local",
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("s3", marks=pytest.mark.s3),
    ]
)
def arena(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any], int]:
    """URL and options of empty records that other processes can open, and how many rounds to race on them."""
    options = request.getfixturevalue("s3_options") if request.param == "s3" else {}
    return request.getfixturevalue(f"{request.param}_url"), options, ROUNDS.get(request.param, USUAL)


def winners(race: str, arena: tuple[str, dict[str, Any], int]) -> dict[int, int]:
    """Let them race; return who won each round. Fails where a round has no winner, or two."""
    url, options, rounds = arena
    script = Path(__file__).with_name("racers.py")
    job = json.dumps({"race": race, "place": [url, options], "rounds": rounds})
    done = subprocess.run(
        [sys.executable, script], input=job, text=True, capture_output=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stderr
    won: dict[str, list[int]] = json.loads(done.stdout)
    assert len(won) == RACERS
    assert sorted(number for numbers in won.values() for number in numbers) == list(range(1, rounds + 1))
    return {number: int(n) for n, numbers in won.items() for number in numbers}


def records_of(arena: tuple[str, dict[str, Any], int]) -> RecordStore:
    """What the racers left."""
    return opened(arena[0], arena[1])


def test_one_process_appends_each_entry(arena: tuple[str, dict[str, Any], int]) -> None:
    """The one that is told so: the entry that stands is its own, and no number was left out."""
    won = winners("append", arena)
    history = NumberedLog(records_of(arena), "race/log").history()
    assert {entry.n: int(entry.op) for entry in history} == won


def test_one_process_acquires_each_lease(arena: tuple[str, dict[str, Any], int]) -> None:
    """All others are told that it is held, and the log of the task holds one entry, which names the winner."""
    won = winners("acquire", arena)
    for number, winner in won.items():
        log = NumberedLog(records_of(arena), keys.task_prefix((f"race-{number}",), None, "log"))
        (entry,) = log.history()
        assert entry.owner is not None
        assert (entry.generation, entry.owner.run_id) == (1, f"racer-{winner}")
