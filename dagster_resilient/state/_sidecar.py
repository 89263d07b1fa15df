"""The process beside a step or run worker: it writes heartbeats, watches who lives, and ends what must not go on.

It runs as ``python -I -S _sidecar.py`` and imports the standard library, obstore and `_processes`, nothing else: it
must beat before its parent has imported anything heavy, and take little memory. One JSON line on its standard input
configures it (credentials never stand in the arguments or the environment); later lines bring progress or say goodbye.
Lines on its standard output tell the parent of a fence or of trouble with the store.

Two threads: the main one watches processes and deadlines, `Beater` talks to the store. A store that hangs can thus
delay beats and fences, but never the watch.
"""

# pathlib costs more to import than all the rest of this file:
# ruff: noqa: PTH100, PTH103, PTH105, PTH108, PTH116, PTH120, PTH123

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # A script started with -I and -S finds nothing beside itself. The package's own __init__ files import nothing.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from dagster_resilient.state._processes import Watched, descendants, kill_tree

if TYPE_CHECKING:
    from typing import Protocol

    class Store(Protocol):
        """The three calls that a sidecar makes."""

        def put(self, key: str, body: bytes) -> None:
            """Write an object."""

        def get(self, key: str) -> bytes:
            """Read an object; FileNotFoundError where there is none."""

        def delete(self, key: str) -> None:
            """Delete an object, there or not."""


LONGEST_SLEEP = 5.0
POLLING = 0.5  # seconds between looks where the kernel has no pidfd
LAST_WORDS = 10.0  # seconds to bring out the last beat of a parent that died


class Directory:
    """A local store. Atomic by rename, not synced: a heartbeat need not outlive a power loss."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = False

    def put(self, key: str, body: bytes) -> None:
        """Write an object. A root that was there and has gone (unmounted, renamed) is not made again."""
        if self._seen:
            os.stat(self._path)
        target = f"{self._path}/{key}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # Listings skip names that end in "#" and digits; see LocalDirectoryStore.
        temporary = f"{target}#{os.getpid()}"
        with open(temporary, "wb") as file:
            file.write(body)
        os.replace(temporary, target)
        self._seen = True

    def get(self, key: str) -> bytes:
        """Read an object."""
        with open(f"{self._path}/{key}", "rb") as file:
            return file.read()

    def delete(self, key: str) -> None:
        """Delete an object."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._path}/{key}")


class Bucket:
    """A prefix of an S3 bucket, through obstore, with short timeouts and no retries: the next interval is the retry."""

    def __init__(self, config: dict[str, Any], timeout: float) -> None:
        import obstore  # noqa: PLC0415 - only S3 needs it, and only once the path to it is known
        from obstore.store import S3Store  # noqa: PLC0415 - as above

        self._obstore = obstore
        self._root = config["root"]
        plain_http = str(config["config"].get("endpoint", "")).startswith("http://")
        self._client = S3Store(
            config["bucket"],
            config=config["config"],
            client_options={"timeout": f"{timeout}s", "connect_timeout": f"{timeout}s", "allow_http": plain_http},
            retry_config={"max_retries": 0},
        )

    def put(self, key: str, body: bytes) -> None:
        """Write an object."""
        self._obstore.put(self._client, self._root + key, body, use_multipart=False)

    def get(self, key: str) -> bytes:
        """Read an object."""
        return bytes(self._obstore.get(self._client, self._root + key).bytes())

    def delete(self, key: str) -> None:
        """Delete an object."""
        with contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._client, self._root + key)


def open_store(config: dict[str, Any], timeout: float) -> Store:
    """Open what `ObjectStore.sidecar_config` describes."""
    if config["kind"] == "local":
        return Directory(config["path"])
    if config["kind"] == "s3":
        return Bucket(config, timeout)
    raise ValueError(f"the sidecar knows no store of kind {config['kind']!r}")


class Beater(threading.Thread):
    """Writes the beats and looks for the fence. Whatever the store does, it tries again at the next interval."""

    def __init__(self, config: dict[str, Any], parent: Watched, tell: Callable[[dict[str, str]], None]) -> None:
        super().__init__(daemon=True)
        self.fence: str | None = None
        self.progress: dict[str, Any] = {}
        self.step_key: str | None = config["beat"].get("step_key")
        self.finished = threading.Event()
        self.awake, self._alarm = os.pipe()
        self._config = config
        self._parent = parent
        self._tell = tell
        self._store: Store | None = None
        self._sequence = 0
        self._failing: set[str] = set()
        self._last: str | None = None
        self._ended = threading.Event()

    def update(self, message: dict[str, Any]) -> None:
        """Merge a line of progress; a new step starts with none. The dict is replaced, since the thread may read it."""
        step_key = message.get("step_key", self.step_key)
        base = self.progress if step_key == self.step_key else {}
        self.progress, self.step_key = {**base, **message.get("progress", {})}, step_key

    def finish(self, last: str) -> None:
        """Ask for the last act: ``delete`` the heartbeat, or write that the parent has ``exited``."""
        self._last = last
        self._ended.set()

    def run(self) -> None:
        """Beat every interval until the end, then act for the last time."""
        due = time.monotonic()
        while self._last is None:
            if not self._parent.stopped():
                self._try(self._beat)
            self._try(self._look_for_fence)
            due = max(due + self._config["interval"], time.monotonic())
            self._ended.wait(due - time.monotonic())
        deadline = time.monotonic() + LAST_WORDS
        while not self._try(self._last_act) and time.monotonic() < deadline:
            time.sleep(min(self._config["interval"], 1.0))
        self.finished.set()

    def _try(self, act: Callable[[Store], None]) -> bool:
        """Open the store where need be, and act. The first failure in a row is told; none is raised."""
        try:
            if self._store is None:
                self._store = open_store(self._config["store"], self._config["store_timeout"])
            act(self._store)
        except Exception as error:  # noqa: BLE001 - G7: whatever a store raises, a heartbeat only tries again
            if act.__name__ not in self._failing:
                self._failing.add(act.__name__)
                self._tell({"trouble": f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0][:300]})
            return False
        self._failing.discard(act.__name__)
        return True

    def _beat(self, store: Store) -> None:
        self._sequence += 1
        state = "running" if self._last is None else "exited"
        beat = {**self._config["beat"], "seq": self._sequence, "progress": self.progress, "state": state}
        if self.step_key is not None:
            beat["step_key"] = self.step_key
        store.put(self._config["key"], json.dumps(beat).encode())

    def _look_for_fence(self, store: Store) -> None:
        """A fence that exists counts, whatever is in it. A store that cannot be asked says nothing."""
        if self.fence is not None:
            return
        try:
            raw = store.get(self._config["fence_key"])
        except FileNotFoundError:
            return
        self.fence = _reason(raw)
        os.write(self._alarm, b"!")

    def _last_act(self, store: Store) -> None:
        if self._last == "delete":
            store.delete(self._config["key"])
        else:
            self._beat(store)


