"""What a failure is worth, and that everything ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.recovery import RecoveryPolicy, classify
from dagster_resilient.recovery.policy import attempts_of_other_kind

CLASSES = ["preempted", "lost", "hung", "crashed", "infrastructure", "user_error"]


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
        (None, ["DagsterExecutionStepExecutionError", "PreemptedError"], "preempted"),
        (None, ["PreemptedError", "StoreUnavailableError"], "preempted"),
        (None, ["DagsterExecutionInterruptedError"], "preempted"),
        ("superseded", ["DagsterExecutionInterruptedError"], "preempted"),
        (None, ["DagsterExecutionInterruptedError", "ChildProcessCrashException"], "crashed"),
        ("lost", ["PreemptedError"], "lost"),
        ("hung", ["PreemptedError"], "hung"),
    ],
)
def test_a_failure_has_one_class(fence, errors, expected):
    """A verdict of being lost or hung wins; then what was raised decides; a process that raised nothing has crashed."""
    assert classify(fence, errors) == expected


@pytest.mark.parametrize(
    ("fence", "errors", "crashed", "expected"),
    [
        ("lost", [], False, "preempted"),
        (None, [], True, "preempted"),
        (None, ["ChildProcessCrashException"], False, "preempted"),
        ("hung", [], False, "hung"),
        (None, ["ValueError"], False, "user_error"),
        (None, ["UnsupportedValueError"], False, "refused"),
    ],
)
def test_a_run_that_says_it_was_told_to_leave_was_not_lost(fence, errors, crashed, expected):
    """It died before Dagster's log held the error. A step that was tried again later, and failed, is another matter."""
    assert classify(fence, errors, crashed=crashed, told_to_leave=True) == expected


def test_an_orphan_of_a_crash_is_no_preemption():
    """Its heartbeat process tells it to leave, and what it logs of that may come at any time."""
    for errors in ([], ["DagsterExecutionInterruptedError"], ["PreemptedError"]):
        assert classify(None, errors, crashed=True) == "crashed"


def test_a_preempted_machine_is_replaced_at_once():
    """And again at once, for as long as there is progress."""
    policy = RecoveryPolicy(first_wait=1000.0)
    assert policy.decide("preempted", attempts=0, elapsed=0.0, seed="run").action == "launch"
    assert policy.decide("preempted", attempts=5, elapsed=0.0, seed="run").action == "wait"
    assert policy.decide("preempted", attempts=5, elapsed=0.0, seed="run", progressed=True).action == "launch"


def test_preemptions_and_failures_have_budgets_of_their_own():
    """Fifty preemptions leave the code its two attempts, and those leave the platform its hundred."""
    policy = RecoveryPolicy()
    earlier = ["preempted"] * 50 + ["user_error"]
    free = attempts_of_other_kind("user_error", earlier)
    decision = policy.decide("user_error", len(earlier), 1e9, "run", free=free)
    assert (decision.action, decision.attempt) == ("launch", 52)
    assert "attempt 2 of 2" in decision.reason
    assert policy.decide("user_error", len(earlier) + 1, 1e9, "run", free=free).action == "give_up"
    assert attempts_of_other_kind("preempted", earlier) == 1
    assert policy.decide("preempted", 101, 1e9, "run", free=1).action == "give_up"
    assert policy.decide("preempted", 101, 1e9, "run", free=2).action == "launch"


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


@pytest.mark.parametrize("given", [{"lsot": 5}, 3, "lost", {"lost": "5"}, {"lost": None}, {"lost": float("nan")}])
def test_attempts_that_cannot_be_meant_are_refused(given):
    """A class that is misspelled, and what is no number: by name, with the classes that there are."""
    with pytest.raises(ConfigurationError, match=r"lsot|lost|3"):
        RecoveryPolicy(max_attempts=given)


def test_a_class_that_is_left_out_keeps_its_default():
    """Naming one does not switch recovery off for the others."""
    policy = RecoveryPolicy(max_attempts={"lost": 1})
    assert policy.max_attempts == RecoveryPolicy().max_attempts | {"lost": 1}
    assert policy.decide("crashed", 1, elapsed=1e9, seed="s").action == "launch"
    assert policy.decide("lost", 1, elapsed=1e9, seed="s").action == "give_up"
    assert policy.decide("refused", 0, elapsed=1e9, seed="s").action == "give_up"
