"""Store a value as one task's materialization, and load it again: codec, manifest, log entry."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeVar

from dagster_resilient import codecs
from dagster_resilient.errors import IntegrityError, UnsupportedValueError, ValueNotFoundError
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import ValueRef
from dagster_resilient.state.store import ObjectRecords, RecordStore
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import get_object, named_manifest, read_manifest, write_objects
from dagster_resilient.storage.object_store import ObjectStore

T = TypeVar("T")


@dataclass(frozen=True)
class StoredValue:
    """A committed value.

    Attributes:
        uri: URL under which its objects lie.
        codec: Name and version of the codec.
        size: Bytes of its objects.
        checksum: BLAKE3 digest of its manifest, which holds the digests of the objects.
        seconds: Time to encode, write and commit.
    """

    uri: str
    codec: str
    size: int
    checksum: str
    seconds: float


def task_name(asset: tuple[str, ...], partition_key: str | None) -> str:
    """Return an asset partition as messages name it."""
    name = "/".join(asset)
    return name if partition_key is None else f"{name}[{partition_key}]"


def store_value(task: DurableTask, value: Any) -> StoredValue:
    """Encode a value, write its objects, then its manifest, then commit it.

    Raises:
        UnsupportedValueError: No codec can store it exactly. Nothing was written; the previous value stands.
        FencedError: This try was superseded. The previous or the successor's value stands.
    """
    begun = time.monotonic()
    try:
        encoded = codecs.encode(value)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{task}: {error}") from error
    task.check_fenced()
    location = task.data_prefix()
    manifest = write_objects(task.store, location, encoded.codec, encoded.parts, encoded.meta)
    task.commit_value(named_manifest(task.store, location, manifest), location)
    return StoredValue(
        uri=f"{task.store.url}/{location}",
        codec=encoded.codec,
        size=manifest.size,
        checksum=manifest.checksum,
        seconds=time.monotonic() - begun,
    )


def find_value(
    store: ObjectStore, asset: tuple[str, ...], partition_key: str | None, records: RecordStore | None = None
) -> ValueRef:
    """Return the current materialization.

    Args:
        store: Where the data is kept.
        asset: Parts of the asset key.
        partition_key: The partition, None for an unpartitioned asset.
        records: Where the state is kept; by default beside the data.

    Raises:
        ValueNotFoundError: None was ever committed.
    """
    prefix = keys.task_prefix(asset, partition_key, "log")
    kept = records or ObjectRecords(store)
    head = NumberedLog(kept, prefix).head()
    if head is None or head.value is None:
        raise ValueNotFoundError(
            f"{task_name(asset, partition_key)} is not materialized: nothing was committed under {kept.url}/{prefix}. "
            "Materialize it first."
        )
    return head.value


def load_value(
    store: ObjectStore,
    asset: tuple[str, ...],
    partition_key: str | None,
    expected: type[T] | None = None,
    records: RecordStore | None = None,
) -> T:
    """Load the current materialization, every byte verified.

    Args:
        store: Where it was stored.
        asset: Parts of the asset key.
        partition_key: The partition, None for an unpartitioned asset.
        expected: Type that the value must have; None: any.
        records: Where the state is kept; by default beside the data.

    Raises:
        ValueNotFoundError: Nothing was committed.
        IntegrityError: Objects are missing or damaged. Names the asset, the partition and the object.
        UnsupportedValueError: The value has another type than expected.
    """
    found = find_value(store, asset, partition_key, records)
    name = task_name(asset, partition_key)
    try:
        manifest = read_manifest(store, found.manifest)
        parts = {role: get_object(store, stored) for role, stored in manifest.objects.items()}
    except IntegrityError as error:
        raise IntegrityError(f"{name}: {error} Materialize it again.") from error
    value = codecs.decode(manifest.codec, parts, manifest.meta)
    if expected is not None and not isinstance(value, expected):
        raise UnsupportedValueError(f"{name} holds {type(value).__name__}, not {expected.__name__} ({found.location}).")
    return value  # type: ignore[no-any-return]