def _reason(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["reason"])
    except (ValueError, TypeError, KeyError):
        return "the fence gives no reason"


class Inbox:
    """The parent's lines. End of file means nothing: who else holds the pipe (a forked child) is not known."""

    def __init__(self, fd: int = 0) -> None:
        self.fd: int | None = fd
        self._rest = b""

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
                messages.append(dict(json.loads(line)))
        return messages


class Guard:
    """The watch: decides when the parent is told, terminated, killed; and when this process is done."""

    def __init__(self, config: dict[str, Any], inbox: Inbox) -> None:
        self._config = config
        self._inbox = inbox
        self._parent = Watched(*config["parent"])
        self._worker = Watched(*config["worker"]) if config["worker"] else None
        self._beater = Beater(config, self._parent, self._tell)
        self._goodbye = False
        self._told = False
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._known: dict[int, Watched] = {}

    def run(self) -> None:
        """Watch until the parent says goodbye or dies."""
        self._beater.start()
        while True:
            self._read_inbox()
            if self._goodbye or self._parent.dead():
                # Read again: the last words may have come between the look into the pipe and the death.
                self._read_inbox()
                return self._leave()
            self._judge(time.monotonic())
            self._act(time.monotonic())
            self._sleep()

    def _read_inbox(self) -> None:
        for message in self._inbox.read():
            self._goodbye = self._goodbye or bool(message.get("bye"))
            self._beater.update(message)

    def _judge(self, now: float) -> None:
        """Decide whether the parent must end: a fence gives it time to stop by itself, a dead run worker does not."""
        if self._worker is not None and self._worker.dead():
            self._worker = None
            self._end_at(now)
        if self._beater.fence is not None and not self._told:
            self._told = True
            self._tell({"fenced": self._beater.fence})
            self._end_at(now + self._config["fence_grace"])

    def _end_at(self, when: float) -> None:
        if self._kill_at is None:
            self._term_at = when if self._term_at is None else min(self._term_at, when)

    def _act(self, now: float) -> None:
        if self._term_at is not None and now >= self._term_at:
            # Remember the tree: children of a parent that obeys are handed to init and could not be found later.
            self._known = {self._parent.pid: self._parent, **descendants({self._parent.pid: self._parent})}
            self._parent.send(signal.SIGTERM)
            self._term_at, self._kill_at = None, now + self._config["term_grace"]
        if self._kill_at is not None and now >= self._kill_at:
            kill_tree(self._known)
            self._kill_at = float("inf")  # SIGKILL is not lost; more of them change nothing

    def _leave(self) -> None:
        """Bring out the last words. All of it is bounded.

        A parent that said goodbye is done with us, and may take its time to exit. What a terminated parent left running
        without one is ended as it would have been.
        """
        self._beater.finish("delete" if self._goodbye else "exited")
        if not self._goodbye and self._kill_at not in {None, float("inf")}:
            while time.monotonic() < (self._kill_at or 0) and not all(w.dead() for w in self._known.values()):
                time.sleep(0.05)
            kill_tree(self._known)
        self._beater.finished.wait(LAST_WORDS)

    def _sleep(self) -> None:
        watched = [w for w in (self._parent, self._worker) if w is not None]
        fds = [fd for fd in (self._beater.awake, self._inbox.fd, *(w.fd for w in watched)) if fd is not None]
        longest = POLLING if any(w.fd is None for w in watched) else LONGEST_SLEEP
        deadlines = [when - time.monotonic() for when in (self._term_at, self._kill_at) if when is not None]
        ready = select.select(fds, [], [], max(0.0, min([longest, *deadlines])))[0]
        if self._beater.awake in ready:
            os.read(self._beater.awake, 64)

    @staticmethod
    def _tell(message: dict[str, str]) -> None:
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
    os._exit(0)  # the store thread may hang in a call; nobody waits for it


if __name__ == "__main__":
    main()
