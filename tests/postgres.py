"""A real PostgreSQL for tests: Debian's programs on loopback, in a temporary folder, ended by process id."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import servers

START_SECONDS = 60.0
USER, PASSWORD, DATABASE = "resilient", "canary-of-the-database", "records"
_PLACES = Path("/usr/lib/postgresql")


def programs() -> Path:
    """Return the folder with PostgreSQL's programs. Debian keeps them out of the search path.

    Raises:
        RuntimeError: They are not installed.
    """
    found = sorted(_PLACES.glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if not found:
        raise RuntimeError(
            f"No PostgreSQL under {_PLACES}; install the Debian package postgresql (apt-get install postgresql)."
        )
    return found[-1].parent


class PostgresServer:
    """One server. It keeps its port and its data over `kill` and `start`, as a crashed service does.

    It refuses to run as root, so under root it runs as the user that the Debian package made, or as nobody.
    """

    def __init__(self) -> None:
        self.programs = programs()
        self.folder = Path(tempfile.mkdtemp(prefix="resilient-pg-"))  # short: a socket's path has at most 107 bytes
        self.port = servers.free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._as_user: dict[str, Any] = {}
        if os.getuid() == 0:
            account = _account()
            os.chown(self.folder, account.pw_uid, account.pw_gid)
            self._as_user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    @property
    def url(self) -> str:
        """The database of the tests, with its password."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def pid(self) -> int:
        """Process id of the running server's first process."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    def create(self) -> None:
        """Make the data folder, start, and make the database."""
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        with contextlib.suppress(KeyError):
            os.chown(secret, self._as_user["user"], self._as_user["group"])
        initdb = [str(self.programs / "initdb"), f"--pgdata={self.folder}/data", f"--username={USER}"]
        initdb += ["--encoding=UTF8", "--locale=C.UTF-8", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync"]
        done = subprocess.run(
            initdb, capture_output=True, text=True, timeout=120, check=False, cwd=self.folder, **self._as_user
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stderr[-2000:]}")
        self.start()
        with self.connect("postgres") as connection:
            connection.cursor().execute(f"CREATE DATABASE {DATABASE}")

    @contextlib.contextmanager
    def connect(self, database: str = DATABASE, timeout: int = 10) -> Iterator[Any]:
        """A connection of the driver's own, for what a test wants to see or do behind the library's back."""
        url = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"
        connection = psycopg2.connect(url, connect_timeout=timeout)
        connection.autocommit = True
        try:
            yield connection
        finally:
            connection.close()

    def start(self) -> None:
        """Start, and return when it answers."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self.programs / "postgres"), "-D", f"{self.folder}/data", "-p", str(self.port)),
                    *("-h", "127.0.0.1", "-k", str(self.folder), "-c", "max_connections=300"),
                    # A killed process loses nothing that it handed to the kernel; only power loss needs more.
                    *("-c", "fsync=off", "-c", "shared_buffers=32MB"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - it only calls prctl
                **self._as_user,
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"PostgreSQL ended with {self._process.returncode}: {self._log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"PostgreSQL did not answer within {START_SECONDS:.0f} s: {self._log_tail()}")
            time.sleep(0.02)

    def answers(self) -> bool:
        """Whether it lets us in."""
        try:
            with self.connect("postgres", timeout=2):
                return True
        except psycopg2.OperationalError:
            return False

    def _log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """End it as a crash does: PostgreSQL's immediate shutdown, which writes nothing more and recovers at start."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=30)
            self._process = None

    def remove(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Killed inside the block; started again on the same port and data when it ends."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """All its processes stand still inside the block: connections are accepted by the kernel, never answered."""
        first = psutil.Process(self.pid)
        stopped = []
        try:
            for process in [first, *first.children(recursive=True)]:  # the first one first: it makes the others
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
                    stopped.append(process)
            yield
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            self._wait_until_ready()

    def schema_url(self) -> str:
        """Make a schema of its own in the database; return a URL whose tables are made there."""
        name = f"t_{uuid.uuid4().hex}"
        with self.connect() as connection:
            connection.cursor().execute(f"CREATE SCHEMA {name}")
        return f"{self.url}?options=-csearch_path%3D{name}"


def _account() -> pwd.struct_passwd:
    """The user that the Debian package made for it, or nobody."""
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _end_with_parent() -> None:
    """Let the kernel end the server if the test session is killed: SIGQUIT ends its other processes too."""
    servers._LIBC.prctl(servers._PR_SET_PDEATHSIG, signal.SIGQUIT)
