"""Connections to the database of the records: pooled, renewed after a fork and a loss, with a bound on each call."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self, TypeVar

import sqlalchemy as sa

from dagster_resilient.errors import ConfigurationError, ResilientError, SchemaVersionError, StoreUnavailableError
from dagster_resilient.state.sql_dialects import TABLE_VERSION, Dialect, dialect_of

T = TypeVar("T")

# Kept open, and open at most. A process makes few calls at a time, and a server grants its connections to many.
_IDLE, _MORE = 2, 14
_VERSION = sa.text("SELECT max(version) FROM resilient_schema")


class _Forks:
    """How many forks lie between the first process and this one, and what they left here for good."""

    count = 0
    left: ClassVar[list[sa.Engine]] = []


class _Shared:
    """The databases that somebody uses in this process. The lock is one that a signal handler may take again."""

    lock = threading.RLock()
    databases: ClassVar[weakref.WeakValueDictionary[sa.URL, Database]] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    _Forks.count += 1
    _Shared.lock = threading.RLock()  # a thread that is not in this process may hold the other


os.register_at_fork(after_in_child=_after_fork)


def database_at(url: str) -> Database:
    """Return the database of a URL: the same one while anybody in this process has it, so that they share connections.

    When the last one drops it, its connections are closed.

    Raises:
        ConfigurationError: The URL cannot be read, or names another database or driver.
    """
    dialect = dialect_of(url)
    with _Shared.lock:
        return _Shared.databases.setdefault(dialect.url, Database(dialect))


class Database:
    """One database: runs statements on its tables, which it makes at the first use, and raises errors of our tree.

    Attributes:
        url: Without credentials.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.url = dialect.shown_url
        self._dialect = dialect
        self._engines: dict[int, sa.Engine] = {}
        self._call = threading.local()
        self._ready = False
        weakref.finalize(self, _close, self._engines).atexit = False

    def run(self, verb: str, key: str, work: Callable[[sa.Connection], T]) -> T:
        """Do the work of one statement on a connection.

        A connection may have died in the pool. It is tried, and on failure one more at once: to ask each time before
        its use whether it lives would double the round trips. The work must bear to be done twice, since it may have
        been the reply that was lost.

        Raises:
            StoreUnavailableError: The database does not answer now.
            StorageError: It refuses; see the tree in `errors`.
            SchemaVersionError: A newer version of the library made the tables.
        """
        with self._errors(verb, key), _CallLimit(self._dialect.call_seconds) as limit:
            self._call.limit = limit
            self._dialect.check()
            try:
                return self._attempt(limit, work)
            except sa.exc.DBAPIError as error:
                if limit.exceeded or not error.connection_invalidated:
                    raise
                return self._attempt(limit, work)

    def _attempt(self, limit: _CallLimit, work: Callable[[sa.Connection], T]) -> T:
        with self._engine().connect() as connection:
            limit.watch(connection.connection.dbapi_connection)
            if not self._ready:
                self._make_tables(connection)
            return work(connection)

    def _engine(self) -> sa.Engine:
        """Return this process's connections.

        Those of the process that it was forked from are left alone, and stay referred to: to close one here would
        speak on its socket, or drop SQLite's file locks. No lock: a fork could inherit it in a held state.
        """
        found = self._engines.get(_Forks.count)
        return found or self._engines.setdefault(_Forks.count, self._new_engine())

    def _new_engine(self) -> sa.Engine:
        try:
            engine = sa.create_engine(
                self._dialect.url,
                isolation_level="AUTOCOMMIT",
                poolclass=sa.QueuePool,
                pool_size=_IDLE,
                max_overflow=_MORE,
                pool_use_lifo=True,
                hide_parameters=True,
            )
        except ModuleNotFoundError as error:
            advice = "pip install 'dagster-resilient[postgres]'"
            raise ConfigurationError(f"{self.url} needs the package {error.name}: {advice}.") from error

        # Neither may refer to the database: a cycle would keep it, and its connections, until the garbage is collected.
        ours, current = self._dialect, self._call

        @sa.event.listens_for(engine, "do_connect")
        def connect(dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> Any:
            return ours.connect(dialect.loaded_dbapi, parameters)

        @sa.event.listens_for(engine, "connect", insert=True)
        def watch(connection: Any, _record: Any) -> None:
            # SQLAlchemy asks a new connection some questions of its own.
            current.limit.watch(connection)

        return engine

    def _make_tables(self, connection: sa.Connection) -> None:
        version = self._version(connection)
        if version is None:
            for statement in self._dialect.setup:
                connection.exec_driver_sql(statement)
            version = self._version(connection) or 0
        if version > TABLE_VERSION:
            raise SchemaVersionError(
                f"The tables in {self.url} have schema version {version}; this library knows up to {TABLE_VERSION}. "
                "Upgrade dagster-resilient."
            )
        self._dialect.used()
        self._ready = True

    def _version(self, connection: sa.Connection) -> int | None:
        """Return the tables' version, None where they are missing or not complete."""
        if not sa.inspect(connection).has_table("resilient_schema"):
            return None
        version: int | None = connection.execute(_VERSION).scalar()
        return version

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        could_not = f"Could not {verb} {self.url}/{key}"
        try:
            yield
        except ResilientError:
            raise
        except sa.exc.DBAPIError as error:
            cause = error.orig or error
            raise self._dialect.error(cause, f"{could_not}: {' '.join(str(cause).split())}.", key) from error
        except sa.exc.TimeoutError as error:
            message = f"{could_not}: all {_IDLE + _MORE} connections of this process are in use."
            raise StoreUnavailableError(message, store=self.url, key=key) from error
        except OSError as error:
            raise self._dialect.error(error, f"{could_not}: {error}.", key) from error


def _close(engines: dict[int, sa.Engine]) -> None:
    """Close this process's connections, and keep those of the processes before it: see `Database._engine`."""
    for forks, engine in engines.items():
        if forks == _Forks.count:
            engine.dispose()
        else:
            _Forks.left.append(engine)


class _CallLimit:
    """Ends a connection on which a call waits for too long: the driver has no bound of its own on a silent server.

    Attributes:
        exceeded: Whether it did.
    """

    def __init__(self, seconds: float | None) -> None:
        self.exceeded = False
        self._connection: Any = None
        self._lock = threading.Lock()
        self._timer = None if seconds is None else threading.Timer(seconds, self._cut)

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            with self._lock:  # a cut that has begun ends before the connection goes back to the pool
                self._connection = None

    def watch(self, connection: Any) -> None:
        """Name the connection that the call uses now."""
        with self._lock:
            self._connection = connection
        if self.exceeded:
            self._cut()

    def _cut(self) -> None:
        with self._lock:
            self.exceeded = True
            if self._connection is not None and not self._connection.closed:
                # A descriptor of our own: psycopg2 keeps the one it has, and finds its stream at an end.
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)
