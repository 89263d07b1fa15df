"""The process beside a step or run worker: it writes heartbeats, watches who lives, and ends what must not go on.

It runs as ``python -I -S _sidecar.py`` and imports the standard library, obstore and the `_sidecar_*` and `_processes`
beside it, nothing else: it must beat before its parent has imported anything heavy, and take little memory. One JSON
line on its standard input configures it (credentials never stand in the arguments or the environment); later lines
bring progress, what should progress, logs to watch, newer credentials, or say goodbye. Lines on its standard output
tell the parent of a fence, of a task that was taken over, or of trouble with the store.

The main thread watches processes and deadlines; what talks to the store has threads of its own (`_sidecar_work`). A
store that hangs can thus delay beats and fences, but never the watch.
"""

# pathlib costs more to import than all the rest of this file:
# ruff: noqa: PTH100, PTH120

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

if __name__ == "__main__":
    # A script started with -I and -S finds nothing beside itself. The package's own __init__ files import nothing.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from dagster_resilient.state._processes import Watched, descendants, kill_tree
from dagster_resilient.state._sidecar_pace import Expected, Marker, Pace
from dagster_resilient.state._sidecar_store import Patience
from dagster_resilient.state._sidecar_work import AT_ONCE, Beater, Caller, Lookout, Shared

LONGEST_SLEEP = 5.0
REST = 0.05  # seconds between two looks into the pipe: a report that wakes this process costs the step 100 us, else 25
POLLING = 0.5  # seconds between looks where the kernel has no pidfd


class Inbox:
    """The parent's lines. End of file means nothing: who else holds the pipe (a forked child) is not known."""

    def __init__(self, fd: int = 0) -> None:
        self.fd: int | None = fd
        self._rest = b""
        self._pieces = ""

    def first_line(self) -> dict[str, Any]:
        """Wait for the configuration. Returns an empty one if the parent died before it was written."""
        while b"\n" not in self._rest:
            chunk = os.read(0, 65536)
            if not chunk:
                return {}
            self._rest += chunk
        os.set_blocking(0, False)
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that are there now. What cannot be read is skipped."""
        with contextlib.suppress(BlockingIOError):
            while self.fd is not None:
                chunk = os.read(self.fd, 65536)
                self._rest += chunk
                if not chunk:
                    self.fd = None
        *lines, self._rest = self._rest.split(b"\n")
        messages: list[dict[str, Any]] = []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                messages += self._whole(dict(json.loads(line)))
        return messages

    def _whole(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Put together what was too long for one line; see `_sidecar_pipe.as_lines`."""
        if "piece" not in message:
            return [message]
        text, self._pieces = self._pieces + message["piece"], ""
        if message["left"]:
            self._pieces = text
            return []
        return [dict(json.loads(text))]


