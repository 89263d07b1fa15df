"""Picks the codec for a value by its type, and for stored objects by the name in their manifest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dagster_resilient.codecs.documents import decode_document, encode_document
from dagster_resilient.codecs.tables import decode_frame, encode_frame
from dagster_resilient.codecs.tensors import PackReader, PackWriter
from dagster_resilient.errors import IntegrityError, SchemaVersionError, UnsupportedValueError
from dagster_resilient.storage.object_store import Buffer

NONE, BYTES, FRAME, DOCUMENT = "none/1", "bytes/1", "pandas-parquet/1", "document/1"
BYTES_PART, FRAME_PART = "value.bin", "table.parquet"
DOCUMENT_PART, TENSORS_PART = "document.json", "tensors.safetensors"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value in the form in which it is stored.

    The buffers are the value's own memory where that is possible: write them before the value is changed again.

    Attributes:
        codec: Name and version of the codec.
        parts: Buffers of each object, by its role, which is its file name too.
        meta: JSON that the codec needs to decode, kept in the manifest.
    """

    codec: str
    parts: dict[str, list[Buffer]]
    meta: dict[str, Any] = field(default_factory=dict)


def encode(value: Any) -> Encoded:
    """Encode a value: None, bytes, a pandas DataFrame, or a tree of Python values, numpy arrays and torch tensors.

    Raises:
        UnsupportedValueError: It would not come back equal in value and type. Names the path or the column.
    """
    if value is None:
        return Encoded(NONE, {})
    if type(value) is bytes:
        return Encoded(BYTES, {BYTES_PART: [value]})
    if _is_pandas(value):
        return _encode_pandas(value)
    return encode_tree(value)


def encode_tree(value: Any, codec: str = DOCUMENT) -> Encoded:
    """Encode a tree as one JSON document and, where it holds tensors or arrays, one safetensors object."""
    pack = PackWriter()
    parts: dict[str, list[Buffer]] = {DOCUMENT_PART: [encode_document(value, pack)]}
    tensors = pack.buffers()
    return Encoded(codec, parts | {TENSORS_PART: tensors} if tensors else parts)


def decode_tree(parts: Mapping[str, bytes]) -> Any:
    """Decode what `encode_tree` made."""
    return decode_document(_part(parts, DOCUMENT_PART), PackReader(parts.get(TENSORS_PART)))


def decode(codec: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:
    """Return the value of verified objects.

    Args:
        codec: From the manifest.
        parts: The bytes of each object by role.
        meta: From the manifest.

    Raises:
        SchemaVersionError: This version of the library does not know the codec.
        IntegrityError: The objects are not what the codec writes.
    """
    decoders: dict[str, Callable[[], Any]] = {
        NONE: lambda: None,
        BYTES: lambda: _part(parts, BYTES_PART),
        FRAME: lambda: decode_frame(_part(parts, FRAME_PART), meta),
        DOCUMENT: lambda: decode_tree(parts),
    }
    if codec not in decoders:
        raise SchemaVersionError(
            f"The value was stored by the codec {codec!r}; this version knows {', '.join(decoders)}. "
            "Upgrade dagster-resilient."
        )
    return decoders[codec]()


def _part(parts: Mapping[str, bytes], role: str) -> bytes:
    if role not in parts:
        raise IntegrityError(f"The manifest lists no object {role!r}, which its codec needs.")
    return parts[role]


def _is_pandas(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index))


def _encode_pandas(value: Any) -> Encoded:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value) is not sys.modules["pandas"].DataFrame:
        raise UnsupportedValueError(
            f"The value is a {kind}; of pandas only a plain DataFrame can be stored. Convert it to one."
        )
    raw, meta = encode_frame(value)
    return Encoded(FRAME, {FRAME_PART: [raw]}, meta)
