"""What a failure is worth: its class, and whether and when another attempt is made. Everything ends."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from dagster_resilient.errors import ConfigurationError

FailureClass = Literal["preempted", "lost", "hung", "crashed", "infrastructure", "user_error", "refused"]

_INFRASTRUCTURE = frozenset(
    {
        "StoreUnavailableError",
        "CircuitOpenError",
        "StorageError",
        "StoragePermissionError",
        "ConnectionError",
        "TimeoutError",
        "ConnectionResetError",
        "BrokenPipeError",
        "TaskHeldError",
    }
)
# Our own refusals: the same value, setting or version is refused again, after the same compute.
_REFUSALS = frozenset({"UnsupportedValueError", "ConfigurationError", "SchemaVersionError"})
_CRASHES = frozenset({"ChildProcessCrashException"})
_MAX_ATTEMPTS: Mapping[FailureClass, int] = {
    "preempted": 100,
    "lost": 10,
    "hung": 3,
    "crashed": 10,
    "infrastructure": 10,
    "user_error": 2,
    "refused": 0,
}
# What a step or a run worker raises when it was told to leave. A user's cancel looks the same: ask for that first.
_LEAVINGS = frozenset({"PreemptedError", "DagsterExecutionInterruptedError"})


def classify(
    fence_class: str | None, errors: Sequence[str], *, crashed: bool = False, told_to_leave: bool = False
) -> FailureClass:
    """Return the class of a failed run that no user cancelled.

    Args:
        fence_class: The class that a verdict wrote into the run's fence, None where the run was not fenced.
        errors: Class names of the errors of its failed steps and of the run, with their causes. None: the process
            vanished without raising anything.
        crashed: Whether a process of the run ended by itself or was killed. Its orphans are told to leave for that.
        told_to_leave: Whether the run itself has recorded that it was; it may have died before it logged the error.
    """
    if fence_class == "hung":
        return "hung"
    if fence_class == "lost":
        return "preempted" if told_to_leave else "lost"
    names = set(errors)
    if names & _REFUSALS:
        return "refused"
    crashed = crashed or bool(names & _CRASHES)
    if (names & _LEAVINGS and not crashed) or (told_to_leave and (crashed or not names)):
        return "preempted"
    if names & _INFRASTRUCTURE:
        return "infrastructure"
    return "crashed" if crashed or not names else "user_error"


def attempts_of_other_kind(failure: FailureClass, earlier: Sequence[str]) -> int:
    """Return how many earlier attempts cost a failure of this class nothing.

    A machine that goes away says nothing of the code: preemptions have a budget of their own, and use up no other.

    Args:
        failure: The class of the failure.
        earlier: The class of the failure that each of the attempts followed.
    """
    return sum((other == "preempted") != (failure == "preempted") for other in earlier)


@dataclass(frozen=True)
class Decision:
    """What is done about a failed run.

    Attributes:
        action: ``launch`` now, ``wait`` for the backoff, or ``give_up``.
        reason: In words for people.
        attempt: Number of the attempt that is launched or waited for, 1 for the first re-execution, whatever they cost.
        delay: Seconds after the failure before which nothing is launched.
    """

    action: Literal["launch", "wait", "give_up"]
    reason: str
    attempt: int
    delay: float = 0.0


@dataclass(frozen=True)
class RecoveryPolicy:
    """How many attempts each class of failure gets, and how they are spaced.

    The delay before attempt n is uniform in [0, min(longest_wait, first_wait x 2^(n-1))] (full jitter). A lost, crashed
    or preempted machine says nothing against the code, so its first attempt comes at once; and a run that has committed
    something before it failed starts the count of the delays anew (not that of the attempts).

    Attributes:
        max_attempts: Re-executions per run group, by the class of its latest failure. A class that is not named keeps
            its default, which is 0 for ``refused``. Attempts after a preemption count for ``preempted`` alone. New
            code of the run's assets, or new data of those above them, starts the count anew.
        first_wait: Seconds; the bound of the first delay.
        longest_wait: Seconds; the bound of every delay.
        lookback: Seconds; older failures are left alone.
        start_allowance: Seconds that a run may take until its first heartbeat.
    """

    max_attempts: Mapping[FailureClass, int] = field(default_factory=dict)
    first_wait: float = 10.0
    longest_wait: float = 600.0
    lookback: float = 86_400.0
    start_allowance: float = 300.0

    def __post_init__(self) -> None:
        if not isinstance(self.max_attempts, Mapping) or self.max_attempts.keys() - get_args(FailureClass):
            raise ConfigurationError(
                f"RecoveryPolicy: max_attempts={self.max_attempts!r} must be a dict of numbers by class of failure, "
                f"of which there are {', '.join(get_args(FailureClass))}."
            )
        waits = {name: getattr(self, name) for name in ("first_wait", "longest_wait", "lookback", "start_allowance")}
        for name, value in (*waits.items(), *self.max_attempts.items()):
            if not isinstance(value, (int, float)) or not value >= 0:
                raise ConfigurationError(f"RecoveryPolicy: {name}={value!r} must be a number that is not negative.")
        object.__setattr__(self, "max_attempts", {**_MAX_ATTEMPTS, **self.max_attempts})

    def decide(
        self,
        failure: FailureClass,
        attempts: int,
        elapsed: float,
        seed: str,
        *,
        earlier: int = 0,
        free: int = 0,
        progressed: bool = False,
    ) -> Decision:
        """Decide about a failed run.

        Args:
            failure: Its class.
            attempts: Re-executions that recovery has launched in its group, of the same code on the same data.
            elapsed: Seconds since the failure.
            seed: Something fixed for this failure, so that every tick computes the same delay.
            earlier: Those of other code or on other data. They count for the delay alone: data that changes all the
                time must not make attempts without a pause.
            free: How many of `attempts` cost this failure nothing; see `attempts_of_other_kind`.
            progressed: Whether the failed run had committed anything.
        """
        limit = self.max_attempts[failure]
        spent = attempts - free
        if spent >= limit:
            return Decision(
                "give_up", f"{spent} of {limit} attempts for failures of class {failure} are used up", attempts
            )
        delay = self.delay(failure, 1 if progressed else earlier + spent + 1, seed)
        words = f"attempt {spent + 1} of {limit} after a failure of class {failure}"
        if elapsed < delay:
            return Decision("wait", f"{words}, {delay - elapsed:.0f} s from now", attempts + 1, delay)
        return Decision("launch", words, attempts + 1, delay)

    def delay(self, failure: FailureClass, attempt: int, seed: str) -> float:
        """Return the seconds between a failure and attempt n."""
        if attempt == 1 and failure in {"lost", "crashed", "preempted"}:
            return 0.0
        bound = min(self.longest_wait, self.first_wait * 2.0 ** min(attempt - 1, 60))
        return random.Random(f"{seed}:{attempt}").uniform(0.0, bound)  # noqa: S311 - jitter, not a secret