class Guard:
    """The watch: decides when the parent is told, terminated, killed; and when this process is done."""

    def __init__(self, config: dict[str, Any], inbox: Inbox) -> None:
        self._config = config
        self._inbox = inbox
        self._parent = Watched(*config["parent"])
        self._worker = Watched(*config["worker"]) if config["worker"] else None
        self._store = Shared(config["store"])
        self._beater = Beater(config, self._parent, self._caller())
        self._lookout = Lookout(config, self._caller(), self._beater.tried)
        self._pace = Pace(config["expects"], time.monotonic())
        self._marker = Marker(config, self._caller())
        self._hung: Expected | None = None
        self._deaf_until = 0.0
        self._goodbye = False
        self._ends: dict[str, float] = {}  # when the parent must end, by cause
        self._kill_at: float | None = None
        self._known: dict[int, Watched] = {}

    def _caller(self) -> Caller:
        return Caller(self._store, patience(self._config), tell, shown=self._store.shown)

    def run(self) -> None:
        """Watch until the parent says goodbye or dies."""
        self._beater.start()
        self._lookout.start()
        self._marker.start()
        while True:
            self._pace.turn(time.monotonic(), counts=self._may_progress())
            self._read_inbox()
            if self._goodbye or self._parent.dead():
                # Read again: the last words may have come between the look into the pipe and the death.
                self._read_inbox()
                return self._leave()
            self._judge(time.monotonic())
            self._mark_hang()
            self._act(time.monotonic())
            self._sleep()

    def _read_inbox(self) -> None:
        messages = self._inbox.read()
        if messages:
            self._deaf_until = time.monotonic() + REST
        for message in messages:
            self._goodbye = self._goodbye or bool(message.get("bye"))
            if "watch" in message:
                self._lookout.watch(message["watch"])
                self._ends.pop(message["watch"]["prefix"], None)
            elif "unwatch" in message:
                self._lookout.unwatch(message["unwatch"])
                self._ends.pop(message["unwatch"], None)
            elif "store" in message:
                self._store.replace(message["store"])
                self._beater.again()
            else:
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "expect" in message:
            self._pace.expect(message["expect"])
        elif "relax" in message:
            self._pace.relax(message["relax"])
        else:
            self._pace.progress(message.get("progress", {}).get("task"))
            self._beater.update(message)

    def _may_progress(self) -> bool:
        """Whether the parent is to blame where it does not: not while it is stopped, or may wait for the store."""
        return not (self._pace.is_idle or self._beater.failing or self._parent.stopped())

    def _mark_hang(self) -> None:
        """Show a hang in the store. Who judges it is an observer: nothing is ended for it here."""
        hung = self._pace.hung()
        if hung is not self._hung:
            self._hung = hung
            self._marker.show(hung, self._beater.progress)

    def _judge(self, now: float) -> None:
        """Decide whether the parent must end: a fence gives it time to stop by itself, a dead run worker does not."""
        if self._worker is not None and self._worker.dead():
            self._worker = None
            self._ends["worker"] = now
        if self._lookout.fence is not None and "fence" not in self._ends:
            self._ends["fence"] = now + self._config["fence_grace"]
            tell({"fenced": self._lookout.fence})
        self._judge_takeovers(now)

    def _judge_takeovers(self, now: float) -> None:
        """A newer generation counts while its watch does.

        The parent takes a watch back before it gives the lease away. So whoever has read a successor's entry finds that
        in the pipe: the pipe is read after what was found is taken, and before it is believed.
        """
        taken = self._lookout.taken()
        if taken:
            self._read_inbox()
        for watch in taken:
            if self._lookout.holds(watch) and watch.prefix not in self._ends:
                self._ends[watch.prefix] = now + self._config["fence_grace"]
                tell({"fenced": watch.reason(), "prefix": watch.prefix, "generation": watch.generation})

    def _act(self, now: float) -> None:
        if self._goodbye:
            return
        if self._kill_at is None and now >= min(self._ends.values(), default=float("inf")):
            # Remember the tree: children of a parent that obeys are handed to init and could not be found later.
            self._known = {self._parent.pid: self._parent, **descendants({self._parent.pid: self._parent})}
            self._parent.send(signal.SIGTERM)
            self._kill_at = now + self._config["term_grace"]
        if self._kill_at is not None and now >= self._kill_at:
            kill_tree(self._known)
            self._kill_at = float("inf")  # SIGKILL is not lost; more of them change nothing

    def _leave(self) -> None:
        """Bring out the last words. All of it is bounded.

        A parent that said goodbye is done with us, and may take its time to exit. What a terminated parent left running
        without one is ended as it would have been.
        """
        deadline = time.monotonic() + self._beater.last_words
        self._beater.finish("delete" if self._goodbye else "exited")
        self._marker.finish(deadline)
        if not self._goodbye and self._kill_at not in {None, float("inf")}:
            while time.monotonic() < (self._kill_at or 0) and not all(w.dead() for w in self._known.values()):
                time.sleep(0.05)
            kill_tree(self._known)
        self._beater.finished.wait(self._beater.last_words)
        self._marker.finished.wait(max(0.0, deadline - time.monotonic()))

    def _sleep(self) -> None:
        """Wait for whatever comes first. Lines that follow each other closely are read together."""
        now = time.monotonic()
        watched = [w for w in (self._parent, self._worker) if w is not None]
        resting = self._inbox.fd is not None and now < self._deaf_until
        listened = None if resting else self._inbox.fd
        fds = [fd for fd in (self._lookout.awake, listened, *(w.fd for w in watched)) if fd is not None]
        longest = POLLING if any(w.fd is None for w in watched) else LONGEST_SLEEP
        longest = min(longest, max(POLLING, self._pace.left()))  # not 0: time that does not count brings it no nearer
        deadlines = list(self._ends.values()) if self._kill_at is None else [self._kill_at]
        deadlines += [self._deaf_until] if resting else []
        ready = select.select(fds, [], [], max(0.0, min([longest, *(when - now for when in deadlines)])))[0]
        if self._lookout.awake in ready:
            os.read(self._lookout.awake, 64)


def patience(config: dict[str, Any]) -> Patience:
    """Return how long calls may take.

    Not longer than half a TTL, so that one call that is lost does not make the parent look lost. Nor than a round of
    the beats that may hang together, so that one is always free to go out when the store is back.
    """
    beat = config["beat"]
    return Patience(config["store_timeout"], min(beat["ttl"] / 2, AT_ONCE * beat["interval"]))


def tell(message: dict[str, Any]) -> None:
    """Write a line for the parent."""
    with contextlib.suppress(OSError):  # the parent is gone, or does not read: it is watched all the same
        os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Run the sidecar of whoever started this process."""
    # Ctrl-C reaches the whole foreground group: what it means for the parent, the parent shows by ending.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(1, False)
    inbox = Inbox()
    config = inbox.first_line()
    if config:
        # Behind the standard library: -S has left it out so that no .pth file and no site hook runs.
        sys.path.append(config["site"])
        Guard(config, inbox).run()
    os._exit(0)  # threads may hang in a call; nobody waits for them


if __name__ == "__main__":
    main()
