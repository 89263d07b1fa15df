"""Processes as the sidecar sees them: identities that outlive pid reuse, and trees that are ended as a whole.

Standard library only: the sidecar loads this file without the rest of the package's dependencies.
"""

# pathlib costs more to import than all the rest of this file:
# ruff: noqa: PTH100, PTH110, PTH112, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping

SIDECAR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_sidecar.py")
_ROUNDS = 8  # looks at /proc while a tree is being stopped


def read_stat(pid: int) -> tuple[str, int, int] | None:
    """Return state letter, parent's pid and start time in clock ticks of a process, or None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses: count from the last one.
    fields = raw[raw.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[19])


def exists(pid: int) -> bool:
    """Return whether a pid is in use, on systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def process_identity(pid: int) -> tuple[int, int] | None:
    """Return a process's pid and start time in clock ticks, or None where there is no such process.

    The start time tells it from a later process with the same pid. It is 0 on systems without /proc.
    """
    stat = read_stat(pid)
    if stat is not None:
        return pid, stat[2]
    return (pid, 0) if not os.path.exists("/proc/self/stat") and exists(pid) else None


class Watched:
    """One process, never mistaken for a later one with the same pid.

    A pidfd holds on to it, and its start time confirms that it is the one meant. A start time of 0 means unknown (no
    /proc): then the parent is told by `getppid`, others by their pid alone.
    """

    def __init__(self, pid: int, born: int) -> None:
        self.pid = pid
        self.born = born
        self.fd = _open_pidfd(pid)
        self._is_parent = os.getppid() == pid
        # Only after the pidfd is open: from here on the pid cannot change hands unseen.
        self._gone = not self._same()

    def _same(self) -> bool:
        stat = read_stat(self.pid)
        if stat is not None:
            return self.born in {0, stat[2]} and stat[0] not in {"Z", "X"}
        if self.born:
            return False
        return os.getppid() == self.pid if self._is_parent else exists(self.pid)

    def dead(self) -> bool:
        """Return whether the process has ended. A zombie has."""
        if not self._gone:
            self._gone = _readable(self.fd) if self.fd is not None else not self._same()
        return self._gone

    def stopped(self) -> bool:
        """Return whether the process is held by SIGSTOP or a debugger."""
        stat = read_stat(self.pid)
        return stat is not None and stat[0] in {"T", "t"}

    def send(self, number: int) -> None:
        """Send a signal, if the process still lives and is ours to signal."""
        if self.dead():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, number)
            else:
                os.kill(self.pid, number)


def _readable(fd: int) -> bool:
    """Poll, since `select` refuses descriptors from 1024 on, and trees can be large."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, an old kernel, or no such process: `_same` tells
        return None


def descendants(roots: Mapping[int, Watched]) -> dict[int, Watched]:
    """Return children, their children and so on, that are not among the roots, from one look at /proc.

    Left out is what ends by itself: sidecars, once they have reported the death of their parent, and the resource
    tracker of `multiprocessing`, once it has removed the shared memory that its dead users left behind.
    """
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            children.setdefault(stat[1], []).append((int(name), stat[2]))
    found: dict[int, Watched] = {}
    queue = [pid for pid, root in roots.items() if not root.dead()]
    while queue:
        for pid, born in children.get(queue.pop(), []):
            if pid not in roots and pid not in found and pid != os.getpid() and not _ends_by_itself(pid):
                found[pid] = Watched(pid, born)
                queue.append(pid)
    return found


def _ends_by_itself(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read()
    except OSError:
        return False
    return os.fsencode(SIDECAR) in arguments.split(b"\0") or b"multiprocessing.resource_tracker" in arguments


def kill_tree(members: dict[int, Watched]) -> None:
    """SIGKILL processes with all their descendants.

    All are stopped from the top down first: what is stopped forks no more, so that no child escapes between the look
    at /proc and the kill. The process group is never used: it may hold the shell or the run worker.
    """
    fresh = members
    for _ in range(_ROUNDS):
        for process in fresh.values():
            process.send(signal.SIGSTOP)
        fresh = descendants(members)
        if not fresh:
            break
        members = {**members, **fresh}
    for process in members.values():
        process.send(signal.SIGKILL)
