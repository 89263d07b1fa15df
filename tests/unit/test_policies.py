"""Save policies: when a checkpoint is due, and which arguments cannot be meant."""

from __future__ import annotations

import math

import pytest

from dagster_resilient.checkpoint import AnySavePolicy, EverySeconds, EverySteps
from dagster_resilient.errors import ConfigurationError


def test_every_steps_is_due_at_multiples():
    """After every n-th step, whatever the time."""
    assert [step for step in range(1, 10) if EverySteps(3).due(step, 1e9)] == [3, 6, 9]


def test_every_seconds_is_due_when_the_time_has_passed():
    """Whatever the step."""
    assert [seconds for seconds in (0, 4.9, 5, 6) if EverySeconds(5).due(1, seconds)] == [5, 6]


def test_any_policy_is_due_when_one_of_them_is():
    """Policies compose, also nested."""
    policy = AnySavePolicy([EverySteps(10), AnySavePolicy([EverySeconds(60)])])
    assert [policy.due(step, seconds) for step, seconds in ((10, 0), (11, 0), (11, 61))] == [True, False, True]


@pytest.mark.parametrize(
    ("policy", "argument"),
    [
        (EverySteps, 0),
        (EverySteps, -1),
        (EverySteps, 1.5),
        (EverySteps, True),
        (EverySteps, None),
        (EverySeconds, 0),
        (EverySeconds, -1),
        (EverySeconds, math.inf),
        (EverySeconds, math.nan),
        (EverySeconds, "5"),
        (AnySavePolicy, []),
        (AnySavePolicy, [5]),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(policy, argument):
    """At construction, by name, not after an hour of training."""
    with pytest.raises(ConfigurationError, match=policy.__name__):
        policy(argument)


def test_policies_are_values():
    """Two with the same arguments are equal, and can be keys of a dict."""
    assert {AnySavePolicy([EverySteps(1)]), AnySavePolicy([EverySteps(1)])} == {AnySavePolicy([EverySteps(1)])}
