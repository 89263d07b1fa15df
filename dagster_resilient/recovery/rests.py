"""Which failed runs need no look for now.

Most failed runs of a day are settled, or wait for their backoff. To find that out again costs queries and reads for
each of them; so whoever ticks remembers it. The memory lives as long as its process. Lost, it costs one more look at
each run, and never a decision: those stand in the store.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection

_FIRST_REST, _LONGEST_REST = 10.0, 60.0


class Rests:
    """Until when each failed run rests. Times are those of this process's monotonic clock."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, str]] = {}
        self._errors: dict[str, int] = {}
        self._given_up: dict[str, None] = {}

    def is_due(self, run_id: str) -> bool:
        """Whether a run is to be looked at."""
        return time.monotonic() >= self._until.get(run_id, (-math.inf, ""))[0]

    def why(self, run_id: str) -> str:
        """Return in words for people why a run rests, if that is worth a word."""
        return self._until.get(run_id, (0.0, ""))[1]

    def rest(self, run_id: str, seconds: float = math.inf, why: str = "") -> None:
        """Let a run rest; without a time, for good."""
        self._until[run_id] = time.monotonic() + seconds, why
        self._errors.pop(run_id, None)

    def give_up(self, run_id: str) -> None:
        """Let a run rest that was given up. New code or new data changes that, so it has its `turn` now and then."""
        self.rest(run_id)
        self._given_up[run_id] = None

    def turn(self, count: int) -> set[str]:
        """Return those of the given up runs, at most so many, whose last turn is the longest ago."""
        chosen = list(itertools.islice(self._given_up, count))
        for run_id in chosen:
            del self._given_up[run_id]
            self._given_up[run_id] = None
        return set(chosen)

    def fail(self, run_id: str) -> None:
        """Let a run rest whose recovery raised an error, longer each time: the time of a tick belongs to the others."""
        times = self._errors.get(run_id, 0)
        self.rest(run_id, min(_LONGEST_REST, _FIRST_REST * 2.0 ** min(times, 10)), "resting after an error")
        self._errors[run_id] = times + 1

    def keep(self, run_ids: Collection[str]) -> None:
        """Forget all other runs: they are too old by now, or did not fail after all."""
        for memory in (self._until, self._errors, self._given_up):
            for run_id in [known for known in memory if known not in run_ids]:
                memory.pop(run_id, None)
