"""Lists of objects with sizes and checksums. The manifest is written after its objects, and named by a log entry last.

Nothing is read through a manifest without its BLAKE3 digest being checked, so a flipped, torn or swapped object is an
`IntegrityError`, never a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic
from blake3 import blake3

from dagster_resilient.errors import ConfigurationError, IntegrityError, ObjectNotFoundError, SchemaVersionError
from dagster_resilient.storage.object_store import Buffer, ObjectStore, as_buffers

SCHEMA_VERSION = 1
_DOCUMENT = pydantic.TypeAdapter(dict[str, Any])
_MANIFEST = "manifest.json"


class Record(pydantic.BaseModel):
    """Base of everything we store as JSON: frozen, with a schema version that refuses what is newer than this code."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    schema_version: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """Return the JSON form."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Any:
        """Read the JSON form.

        Args:
            raw: The bytes.
            where: URL of the object, for the message.

        Raises:
            SchemaVersionError: A newer version of the library wrote it.
            IntegrityError: It is no such record.
        """
        try:
            document = _DOCUMENT.validate_json(raw)
            newer = int(document.get("schema_version", 0)) > SCHEMA_VERSION
            record = None if newer else cls.model_validate_json(raw)
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"{where} is not a valid {cls.__name__}: {error}") from error
        if record is None:
            raise SchemaVersionError(
                f"{where} has schema version {document['schema_version']}; this library reads up to {SCHEMA_VERSION}. "
                "Upgrade dagster-resilient."
            )
        return record


class StoredObject(Record):
    """One object: its key, its size in bytes and the BLAKE3 digest of its bytes in hex."""

    key: str
    size: int
    blake3: str


class Manifest(Record):
    """What a value or a checkpoint consists of.

    Attributes:
        codec: Name of the codec that wrote the objects, with its version, such as ``pandas-parquet/1``.
        objects: Objects by the role they have for the codec.
        meta: JSON that the codec needs to read them back.
    """

    codec: str
    objects: dict[str, StoredObject]
    meta: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """Bytes of all objects together."""
        return sum(stored.size for stored in self.objects.values())


def put_object(store: ObjectStore, key: str, buffers: Buffer | Iterable[Buffer]) -> StoredObject:
    """Write an object, then ask the store what it has: a size that differs is an error before anything names it."""
    digest, size, views = blake3(), 0, as_buffers(buffers)
    for view in views:
        digest.update(view)
        size += view.nbytes
    store.put(key, views)
    kept = store.head(key).size
    if kept != size:
        raise IntegrityError(f"{store.url}/{key} has {kept} bytes after a write of {size}.")
    return StoredObject(key=key, size=size, blake3=digest.hexdigest())


def get_object(store: ObjectStore, stored: StoredObject) -> bytes:
    """Read an object and check it.

    Raises:
        IntegrityError: The object is gone, or its size or digest differs.
    """
    where = f"{store.url}/{stored.key}"
    try:
        raw = store.get(stored.key)
    except ObjectNotFoundError as error:
        raise IntegrityError(f"{where} is listed in a manifest, but the object is missing.") from error
    if len(raw) != stored.size or blake3(raw).hexdigest() != stored.blake3:
        raise IntegrityError(
            f"{where} is damaged: its {len(raw)} bytes do not have the size and checksum of its manifest."
        )
    return raw


def write_manifest(
    store: ObjectStore, prefix: str, codec: str, parts: Mapping[str, Sequence[Buffer]], meta: Mapping[str, Any]
) -> StoredObject:
    """Write the objects of a value under a prefix of its own, then the manifest. Nothing is visible yet.

    Args:
        store: Where to.
        prefix: A prefix that no other write uses, ending in no slash.
        codec: Name and version of the codec.
        parts: Buffers by role; the role is the object's file name.
        meta: JSON for the codec.

    Returns:
        The manifest's own key, size and digest: what a log entry names to commit it.
    """
    if _MANIFEST in parts:
        raise ConfigurationError(f"The codec {codec} gives an object the role {_MANIFEST!r}, the name of the manifest.")
    objects = {role: put_object(store, f"{prefix}/{role}", buffers) for role, buffers in parts.items()}
    manifest = Manifest(codec=codec, objects=objects, meta=dict(meta))
    return put_object(store, f"{prefix}/{_MANIFEST}", [manifest.to_bytes()])


def read_manifest(store: ObjectStore, named: StoredObject) -> Manifest:
    """Read and check the manifest that a log entry names."""
    manifest: Manifest = Manifest.from_bytes(get_object(store, named), f"{store.url}/{named.key}")
    return manifest


def objects_present(store: ObjectStore, named: StoredObject) -> bool:
    """Whether the manifest and all objects it lists are there with their sizes. Contents are checked when loaded."""
    try:
        manifest = read_manifest(store, named)
        return all(store.head(part.key).size == part.size for part in manifest.objects.values())
    except SchemaVersionError:
        raise  # it is there; to call it absent would be to compute it again over what a newer version keeps
    except (ObjectNotFoundError, IntegrityError):
        return False
