"""Small records under keys: create, get, list, delete. All of the state layer sits on these four."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, TypeVar

from dagster_resilient.errors import (
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    SchemaVersionError,
    StorageError,
)
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Record
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore
from dagster_resilient.storage.retry import hasty

R = TypeVar("R", bound=Record)

_log = logging.getLogger(__name__)
_NOTICE_PATIENCE = 5.0


class RecordStore(Protocol):
    """Where records are kept. `create` is decided by the store, never by a look before the write."""

    url: str

    def create(self, key: str, record: Record) -> bool:
        """Write a record if the key is free. True also where an equal record is there: then it was ours."""

    def get(self, key: str, kind: type[R]) -> R | None:
        """Return a record, or None where there is none."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return what is under a prefix that ends in ``/``, in order of key."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete exactly these keys."""


class ObjectRecords:
    """Records as JSON objects in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.url = store.url

    def with_patience(self, seconds: float) -> ObjectRecords:
        """Return the same records over the same store with another patience; see `retry.hasty`."""
        return ObjectRecords(hasty(self._store, seconds))

    def create(self, key: str, record: Record) -> bool:
        """Write a record if the key is free.

        A record holds the unique id of its operation, so an object with equal bytes is this very write, whose reply was
        lost: the retrying store reports that as success.
        """
        try:
            self._store.create(key, record.to_bytes())
        except ObjectExistsError:
            return False
        return True

    def get(self, key: str, kind: type[R]) -> R | None:
        """Return a record, or None where there is none."""
        try:
            raw = self._store.get(key)
        except ObjectNotFoundError:
            return None
        where = f"{self.url}/{key}"
        try:
            record: R = kind.from_bytes(raw, where)
        except SchemaVersionError:
            raise
        except IntegrityError as error:
            advice = "Restore this object from a backup, or delete all of its folder to begin anew."
            raise IntegrityError(f"{error} {advice}") from error
        return record

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return what is under a prefix, in order of key."""
        return list(self._store.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete exactly these keys."""
        self._store.delete(keys)


def state_tag(records: RecordStore) -> str:
    """Return the name that writes carry whose state these records keep: "" for records in the store itself."""
    return "" if isinstance(records, ObjectRecords) else keys.state_tag(records.url)


def open_state(url: str | None, notices: ObjectStore) -> RecordStore | None:
    """Open the database that keeps the state, or return None where none is named: then the store keeps it.

    Args:
        url: URL of the database.
        notices: The store that the sidecars watch. They cannot reach a database, so each fence is also put there.

    Raises:
        ConfigurationError: The URL names no database that can keep state.
    """
    if url is None:
        return None
    from dagster_resilient.state.sql_store import open_records  # noqa: PLC0415 - a database loads only when it is used

    return FencesNoticed(open_records(url), notices)


class FencesNoticed:
    """Records in a database, whose fences are also put into the object store.

    The copy lets a sidecar stop its parent early. It decides nothing: every commit asks the database. So a copy that
    cannot be written is no error.
    """

    def __init__(self, records: RecordStore, notices: ObjectStore) -> None:
        self._records, self._notices = records, notices
        self.url = records.url

    def __repr__(self) -> str:
        return repr(self._records)

    def with_patience(self, seconds: float) -> FencesNoticed:
        """Return the same with another patience; see `retry.hasty`."""
        return FencesNoticed(hasty(self._records, seconds), self._notices)

    def create(self, key: str, record: Record) -> bool:
        """Write a record if the key is free."""
        created = self._records.create(key, record)
        if keys.is_fence_key(key):
            # Also where it stood before: who wrote it may have died before its copy was there.
            self._notice(key, record if created else self._records.get(key, type(record)))
        return created

    def _notice(self, key: str, fence: Record | None) -> None:
        if fence is None:
            return
        try:
            hasty(self._notices, _NOTICE_PATIENCE).put(key, fence.to_bytes())
        except StorageError as error:
            _log.warning("The fence %s stands, but its sidecars cannot be told: %s", key, error)

    def get(self, key: str, kind: type[R]) -> R | None:
        """Return a record, or None where there is none."""
        return self._records.get(key, kind)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return what is under a prefix, in order of key."""
        return self._records.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete exactly these keys."""
        self._records.delete(keys)
