"""Small records under keys: create, get, list, delete. All of the state layer sits on these four."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from dagster_resilient.errors import IntegrityError, ObjectExistsError, ObjectNotFoundError, SchemaVersionError
from dagster_resilient.storage.manifest import Record
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore

R = TypeVar("R", bound=Record)


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
