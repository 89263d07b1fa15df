"""Lists of objects with sizes and checksums. A manifest comes after its objects; a log entry holds or names it last.

Nothing is read through a manifest without its BLAKE3 digest being checked, so a flipped, torn or swapped object is an
`IntegrityError`, never a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pydantic
from blake3 import blake3

from dagster_resilient.errors import ConfigurationError, IntegrityError, ObjectNotFoundError, SchemaVersionError
from dagster_resilient.storage.object_store import Buffer, ObjectStore, as_buffers

SCHEMA_VERSION = 1
_DOCUMENT = pydantic.TypeAdapter(dict[str, Any])
_MANIFEST = "manifest.json"
_SEALED = re.compile(rb'\{"seal":"([0-9a-f]{32})",')
_INLINE = 4096
_BLOCK = 64 * 1024 * 1024
_LARGE = 8 * 1024 * 1024  # bytes from which a thread more is worth its start


class Record(pydantic.BaseModel):
    """Base of everything we store as JSON: frozen, with a schema version that refuses what is newer than this code.

    The JSON begins with a seal, the BLAKE3 digest of all behind it: a flipped bit in a log entry would else name
    another object, or hide a commit.

    Attributes:
        schema_version: Version of the form.
        sealed: Whether the form must carry its seal.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    schema_version: int = SCHEMA_VERSION
    sealed: ClassVar[bool] = True

    def to_bytes(self) -> bytes:
        """Return the JSON form."""
        whole = self.model_dump_json().encode()
        return b'{"seal":"%s",%s' % (_seal(whole), whole[1:]) if self.sealed else whole

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Any:
        """Read the JSON form.

        Args:
            raw: The bytes.
            where: URL of the object, for the message.

        Raises:
            SchemaVersionError: A newer version of the library wrote it.
            IntegrityError: It is no such record, or its bytes were changed.
        """
        try:
            document = _DOCUMENT.validate_json(raw)
            newer = int(document.get("schema_version", 0)) > SCHEMA_VERSION
            record = None if newer else cls.model_validate_json(_unsealed(raw) if cls.sealed else raw)
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"{where} is not a valid {cls.__name__}: {_reason(error)}.") from error
        if record is None:
            raise SchemaVersionError(
                f"{where} has schema version {document['schema_version']}; this library reads up to {SCHEMA_VERSION}. "
                "Upgrade dagster-resilient."
            )
        return record


def _reason(error: Exception) -> str:
    """Say in one line what is wrong; pydantic's own text has several, and a link to its manual."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return ": ".join([*(str(part) for part in first["loc"]), first["msg"]])
    return (str(error).splitlines() or [type(error).__name__])[0]


def _seal(whole: bytes) -> bytes:
    return blake3(whole).hexdigest(length=16).encode()


def _unsealed(raw: bytes) -> bytes:
    match = _SEALED.match(raw)
    whole = b"{" + raw[match.end() :] if match else b""
    if match is None or _seal(whole) != match[1]:
        raise ValueError("its bytes do not match their seal: they were damaged, or changed by hand")
    return whole


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

    @property
    def checksum(self) -> str:
        """BLAKE3 digest, in hex, of its JSON form, which holds the digests of all objects."""
        return blake3(self.to_bytes()).hexdigest()


ManifestRef = StoredObject | Manifest


def put_object(store: ObjectStore, key: str, buffers: Buffer | Iterable[Buffer]) -> StoredObject:
    """Write an object, then ask the store what it has, before anything names it.

    The size is always asked for. Where the store does not check what arrives (`ObjectStore.checks_bodies`), the bytes
    are read back too: what we sent says nothing about what it kept.

    Raises:
        IntegrityError: It has another size or other bytes.
    """
    views = as_buffers(buffers)
    size = sum(view.nbytes for view in views)
    digest = _put_and_digest(store, key, views, size)
    kept = store.head(key).size
    if kept != size:
        raise IntegrityError(f"{store.url}/{key} has {kept} bytes after a write of {size}.")
    if not store.checks_bodies and _digest_of(store, key, size) != digest:
        raise IntegrityError(
            f"{store.url}/{key} has other bytes than were written to it, of the same number. Try again; if it stays "
            "so, look for the fault in the store or on the way to it."
        )
    return StoredObject(key=key, size=size, blake3=digest)


def _put_and_digest(store: ObjectStore, key: str, views: Sequence[memoryview], size: int) -> str:
    """Hash beside the write, which waits for the disk or the network most of the time. Both let other threads run."""
    if size < _LARGE:
        digest = _digest(views)
        store.put(key, views)
        return digest
    with ThreadPoolExecutor(1, "checksum") as beside:
        hashing = beside.submit(_digest, views)
        store.put(key, views)
        return hashing.result()


def _digest(views: Iterable[memoryview]) -> str:
    """One thread: blake3's own pool (`AUTO`) is left without threads by a fork, and then hangs."""
    digest = blake3()
    for view in views:
        digest.update(view)
    return digest.hexdigest()


def _digest_of(store: ObjectStore, key: str, size: int) -> str:
    """Read an object back in blocks, so that a large one is never in memory twice."""
    digest = blake3()
    for start in range(0, size, _BLOCK):
        digest.update(store.get_ranges(key, [(start, min(start + _BLOCK, size))])[0])
    return digest.hexdigest()


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


def write_objects(
    store: ObjectStore, prefix: str, codec: str, parts: Mapping[str, Sequence[Buffer]], meta: Mapping[str, Any]
) -> Manifest:
    """Write the objects of a value under a prefix of its own. Nothing is visible yet.

    Args:
        store: Where to.
        prefix: A prefix that no other write uses, ending in no slash.
        codec: Name and version of the codec.
        parts: Buffers by role; the role is the object's file name.
        meta: JSON for the codec.

    Returns:
        The manifest that lists them.
    """
    if _MANIFEST in parts:
        raise ConfigurationError(f"The codec {codec} gives an object the role {_MANIFEST!r}, the name of the manifest.")
    objects = {role: put_object(store, f"{prefix}/{role}", buffers) for role, buffers in parts.items()}
    return Manifest(codec=codec, objects=objects, meta=dict(meta))


def write_manifest(store: ObjectStore, prefix: str, manifest: Manifest) -> StoredObject:
    """Write a manifest beside its objects; return its key, size and digest: what a log entry names to commit it."""
    return put_object(store, f"{prefix}/{_MANIFEST}", [manifest.to_bytes()])


def named_manifest(store: ObjectStore, prefix: str, manifest: Manifest) -> ManifestRef:
    """Return what a log entry holds to commit a value: its manifest if that is small, else the name of one written.

    A small one in the entry saves two requests at each write, one at each read, and half of every listing.
    """
    small = len(manifest.to_bytes()) <= _INLINE
    return manifest if small else write_manifest(store, prefix, manifest)


def read_manifest(store: ObjectStore, named: ManifestRef) -> Manifest:
    """Return the manifest that a log entry holds, or read and check the one that it names."""
    if isinstance(named, Manifest):
        return named
    manifest: Manifest = Manifest.from_bytes(get_object(store, named), f"{store.url}/{named.key}")
    return manifest


def objects_present(store: ObjectStore, named: ManifestRef) -> bool:
    """Whether the manifest and all objects it lists are there with their sizes. Contents are checked when loaded."""
    try:
        manifest = read_manifest(store, named)
        return all(store.head(part.key).size == part.size for part in manifest.objects.values())
    except SchemaVersionError:
        raise  # it is there; to call it absent would be to compute it again over what a newer version keeps
    except (ObjectNotFoundError, IntegrityError):
        return False
