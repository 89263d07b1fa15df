"""The sidecar process, seen from its parent; what it writes is in `beats`, and given here too.

The heartbeat is written by a process beside the step, so that a step that holds the GIL for minutes, or has not
finished its imports, still shows that it lives, and one that is dead or stopped does not. Nothing here can fail a step:
a heartbeat that cannot be written is a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from dagster_resilient.state._processes import SIDECAR, process_identity
from dagster_resilient.state._sidecar_pace import FIRST_LIMIT
from dagster_resilient.state._sidecar_pipe import (
    LONGEST_LINE,
    as_lines,
    close_pipes,
    let_go,
    lines,
    plain,
    site_of_obstore,
    write_all,
    write_within,
)
from dagster_resilient.state._sidecar_registry import Registry
from dagster_resilient.state._sidecar_renewal import Renewal
from dagster_resilient.state.beats import Beat, LiveName, Role, carries_heartbeats, list_beats, read_beat, store_now
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore

__all__ = [
    "Beat",
    "LiveName",
    "Role",
    "Sidecar",
    "ensure_sidecar",
    "list_beats",
    "process_identity",
    "read_beat",
    "store_now",
]

_log = logging.getLogger(__name__)
_LONGEST_NAME = 300  # of a task, in a line that must fit into the pipe
_STARTS = 4
_GOODBYE = 2.0
_STORE_TIMEOUT = 5.0
_TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Sidecar:
    """The process that beats for this one. No method waits for the store, but `close`, and that for two seconds or so.

    The sidecar reports this process's death, tells it of a fence, ends it where it ignores the fence, and ends it where
    the run worker that it belongs to has died. After a fork the child's copy of this object does nothing: the sidecar
    belongs to the process that started it.

    Args:
        store: Where to beat. Must be one that other processes can open.
        run_id: The run.
        root: Root run of its lineage.
        role: ``worker`` for the run worker, ``step`` for a step process.
        instance_id: The Dagster instance.
        process: Id of this process; a new one by default.
        interval: Seconds between beats.
        ttl: Seconds without a beat after which an observer may think this process lost.
        worker: `process_identity` of the run worker; when it dies, this process is ended as an orphan.
        step_key: The step, where it is known at the start.
        fence_grace: Seconds that a fenced process has to stop by itself before SIGTERM.
        term_grace: Seconds between SIGTERM and SIGKILL of the process tree.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        run_id: str,
        root: str,
        role: Role,
        instance_id: str,
        process: str | None = None,
        interval: float = 10.0,
        ttl: float = 45.0,
        worker: tuple[int, int] | None = None,
        step_key: str | None = None,
        fence_grace: float = 10.0,
        term_grace: float = 10.0,
    ) -> None:
        self.process = process or uuid.uuid4().hex
        self.key = keys.live_key(run_id, role, self.process)
        self._pid = os.getpid()
        self._beat = Beat(
            process=self.process,
            run_id=run_id,
            root=root,
            role=role,
            instance_id=instance_id,
            host=os.uname().nodename,
            pid=self._pid,
            seq=0,
            interval=interval,
            ttl=ttl,
            step_key=step_key,
        )
        self._store = store
        self._renewal = Renewal(store, self.key, interval, self._deliver, self._warn)
        self._graces = {"fence_grace": fence_grace, "term_grace": term_grace, "store_timeout": _STORE_TIMEOUT}
        self._keys = {"fence_key": keys.fence_key(run_id), "hung_key": keys.hung_key(run_id, role, self.process)}
        self._worker = None if worker is None or worker[0] == self._pid else worker
        # Re-entrant: a signal handler may close what the interrupted code was just starting.
        self._lock = threading.RLock()
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._over = threading.Event()
        self._known = True
        self._fence: str | None = None
        self._taken: dict[str, str] = {}
        self._fenced: str | None = None
        self._watches: dict[str, dict[str, Any]] = {}
        self._expects: dict[str, dict[str, Any]] = {}
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"Sidecar({self.key!r})"

    @property
    def pid(self) -> int | None:
        """Process id of the sidecar, or None where none runs."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> None:
        """Start the sidecar process, and return without waiting for its first beat. A second call does nothing."""
        with self._lock:
            if self._reader is not None or self._over.is_set() or os.getpid() != self._pid:
                return
            self._renewal.begin()
            self._child = self._spawn()
            self._reader = threading.Thread(target=self._listen, name=f"sidecar-{self.process}", daemon=True)
            self._reader.start()

    def progress(self, **fields: Any) -> None:
        """Report progress: the fields are merged into the next beat. Never blocks, never raises.

        ``step_key=`` names the step in progress; a new one clears the fields of the one before. What is no plain value
        is reported by its type: to print a tensor would wait for its GPU. A report that cannot be passed on at once is
        dropped; the next one takes its place.
        """
        message = {"step_key": fields.pop("step_key")} if "step_key" in fields else {}
        line = json.dumps({**message, "progress": plain(fields)}).encode() + b"\n"
        if len(line) > LONGEST_LINE:
            self._warn("long", f"a progress report of {len(line)} bytes was dropped; at most {LONGEST_LINE} are sent")
        elif not self._send(line):
            self._warn("dropped", "a progress report was dropped, since the sidecar did not take it")

    def watch(self, log_prefix: str, generation: int, *, task: str = "") -> None:
        """Have the log of a held task watched: an entry of a newer generation is told, and ends us, as a fence does.

        The sidecar lists the log once per interval, for the first time an interval from now. It asks nothing of this
        process, so it finds a successor also where this one holds the GIL for hours. Call it once the lease is
        acquired; a second call for the same log takes the place of the first.

        Args:
            log_prefix: Key under which the entries ``<10 digits>.json`` stand, with the slash at its end.
            generation: Our generation.
            task: Name of the task in what is told; the prefix by default.
        """
        if os.getpid() != self._pid:
            return
        message = {"prefix": log_prefix, "generation": generation, "task": (task or log_prefix)[:_LONGEST_NAME]}
        with self._lock:
            self._take_back(log_prefix)
            self._watches[log_prefix] = message
            self._insist({"watch": message})

    def unwatch(self, log_prefix: str) -> None:
        """Watch a log no more; what its watch has told is taken back, as far as SIGTERM is not sent.

        Call it *before* the entry is written that gives the lease away: else the entry of a rightful successor is taken
        for one that took over, and ends this process.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._watches.pop(log_prefix, None) is not None:
                self._take_back(log_prefix)
                self._insist({"unwatch": log_prefix})

    def expect(self, task: str, limit: float | None = None, *, first: float | None = FIRST_LIMIT) -> None:
        """Have a hang noticed: reports of the task should come until `relax`.

        Where none comes for too long, the sidecar puts a mark into the store, for observers; it ends nothing for it.
        What is expected later is within what is expected already: its reports count for both.

        Args:
            task: The ``task`` of the reports; ``a`` stands for those of ``a[partition]`` too.
            limit: Seconds without a report; by default learned: ten times the longest of the last 20 intervals, and
                at least 3,600.
            first: What counts while fewer than three intervals are known; None: nothing is judged until then.
        """
        if os.getpid() != self._pid:
            return
        message = {"task": task, "limit": limit, "first": first}
        with self._lock:
            self._expects.pop(task, None)  # what is expected anew stands behind the others
            self._expects[task] = message
            self._insist({"expect": message})

    def relax(self, task: str) -> None:
        """Expect no more of a task; a mark for it is deleted."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._expects.pop(task, None) is not None:
                self._insist({"relax": task})

    def fenced(self) -> str | None:
        """Return why our run was fenced or a task taken over, or None as far as the sidecar knows.

        Cheap enough to ask at every step.
        """
        return self._fenced

    def close(self) -> None:
        """Say goodbye: the sidecar deletes the heartbeat and exits. After about two seconds it is killed."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            was_over, child, reader = self._over.is_set(), self._child, self._reader
            self._over.set()
            known, self._known = self._known, False
        if known:  # once: the registry forgets without a lock, and must not meet a successor of the same name
            _live.forget(self)
        if was_over or child is None or reader is None:
            return
        deadline = time.monotonic() + _GOODBYE
        write_within(child, b'{"bye": true}\n', deadline)
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            self._warn("goodbye", f"the heartbeat may remain: the store did not delete it within {_GOODBYE:g} s")
        let_go(child, reader)

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        """Start the process. It inherits that the terminal's signals are blocked, from its first instant on."""
        config = self._configuration()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
        try:
            child = subprocess.Popen(  # noqa: S603 - our own interpreter and our own file
                [sys.executable, "-I", "-S", SIDECAR],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # whoever captures our stderr must not wait for the sidecar to close it
                bufsize=0,
                close_fds=True,
                cwd="/",
            )
        except OSError as error:
            self._warn("start", f"no heartbeat for {self.key}: the sidecar could not be started ({error})")
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: `_listen` sees that
            write_all(child.stdin.fileno(), config)
        os.set_blocking(child.stdin.fileno(), False)
        return child

    def _configuration(self) -> bytes:
        """One line, for the pipe: it holds credentials, and others can read arguments and environments."""
        config: dict[str, Any] = {
            "store": self._renewal.known,
            "site": site_of_obstore(),
            "beat": self._beat.model_dump(mode="json", exclude_none=True),
            "key": self.key,
            "watches": list(self._watches.values()),
            "expects": list(self._expects.values()),
            "restarted": self._reader is not None,
            "parent": process_identity(self._pid),
            "worker": self._worker,
        }
        return json.dumps({**config, **self._keys, **self._graces}).encode() + b"\n"

    def _send(self, line: bytes) -> bool:
        """Write one line, whole or not at all. A raw write to a full pipe returns None."""
        child = self._child
        if child is None or child.stdin is None or self._over.is_set() or os.getpid() != self._pid:
            return True
        try:
            return child.stdin.write(line) is not None
        except (OSError, ValueError):
            return False

    def _listen(self) -> None:
        """Read what the sidecars say. One that ends without our goodbye was killed, and is replaced, at most thrice."""
        for start in range(1, _STARTS + 1):
            child = self._child
            if child is None:
                return
            for message in lines(child):
                self._hear(message)
            child.wait()
            if self._over.is_set():
                return
            self._warn(f"died {start}", f"the sidecar of {self.key} ended with code {child.returncode}")
            self._child = None
            close_pipes(child.stdin, child.stdout)
            if start == _STARTS or self._over.wait(self._beat.interval):
                return
            with self._lock:
                self._child = None if self._over.is_set() else self._spawn()

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "trouble" in message:
            where = f"{message['doing']} failed ({self._store.url}/{self.key})"
            self._warn("trouble", f"{where}, and is tried again at each interval: {message['trouble']}")
            self._renewal.want(refused=message["refused"])
        if "fenced" in message:
            with self._lock:
                self._take_in(message)

    def _take_in(self, message: Mapping[str, Any]) -> None:
        """Remember a fence; and a takeover too, unless its watch was taken back while the line was under way."""
        watch = self._watches.get(message.get("prefix", ""))
        if "prefix" not in message:
            self._fence = message["fenced"]
        elif watch is not None and watch["generation"] == message["generation"]:
            self._taken[message["prefix"]] = message["fenced"]
        self._fenced = self._fence or next(iter(self._taken.values()), None)

    def _take_back(self, log_prefix: str) -> None:
        self._taken.pop(log_prefix, None)
        self._fenced = self._fence or next(iter(self._taken.values()), None)

    def _insist(self, message: Mapping[str, Any]) -> None:
        """Send a line that must arrive.

        A sidecar that has not read for long is ended: the one that takes its place begins with the watches of now. (A
        watch that outlives its lease would end this process for nothing.)
        """
        child = self._child
        if child is None or self._over.is_set():
            return
        deadline = time.monotonic() + _GOODBYE
        if not all(write_within(child, line, deadline) for line in as_lines(message)):
            child.kill()

    def _deliver(self, config: Mapping[str, Any]) -> None:
        with self._lock:
            self._insist({"store": config})

    def _warn(self, kind: str, text: str) -> None:
        """Warn once of each kind of trouble: a loop of a million steps must not fill the log."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("Heartbeat: %s.", text.rstrip("."))


_live: Registry[Sidecar] = Registry()
_close_all = _live.close_all


def ensure_sidecar(store: ObjectStore, *, run_id: str, role: Role, **options: Any) -> Sidecar | None:
    """Return the sidecar of this process for this store, run and role; start it at the first call.

    It is closed when the process exits, also where that is a forked `multiprocessing` child, which skips `atexit`.

    Args:
        store: Where to beat.
        run_id: The run.
        role: See `Sidecar`.
        options: Further arguments of `Sidecar`; they count at the first call.

    Returns:
        None where no other process can see the store.
    """
    if not carries_heartbeats(store):
        return None

    def started() -> Sidecar:
        sidecar = Sidecar(store, run_id=run_id, role=role, **options)
        sidecar.start()
        return sidecar

    return _live.get((store.url, run_id, role), started)
