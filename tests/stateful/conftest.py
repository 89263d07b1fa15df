"""The fixture of the planted bugs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from moves import Scenario, search, set_stage

# All bugs are found within a few hundred examples.
_EXAMPLES = 4000


@pytest.fixture
def expect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plant a bug and expect that the search finds a break of one of the rules, and nothing without the bug."""

    def check(scenario: Scenario, plant: Callable[[pytest.MonkeyPatch], None], *rules: str) -> None:
        set_stage(monkeypatch, scenario)
        with monkeypatch.context() as planted:
            plant(planted)
            played, violation = search(scenario, _EXAMPLES)
        assert violation is not None, f"not found in {played} examples"
        assert violation.rule in rules, violation
        print(f"found in example {played}")
        assert search(scenario, played) == (played, None)

    return check
