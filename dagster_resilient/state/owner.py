"""Who this process is, and whether another process that holds a lease still lives."""

from __future__ import annotations

import enum
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from dagster_resilient.errors import IntegrityError, ObjectNotFoundError
from dagster_resilient.state.beats import read_beat
from dagster_resilient.state.records import Claim, Owner
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore


class Verdict(enum.Enum):
    """What is known of an owner."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@cache
def boot_id() -> str:
    """Return the kernel's boot id, or an empty text where there is none: a pid means something only under it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None where it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and parentheses: fields count from behind the last one.
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def this_process(claim: Claim, *, heartbeat: str | None, interval: float, ttl: float) -> Owner:
    """Return the owner record of this process for a try."""
    return Owner(
        process=uuid.uuid4().hex,
        run_id=claim.run_id,
        root=claim.root,
        attempt=claim.attempt,
        host=socket.gethostname(),
        boot=boot_id(),
        pid=os.getpid(),
        started=start_ticks(os.getpid()) or 0,
        heartbeat=heartbeat,
        interval=interval,
        ttl=ttl,
    )


def local_verdict(owner: Owner) -> Verdict:
    """Judge an owner by this machine's process table, which answers at once where it is the same boot."""
    if not owner.boot or owner.boot != boot_id() or owner.host != socket.gethostname():
        return Verdict.UNKNOWN
    return Verdict.ALIVE if start_ticks(owner.pid) == owner.started else Verdict.DEAD


class OwnerWatch:
    """Watches one owner's heartbeat by the store's clock.

    Lost means: no beat for longer than its TTL, and none over two intervals in which our own looks succeeded. The
    second half is for the end of a store outage, when every beat is old and every owner is alive.

    A last beat that says "exited" needs no time to pass. The sidecar writes it once the pidfd of the owner, which no
    later process can take, told it of the end: what is dead commits nothing, and needs no TTL to fall silent.
    """

    def __init__(
        self, store: ObjectStore, owner: Owner, now: Callable[[], datetime], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.owner = owner
        self._store, self._now, self._clock = store, now, clock
        self._last_beat: datetime | None = None
        self._since: float | None = None  # when that beat was first seen
        self._seen: ObjectInfo | None = None
        self._exited = False

    def look(self) -> Verdict:
        """Look once. UNKNOWN: neither lost nor seen to move yet. Without a heartbeat, only this process can own it."""
        if self.owner.heartbeat is None:
            return Verdict.ALIVE
        beat = self._beat(self.owner.heartbeat)
        if self._exited:
            return Verdict.DEAD
        if self._since is None or (beat is not None and beat != self._last_beat):
            first = self._since is None
            # Each beat begins the watch anew: who is waited for, and was seen to live, may die later.
            self._last_beat, self._since = beat, self._clock()
            return Verdict.UNKNOWN if first else Verdict.ALIVE
        watched = self._clock() - self._since
        if beat is None:
            return Verdict.DEAD if watched > self.owner.ttl else Verdict.UNKNOWN
        stale = self._now() - beat > timedelta(seconds=self.owner.ttl)
        return Verdict.DEAD if stale and watched > 2 * self.owner.interval else Verdict.UNKNOWN

    def _beat(self, key: str) -> datetime | None:
        """Return the time of the last beat. It is read where it is another one than before.

        Its version tells too: the last two beats may carry the same second.
        """
        try:
            info = self._store.head(key)
        except ObjectNotFoundError:
            return None
        if info != self._seen:
            self._exited = self._exited or _says_exited(self._store, key)
            self._seen = info
        return info.last_modified


def _says_exited(store: ObjectStore, key: str) -> bool:
    try:
        beat = read_beat(store, key)
    except IntegrityError:
        return False  # damaged, or a newer library's: it says nothing
    return beat is not None and beat.state == "exited"
