"""Records in one SQL table, in SQLite or PostgreSQL: `RecordStore` where object storage cannot decide who was first.

Every call is one statement, and a statement is a transaction of its own: in PostgreSQL one round trip, in SQLite with
the write lock taken at its beginning, as BEGIN IMMEDIATE does. Who creates a record is decided by the primary key.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import UTC, datetime

import sqlalchemy as sa

from dagster_resilient.errors import IntegrityError, SchemaVersionError, StoreUnavailableError
from dagster_resilient.state.sql_database import database_at
from dagster_resilient.state.store import R
from dagster_resilient.storage.manifest import Record
from dagster_resilient.storage.object_store import ObjectInfo, check_key, check_prefix
from dagster_resilient.storage.retry import DEFAULT_PATIENCE, patiently

_KEYS_PER_DELETE = 500

_CREATE = sa.text(
    "INSERT INTO resilient_records (key, body, size) VALUES (:key, :body, :size) ON CONFLICT (key) DO NOTHING"
)
_GET = sa.text("SELECT body FROM resilient_records WHERE key = :key")
# A half-open range and not LIKE, which gives % and _ a meaning. "0" follows "/": what is under "a/b/" is below "a/b0".
_LIST = sa.text("SELECT key, size, created_at FROM resilient_records WHERE key >= :first AND key < :after ORDER BY key")
_LIST_ALL = sa.text("SELECT key, size, created_at FROM resilient_records ORDER BY key")
_DELETE = sa.text("DELETE FROM resilient_records WHERE key IN :keys").bindparams(sa.bindparam("keys", expanding=True))


def open_records(url: str) -> SqlRecords:
    """Open the records at a database URL. Nothing is read or written until the first call.

    All that a process has open of one URL share one pool of connections.

    Args:
        url: ``sqlite:////absolute/path.db`` or ``postgresql://user:password@host:port/database``, with libpq's options
            behind ``?``. Tables are made at the first use, in the first schema of PostgreSQL's ``search_path``.

    Raises:
        ConfigurationError: Another database or driver, or a database in memory, which no other process can see.
    """
    return SqlRecords(url)


class SqlRecords:
    """Records in one table of a SQL database. May be used by many threads, and by a process forked from one that did.

    Attributes:
        url: The database, without password and options.
    """

    def __init__(self, url: str, patience: float = DEFAULT_PATIENCE) -> None:
        """Name the database; nothing is opened yet.

        Args:
            url: As `open_records` takes it.
            patience: Seconds that one call may spend in retries while the database is unavailable.
        """
        self._database = database_at(url)
        self._patience = patience
        self.url = self._database.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def with_patience(self, seconds: float) -> SqlRecords:
        """Return the same records, with the same connections and another bound on the time of one call's retries."""
        other = copy.copy(self)
        other._patience = seconds  # noqa: SLF001 - its own class
        return other

    def create(self, key: str, record: Record) -> bool:
        """Write a record if the key is free.

        True also where an equal record is there: it holds the unique id of its operation, so it is this very write,
        whose reply was lost. False where another record is there.
        """
        check_key(key)
        body = record.to_bytes().decode()
        return patiently(lambda: self._create_once(key, body), self._patience)

    def _create_once(self, key: str, body: str) -> bool:
        row = {"key": key, "body": body, "size": len(body.encode())}
        if self._database.run("create", key, lambda connection: connection.execute(_CREATE, row).rowcount == 1):
            return True
        stored = self._read(key)
        if stored is None:
            message = f"The record {self.url}/{key} was refused as present, and is gone."
            raise StoreUnavailableError(message, store=self.url, key=key)
        return stored == body

    def _read(self, key: str) -> str | None:
        body: str | None = self._database.run(
            "read", key, lambda connection: connection.execute(_GET, {"key": key}).scalar()
        )
        return body

    def get(self, key: str, kind: type[R]) -> R | None:
        """Return a record, or None where there is none.

        Raises:
            SchemaVersionError: A newer version of the library wrote it.
            IntegrityError: It is no such record.
        """
        check_key(key)
        body = patiently(lambda: self._read(key), self._patience)
        if body is None:
            return None
        try:
            record: R = kind.from_bytes(body.encode(), f"{self.url}/{key}")
        except SchemaVersionError:
            raise
        except IntegrityError as error:
            advice = "Restore this row of resilient_records from a backup, or delete all of its folder to begin anew."
            raise IntegrityError(f"{error} {advice}") from error
        return record

    def delete(self, keys: Sequence[str]) -> None:
        """Delete exactly these keys. One that is not there is no error."""
        doomed = [check_key(key) for key in keys]
        for start in range(0, len(doomed), _KEYS_PER_DELETE):
            self._delete_some(doomed[start : start + _KEYS_PER_DELETE])

    def _delete_some(self, keys: Sequence[str]) -> None:
        def delete(connection: sa.Connection) -> None:
            connection.execute(_DELETE, {"keys": keys})

        patiently(lambda: self._database.run("delete", keys[0], delete), self._patience)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return what is under a prefix that ends in ``/``, or everything under "", in bytewise order of key."""
        check_prefix(prefix)
        statement, bounds = (_LIST, {"first": prefix, "after": prefix[:-1] + "0"}) if prefix else (_LIST_ALL, {})
        rows = patiently(
            lambda: self._database.run("list", prefix, lambda connection: connection.execute(statement, bounds).all()),
            self._patience,
        )
        return [ObjectInfo(key, size, _moment(created_at)) for key, size, created_at in rows]


def _moment(created_at: datetime | str) -> datetime:
    """SQLite has no type for times: it holds ISO 8601 as text."""
    moment = datetime.fromisoformat(created_at) if isinstance(created_at, str) else created_at
    return moment.astimezone(UTC)
