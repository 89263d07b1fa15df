"""When a checkpoint is due. Policies are small and compose: ``AnySavePolicy([EverySteps(500), EverySeconds(300)])``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from dagster_resilient.errors import ConfigurationError


class SavePolicy(ABC):
    """Decides after each step whether to save. It must be cheap, and depend on nothing but its arguments."""

    @abstractmethod
    def due(self, step: int, seconds_since_save: float) -> bool:
        """Return whether a checkpoint is due.

        A save that was due and could not be made is tried again without asking.

        Args:
            step: Steps done.
            seconds_since_save: Seconds since the last checkpoint became durable, or since the session began, by a clock
                that never jumps.
        """


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Save after every n-th step."""

    n: int

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ConfigurationError(f"EverySteps({self.n!r}): give a whole number of steps, at least 1.")

    def due(self, step: int, seconds_since_save: float) -> bool:  # noqa: ARG002 - the interface's name
        """Return whether `step` is a multiple of n."""
        return step % self.n == 0


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """Save at the end of the first step that ends at least t seconds after the last save."""

    t: float

    def __post_init__(self) -> None:
        if isinstance(self.t, bool) or not isinstance(self.t, (int, float)) or not 0 < self.t < math.inf:
            raise ConfigurationError(f"EverySeconds({self.t!r}): give a positive, finite number of seconds.")

    def due(self, step: int, seconds_since_save: float) -> bool:  # noqa: ARG002 - the interface's name
        """Return whether t seconds have passed."""
        return seconds_since_save >= self.t


@dataclass(frozen=True, init=False)
class AnySavePolicy(SavePolicy):
    """Save whenever one of several policies says so."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, policies: Iterable[SavePolicy]) -> None:
        object.__setattr__(self, "policies", tuple(policies))
        if not self.policies:
            raise ConfigurationError("AnySavePolicy([]): give at least one policy, or training would never be saved.")
        for policy in self.policies:
            if not isinstance(policy, SavePolicy):
                raise ConfigurationError(
                    f"AnySavePolicy: {policy!r} is no SavePolicy; give EverySteps(n) or EverySeconds(t)."
                )

    def due(self, step: int, seconds_since_save: float) -> bool:
        """Return whether any of the policies is due."""
        return any(policy.due(step, seconds_since_save) for policy in self.policies)
