"""What a failure is worth, and that everything ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.recovery import RecoveryPolicy, classify

CLASSES = ["lost", "hung", "crashed", "infrastructure", "user_error"]


@pytest.mark.parametrize(
    ("fence", "errors", "expected"),
    [
        ("lost", [], "lost"),
        ("lost", ["FencedError"], "lost"),
        ("hung", ["FencedError", "ChildProcessCrashException"], "hung"),
        (None, [], "crashed"),
        (None, ["ChildProcessCrashException"], "crashed"),
        (None, ["DagsterExecutionStepExecutionError", "StoreUnavailableError"], "infrastructure"),
        (None, ["DagsterExecutionStepExecutionError", "ValueError"], "user_error"),
        ("superseded", ["ValueError"], "user_error"),
        (None, ["DagsterExecutionHandleOutputError", "UnsupportedValueError"], "refused"),
    ],
)
def test_a_failure_has_one_class(fence, errors, expected):
    """A verdict of being lost or hung wins; then what was raised decides; a process that raised nothing has crashed."""
    assert classify(fence, errors) == expected


def test_a_lost_machine_is_replaced_at_once():
    """The first attempt after a loss waits for nothing."""
    decision = RecoveryPolicy().decide("lost", attempts=0, elapsed=0.0, seed="run")
    assert (decision.action, decision.attempt) == ("launch", 1)


def test_a_hang_is_tried_again_after_a_pause_and_not_for_ever():
    """Not at once: the process that hung is still being ended. Three times: what hangs may do so each time."""
    policy = RecoveryPolicy()
    assert policy.delay("hung", 1, "run") > 0
    assert policy.decide("hung", attempts=2, elapsed=1e9, seed="run").action == "launch"
    assert policy.decide("hung", attempts=3, elapsed=1e9, seed="run").action == "give_up"


def test_what_was_refused_is_not_computed_again():
    """A value that cannot be stored is refused again after the same compute: no attempt is worth it."""
    assert RecoveryPolicy().decide("refused", attempts=0, elapsed=1e9, seed="run").action == "give_up"


def test_the_code_gets_a_pause():
    """A user error is tried again, but not at once, and the decision says how long it waits."""
    policy = RecoveryPolicy(first_wait=1000.0)
    decision = policy.decide("user_error", attempts=0, elapsed=0.0, seed="run")
    assert decision.action == "wait"
    assert policy.decide("user_error", attempts=0, elapsed=decision.delay, seed="run").action == "launch"


def test_every_tick_computes_the_same_delay():
    """The jitter is drawn from the failure's own seed: a tick that looks again does not draw again."""
    policy = RecoveryPolicy()
    assert policy.delay("lost", 3, "run") == policy.delay("lost", 3, "run") != policy.delay("lost", 3, "other")


@given(st.sampled_from(CLASSES), st.integers(1, 10_000), st.text())
def test_every_delay_is_bounded(failure, attempt, seed):
    """However many attempts, the delay stays within the cap and is never negative."""
    assert 0.0 <= RecoveryPolicy().delay(failure, attempt, seed) <= RecoveryPolicy().longest_wait


@given(st.sampled_from(CLASSES), st.integers(0, 100))
def test_attempts_are_finite(failure, attempts):
    """Beyond the limit of its class a failure is given up, with the reason."""
    decision = RecoveryPolicy().decide(failure, attempts, elapsed=1e9, seed="s")
    limit = RecoveryPolicy().max_attempts[failure]
    assert decision.action == ("give_up" if attempts >= limit else "launch")
    assert failure in decision.reason


def test_negative_settings_are_refused_by_name():
    """A policy that cannot work is refused when it is written."""
    with pytest.raises(ConfigurationError, match="first_wait"):
        RecoveryPolicy(first_wait=-1)
