"""A clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """A clock that stands still until it is moved. Call it for the time in seconds; `sleep` moves it on.

    Attributes:
        slept: The durations that `sleep` was called with.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self.slept: list[float] = []

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on. A monotonic clock never goes back."""
        if seconds < 0:
            raise ValueError(f"A monotonic clock cannot go back by {-seconds} s.")
        self._now += seconds

    def sleep(self, seconds: float) -> None:
        """Note the duration and move on by it, in no time."""
        self.slept.append(seconds)
        self.advance(max(seconds, 0.0))
