"""Store a value as one task's materialization, and load it again: codec, manifest, log entry."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

from dagster_resilient import codecs
from dagster_resilient.errors import IntegrityError, UnsupportedValueError, ValueNotFoundError
from dagster_resilient.state.index import FEW, heads
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import ValueRef
from dagster_resilient.state.store import ObjectRecords, RecordStore
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import (
    Manifest,
    ManifestRef,
    get_object,
    named_manifest,
    objects_present,
    read_manifest,
    write_objects,
)
from dagster_resilient.storage.object_store import ObjectStore

T = TypeVar("T")
K = TypeVar("K")

_READERS = 16
_NAMED = 10


@dataclass(frozen=True)
class StoredValue:
    """A committed value.

    Attributes:
        uri: URL under which its objects lie.
        codec: Name and version of the codec.
        size: Bytes of its objects.
        checksum: BLAKE3 digest of its manifest, which holds the digests of the objects.
        seconds: Time to encode, write and commit.
        summary: What people are shown of it, for a table.
    """

    uri: str
    codec: str
    size: int
    checksum: str
    seconds: float
    summary: codecs.Summary | None = None


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
        summary=encoded.summary,
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
            "Materialize it first, or save it in its script."
        )
    return head.value


def load_value(
    store: ObjectStore,
    asset: tuple[str, ...],
    partition_key: str | None,
    expected: type[T] | None = None,
    records: RecordStore | None = None,
    *,
    wanted: Any = None,
) -> T:
    """Load the current materialization, every byte verified.

    Args:
        store: Where it was stored.
        asset: Parts of the asset key.
        partition_key: The partition, None for an unpartitioned asset.
        expected: Type that the value must have; None: any. A table comes as any class of tables; see `codecs.views`.
        records: Where the state is kept; by default beside the data.
        wanted: An annotation, which may name such a class, and demands nothing.

    Raises:
        ValueNotFoundError: Nothing was committed.
        IntegrityError: Objects are missing or damaged. Names the asset, the partition and the object.
        UnsupportedValueError: The value has another type than expected.
    """
    found = find_value(store, asset, partition_key, records)
    value = _load_found(store, task_name(asset, partition_key), found, expected or wanted)
    if expected is not None and not isinstance(value, expected):
        raise UnsupportedValueError(
            f"{task_name(asset, partition_key)} holds {type(value).__name__}, not {expected.__name__} "
            f"({found.location})."
        )
    return value  # type: ignore[no-any-return]


def load_values(
    store: ObjectStore,
    asset: tuple[str, ...],
    partition_keys: Sequence[str],
    records: RecordStore | None = None,
    *,
    wanted: Any = None,
) -> dict[str, Any]:
    """Load the current materializations of partitions, in their order, several at a time.

    Args:
        store: Where they were stored.
        asset: Parts of the asset key.
        partition_keys: The partitions.
        records: Where the state is kept; by default beside the data.
        wanted: An annotation, which may name a class of tables; see `codecs.views`.

    Raises:
        ValueNotFoundError: Partitions were never committed. Names them, before anything is loaded.
        IntegrityError: Objects are missing or damaged. Names the asset, the partition and the object.
    """
    found = _find_values(store, asset, partition_keys, records or ObjectRecords(store))
    with ThreadPoolExecutor(min(_READERS, max(len(found), 1))) as pool:
        loaded = pool.map(lambda key: _load_found(store, task_name(asset, key), found[key], wanted), found)
        return dict(zip(found, loaded, strict=True))


def _find_values(
    store: ObjectStore, asset: tuple[str, ...], partition_keys: Sequence[str], records: RecordStore
) -> dict[str, ValueRef]:
    known = heads(records, store, asset, partition_keys)
    current = {key: known.get(keys.partition_segment(key)) for key in partition_keys}
    found = {key: head.value for key, head in current.items() if head is not None and head.value is not None}
    missing = [key for key in partition_keys if key not in found]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ValueNotFoundError(
            f"{task_name(asset, None)}: {len(missing)} of {len(partition_keys)} partitions are not materialized: "
            f"{', '.join(missing[:_NAMED])}{more}. Nothing was committed for them under "
            f"{records.url}/{keys.asset_prefix(asset)}log. Materialize them first."
        )
    return found


def _load_found(store: ObjectStore, name: str, found: ValueRef, wanted: Any) -> Any:
    try:
        manifest = read_manifest(store, found.manifest)
        parts = {role: get_object(store, stored) for role, stored in manifest.objects.items()}
    except IntegrityError as error:
        raise IntegrityError(f"{name}: {error} Compute and store it again (in Dagster, materialize it).") from error
    return codecs.decode(manifest.codec, parts, manifest.meta, wanted)


def present_values(store: ObjectStore, asset: tuple[str, ...], values: Mapping[K, ValueRef]) -> dict[K, ValueRef]:
    """Return the values of an asset's partitions whose objects are there: by one listing where they are many.

    What the listing lacks is asked for by name before it counts as lost: a listing that races with deletes can lack
    what is there. So is what only a manifest in the store lists.
    """
    infos = store.list(f"{keys.asset_prefix(asset)}data/") if len(values) > FEW else ()
    sizes = {info.key: info.size for info in infos}

    def is_present(value: ValueRef) -> bool:
        return _is_listed(sizes, value.manifest) or objects_present(store, value.manifest)

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(compress(values.items(), pool.map(is_present, values.values())))


def _is_listed(sizes: Mapping[str, int], named: ManifestRef) -> bool:
    return isinstance(named, Manifest) and all(sizes.get(part.key) == part.size for part in named.objects.values())
