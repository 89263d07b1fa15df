"""What differs between SQLite and PostgreSQL: how to connect, the tables, durability, and what an error means."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from dagster_resilient.errors import (
    ConfigurationError,
    IntegrityError,
    ResilientError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)

_KNOWN = "Use sqlite:////absolute/path.db or postgresql://user:password@host:port/database."
_SECRET = "It is not repeated here, since it may hold a password."  # noqa: S105 - it says that none is shown
_SQLITE_WAIT = 5.0

# What keeps any file from being opened for a while: too many are open, or the device does not answer.
_MAY_PASS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EINTR})

TABLE_VERSION = 1  # what is inserted below
_SET_VERSION = "INSERT INTO resilient_schema (version) VALUES (1) ON CONFLICT DO NOTHING"
_SQLITE_RECORDS = """
CREATE TABLE IF NOT EXISTS resilient_records (
    key TEXT NOT NULL PRIMARY KEY,
    body TEXT NOT NULL,
    size INTEGER NOT NULL,
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now'))
)
"""
# One string, so one transaction. The lock is for processes that start at once: CREATE TABLE IF NOT EXISTS fails where
# another one is just making the table.
_POSTGRES_SETUP = f"""
SELECT pg_advisory_xact_lock(7385027301);
CREATE TABLE IF NOT EXISTS resilient_records (
    key text COLLATE "C" PRIMARY KEY,
    body text NOT NULL,
    size bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE IF NOT EXISTS resilient_schema (version integer PRIMARY KEY);
{_SET_VERSION}
"""


class Dialect(ABC):
    """One database.

    Attributes:
        url: The URL to connect to. Holds credentials: never print it.
        shown_url: The same without them, for people.
        call_seconds: After so long a call is cut off from outside; None where the driver never waits so long.
        setup: Statements that make the tables; many processes may run them at once, and again.
    """

    url: sa.URL
    shown_url: str
    call_seconds: float | None = None
    setup: tuple[str, ...]

    @abstractmethod
    def connect(self, driver: Any, parameters: Mapping[str, Any]) -> Any:
        """Return a new connection of the driver, set up so that what is committed stays and each wait is finite."""

    @abstractmethod
    def error(self, cause: BaseException, message: str, key: str) -> ResilientError:
        """Return the error of our tree that fits one of the driver's."""

    @abstractmethod
    def used(self) -> None:
        """Note that the tables are there: from now on they must stay."""

    @abstractmethod
    def check(self) -> None:
        """Raise where the database is no more the one that this process has used before."""


def dialect_of(url: str) -> Dialect:
    """Return the dialect of a URL.

    Raises:
        ConfigurationError: The URL cannot be read, or names another database or driver.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigurationError(f"The URL of the records cannot be read. {_KNOWN} {_SECRET}") from None
    if "@" in f"{parsed.host}{parsed.database}" and not parsed.drivername.startswith("sqlite"):
        raise ConfigurationError(f"The URL of the records has a second @; write it as %40. {_SECRET}")
    if parsed.drivername in {"sqlite", "sqlite+pysqlite"}:
        return SqliteDialect(parsed)
    if parsed.drivername in {"postgresql", "postgresql+psycopg2"}:
        return PostgresDialect(parsed)
    raise ConfigurationError(f"Records cannot be kept in {parsed.drivername!r}. {_KNOWN}")


class SqliteDialect(Dialect):
    """A file on a local disk of one machine.

    Write-ahead logging where the file system can, and synchronous=EXTRA: as FULL, a commit is on the disk before it is
    acknowledged, and without write-ahead logging its folder is synced too.
    """

    setup = (
        "BEGIN IMMEDIATE",
        _SQLITE_RECORDS,
        "CREATE TABLE IF NOT EXISTS resilient_schema (version INTEGER PRIMARY KEY)",
        _SET_VERSION,
        "COMMIT",
    )
    _PASSING = frozenset(
        {
            *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT),
            *(sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR),
        }
    )
    _REFUSED = frozenset({sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH})
    _BROKEN = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

    def __init__(self, url: sa.URL) -> None:
        if not url.database or ":memory:" in url.database:
            raise ConfigurationError(f"Records in SQLite's memory are seen by no other process. {_KNOWN}")
        if url.host or url.query or url.database.startswith("file:"):
            raise ConfigurationError(f"A SQLite URL holds a path alone, no host and no options. {_KNOWN}")
        # Absolute at once: the process may change its directory later.
        self._path = Path(os.path.abspath(Path(url.database).expanduser()))  # noqa: PTH100 - resolve would follow links
        self.url = url.set(drivername="sqlite", database=str(self._path))
        self.shown_url = f"sqlite:///{self._path}"
        self._identity: tuple[int, int] | None = None

    def connect(self, driver: Any, parameters: Mapping[str, Any]) -> Any:
        """Open the file; make it, and its folders, only before its first use."""
        del parameters  # the path, as SQLAlchemy understood it
        if self._identity is None:
            self._make_folder()
        mode = "rwc" if self._identity is None else "rw"
        location = f"file:{quote(str(self._path))}?mode={mode}"
        connection = driver.connect(location, uri=True, timeout=_SQLITE_WAIT, check_same_thread=False)
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute("PRAGMA journal_mode = WAL")  # answers with another mode where it cannot
        connection.execute("PRAGMA synchronous = EXTRA")
        return connection

    def _make_folder(self) -> None:
        folder = self._path.parent
        try:
            _make_folder(folder)
        except (FileNotFoundError, NotADirectoryError, FileExistsError) as error:
            message = f"{self.shown_url} cannot be used: its folder {folder} cannot be made: {error.strerror}."
            raise ConfigurationError(f"{message} Name a folder that can.") from error

    def used(self) -> None:
        """Note which file it is."""
        stat = self._path.stat()
        self._identity = (stat.st_dev, stat.st_ino)

    def check(self) -> None:
        """Raise where the file has gone. A write into a removed file succeeds, and nobody would ever read it."""
        if self._identity is None:
            return
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            stat = None
        if stat is None or (stat.st_dev, stat.st_ino) != self._identity:
            message = f"{self.shown_url} has vanished or was replaced since this process opened it. Bring it back."
            raise StoreUnavailableError(message, store=self.shown_url)

    def error(self, cause: BaseException, message: str, key: str) -> ResilientError:
        """Judge by SQLite's error code, or by that of the operating system."""
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in self._BROKEN:
            return IntegrityError(f"{message} Restore the file from a backup.")
        kind: type[StorageError] | None = StorageError
        if code in self._REFUSED or isinstance(cause, PermissionError):
            kind = StoragePermissionError
        elif code in self._PASSING:
            kind = StoreUnavailableError
        elif code == sqlite3.SQLITE_CANTOPEN:
            kind = self._cannot_open()
        if kind is None:
            return ConfigurationError(f"{message} Name a folder that can hold it; {self._path.parent} cannot.")
        return kind(message, store=self.shown_url, key=key)

    def _cannot_open(self) -> type[StorageError] | None:
        """SQLite gives one code to all that can keep a file from being opened. Return None where the URL is wrong."""
        try:
            if self._path.is_dir():
                return StorageError
            folder = os.access(self._path.parent, os.W_OK | os.X_OK)
            file = not self._path.exists() or os.access(self._path, os.R_OK | os.W_OK)
            if not (folder and file):
                return StoreUnavailableError if not self._path.parent.exists() else StoragePermissionError
            if self._identity is None:
                # Not the file itself: to close it would drop the locks of all this process's connections to it.
                tempfile.TemporaryFile(dir=self._path.parent).close()
        except PermissionError:
            return StoragePermissionError
        except OSError as error:
            return StoreUnavailableError if error.errno in _MAY_PASS else None
        return StoreUnavailableError


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents; sync each parent, or a power loss forgets the whole branch."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    handle = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class PostgresDialect(Dialect):
    """A PostgreSQL database, through psycopg2.

    The server ends a statement after `_STATEMENT`. A server that stands still cannot do that, and libpq would wait for
    its answer for ever, so after `call_seconds` our side ends the connection.
    """

    call_seconds = 30.0
    setup = (_POSTGRES_SETUP,)
    _STATEMENT = "20s"
    # Where the server does not say otherwise; but an acknowledged record must have reached the disk.
    _SESSION = (
        f"SELECT set_config('statement_timeout', '{_STATEMENT}', false)"
        " WHERE current_setting('statement_timeout') = '0';"
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';"
        "SET default_transaction_isolation TO 'read committed'"
    )
    _CONNECT: Mapping[str, Any] = {
        "application_name": "dagster-resilient",
        "client_encoding": "utf8",
        "connect_timeout": 5,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 20_000,
    }
    # Classes of SQLSTATE that pass: connection, conflict with another transaction, resources, an operator's act.
    _PASSING = ("08", "40", "53", "57", "55P03", "25006")
    _DISK_FULL, _REFUSED = "53100", ("28", "42501")
    # libpq gives no SQLSTATE for a refused connection.
    _REFUSAL = re.compile(
        r"authentication failed|no pg_hba\.conf entry|no password supplied|permission denied|not permitted to log in"
        r'|role ".*" does not exist',
        re.IGNORECASE,
    )
    # libpq refuses these of itself, before it asks any server.
    _WRONG_URL = re.compile(
        r"^(connection to server .* failed: )?"
        r"(invalid port number|invalid integer value|invalid \S+ value: |could not match \d+ (port|host)|"
        r"integer value .* is out of range)",
        re.IGNORECASE,
    )
    _NO_DATABASE = re.compile(r'database ".*" does not exist', re.IGNORECASE)

    def __init__(self, url: sa.URL) -> None:
        self.url = url.set(drivername="postgresql+psycopg2")
        named = {name: value for name, value in url.query.items() if name in {"host", "port"}}
        shown = url.set(drivername="postgresql", query=named)
        self.shown_url = shown.render_as_string(hide_password=True)

    def connect(self, driver: Any, parameters: Mapping[str, Any]) -> Any:
        """Connect, with the URL's own options before our defaults."""
        connection = driver.connect(**{**self._CONNECT, **parameters})
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(self._SESSION)
        return connection

    def used(self) -> None:
        """Nothing to note: tables that are gone are an error of the server's, and are not made again."""

    def check(self) -> None:
        """Nothing to look at."""

    def error(self, cause: BaseException, message: str, key: str) -> ResilientError:
        """Judge by SQLSTATE; by the text where the connection was refused."""
        code = getattr(cause, "pgcode", None) or ""
        if not code and self._WRONG_URL.search(str(cause)):
            return ConfigurationError(f"{message} Correct the URL of the records.")
        kind = StorageError
        if code.startswith(self._REFUSED) or (not code and self._REFUSAL.search(str(cause))):
            kind = StoragePermissionError
        elif code == self._DISK_FULL or (not code and self._NO_DATABASE.search(str(cause))):
            kind = StorageError
        elif code.startswith(self._PASSING) or (not code and type(cause).__name__ != "ProgrammingError"):
            kind = StoreUnavailableError
        return kind(message, store=self.shown_url, key=key)
