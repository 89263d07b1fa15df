"""Whether the parent gets on: what should progress, how long that took so far, and the mark of a hang in the store.

Part of the sidecar: standard library only. Time is the sidecar's own, and only that in which the parent could run and
the store took heartbeats: a parent that is stopped, or waits for a store that is down, does not hang.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dagster_resilient.state._sidecar_store import chance

if TYPE_CHECKING:
    from dagster_resilient.state._sidecar_store import Store
    from dagster_resilient.state._sidecar_work import Caller

SHORTEST_LIMIT = 3600.0  # seconds; of what is learned, never of what the user says
FIRST_LIMIT = 14_400.0  # while nothing is learned: a step may be an epoch, and no healthy one must be taken for hung
FACTOR = 10.0
KEPT = 20  # intervals
KNOWN = 3  # intervals, from which on something is learned
# Seconds between two turns that count at most. The watch turns every 5 s: in a longer gap it did not run itself
# (a frozen container, a stopped process group), and its parent most likely neither.
LONGEST_TURN = 10.0
_REPEATED = 3  # deletes of a mark whose write was cut off, and may land late


class Expected:
    """One thing that should progress.

    Attributes:
        task: Its name.
        seconds: Since its last progress, as far as they count.
    """

    def __init__(self, message: Mapping[str, Any], now: float) -> None:
        self.task: str = message["task"]
        self.seconds = 0.0
        self._limit: float | None = message["limit"]
        self._first: float | None = message["first"]
        self._at = now
        self._intervals: deque[float] = deque(maxlen=KEPT)

    @property
    def limit(self) -> float:
        """Seconds without progress after which it hangs: the user's, or what is learned; infinite: not judged yet."""
        if self._limit is not None:
            return self._limit
        if len(self._intervals) < KNOWN:
            return float("inf") if self._first is None else self._first
        return max(SHORTEST_LIMIT, FACTOR * max(self._intervals))

    @property
    def left(self) -> float:
        """Seconds until it hangs; none are left where it does."""
        return self.limit - self.seconds

    def matches(self, task: str) -> bool:
        """Whether a report of that task is about this. A loop over the partitions of ``a`` reports as ``a[key]``."""
        return task == self.task or task.startswith(f"{self.task}[")

    def look(self, now: float) -> None:
        """Take in the time."""
        self.seconds = now - self._at

    def progressed(self, now: float) -> None:
        """Take in progress. Lines that were read at once are one: their distance is not known."""
        if now > self._at:
            self._intervals.append(now - self._at)
        self._at, self.seconds = now, 0.0


class Pace:
    """What should progress, outer things before inner ones. Progress of an inner one is progress of those around it.

    Args:
        expected: What the parent expected before this process started.
        now: A time that never jumps back.
    """

    def __init__(self, expected: Iterable[Mapping[str, Any]], now: float) -> None:
        self._turned = now
        self._counted = 0.0
        self._expected: list[Expected] = []
        self._hung: Expected | None = None
        for message in expected:
            self.expect(message)

    @property
    def is_idle(self) -> bool:
        """Whether nothing should progress."""
        return not self._expected

    def expect(self, message: Mapping[str, Any]) -> None:
        """Begin to expect progress of a task, within what is expected already."""
        self._expected = [one for one in self._expected if one.task != message["task"]]
        self._count(self._expected)
        self._expected.append(Expected(message, self._counted))

    def relax(self, task: str) -> None:
        """Expect no more of a task. For what is around it, its beginning and its end are progress."""
        names = [one.task for one in self._expected]
        if task in names:
            self._count(self._expected[: names.index(task)])
            del self._expected[names.index(task)]

    def progress(self, task: object) -> None:
        """Take in a report. One of a task of which nothing is expected tells nothing."""
        inner = [n for n, one in enumerate(self._expected) if isinstance(task, str) and one.matches(task)]
        self._count(self._expected[: max(inner, default=-1) + 1])

    def _count(self, those: Iterable[Expected]) -> None:
        for one in those:
            one.progressed(self._counted)

    def turn(self, now: float, *, counts: bool) -> None:
        """Go on with the time. Call it before what the parent has written meanwhile is taken in.

        Args:
            now: The time.
            counts: Whether the parent could progress since the last turn.
        """
        self._counted += min(now - self._turned, LONGEST_TURN) if counts else 0.0
        self._turned = now
        for one in self._expected:
            one.look(self._counted)

    def left(self) -> float:
        """Return the seconds until something hangs that does not yet."""
        return min((one.left for one in self._expected if one.left > 0), default=float("inf"))

    def hung(self) -> Expected | None:
        """Return what hangs: the first that did, for as long as it does."""
        overdue = [one for one in self._expected if one.left <= 0]
        if self._hung not in overdue:
            self._hung = overdue[-1] if overdue else None
        return self._hung


class Marker(threading.Thread):
    """Keeps one object in the store for as long as the parent hangs. Where the store refuses, it tries again."""

    def __init__(self, config: Mapping[str, Any], caller: Caller) -> None:
        super().__init__(daemon=True)
        self.finished = threading.Event()
        self._key: str = config["hung_key"]
        self._beat: Mapping[str, Any] = config["beat"]
        self._interval: float = self._beat["interval"]
        self._caller = caller
        self._wanted: bytes | None = None
        self._stands: bytes | None = None
        # Deletes that are due. One whose forerunner was killed may find a mark, and knows nothing of it.
        self._deletes = 1 if config["restarted"] else 0
        self._changed = threading.Event()
        self._deadline: float | None = None

    def show(self, hung: Expected | None, progress: Mapping[str, Any]) -> None:
        """Have a mark stand, or none."""
        if hung is None:
            self._wanted = None
        else:
            owner = {name: self._beat.get(name) for name in ("schema_version", "host", "pid", "step_key")}
            what = {"task": hung.task, "seconds": hung.seconds, "limit": hung.limit, "progress": progress}
            self._wanted = json.dumps({**{k: v for k, v in owner.items() if v is not None}, **what}).encode()
        self._changed.set()

    def finish(self, deadline: float) -> None:
        """Take the mark away, as well as that goes until the deadline, and end: who is gone does not hang."""
        self._wanted, self._deadline = None, deadline
        self._changed.set()

    def run(self) -> None:
        """Bring the store to what is wanted, until the end."""
        while self._deadline is None:
            self._changed.wait(None if self.settle() else self._interval * (1 + chance()) / 2)
            self._changed.clear()
        self._deletes = min(self._deletes, 1)
        while not self.settle() and self._caller.clock() < self._deadline:
            time.sleep(min(self._interval, 1.0))
        self.finished.set()

    def settle(self) -> bool:
        """Make one call, if one is due. Returns whether none is due after it."""
        wanted = self._wanted
        if wanted is not None:
            if wanted is not self._stands:
                self._put(wanted)
            return wanted is self._stands
        if self._deletes and self._caller.attempt("deleting the mark of a hang", self._take_away):
            self._stands = None
            self._deletes -= 1
        return not self._deletes

    def _put(self, body: bytes) -> None:
        """A write that is cut off may still land, also behind the delete: then there are more deletes than one."""
        self._deletes = max(self._deletes, 1)
        if self._caller.attempt("marking a hang", lambda store, limit: store.put(self._key, body, limit)):
            self._stands = body
        else:
            self._deletes = _REPEATED

    def _take_away(self, store: Store, limit: float) -> None:
        store.delete(self._key, limit)
