"""A tree of Python values, arrays and tensors as two objects: a document, and a pack of what it refers to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster_resilient.codecs.codec import Encoded, part
from dagster_resilient.codecs.documents import decode_document, encode_document
from dagster_resilient.codecs.tensors import PackReader, PackWriter
from dagster_resilient.storage.object_store import Buffer

DOCUMENT = "document/1"
DOCUMENT_PART, TENSORS_PART = "document.json", "tensors.safetensors"


def encode_tree(value: Any, codec: str = DOCUMENT) -> Encoded:
    """Encode a tree as one JSON document and, where it holds tensors or arrays, one safetensors object."""
    pack = PackWriter()
    parts: dict[str, list[Buffer]] = {DOCUMENT_PART: [encode_document(value, pack)]}
    tensors = pack.buffers()
    return Encoded(codec, parts | {TENSORS_PART: tensors} if tensors else parts)


def decode_tree(parts: Mapping[str, bytes]) -> Any:
    """Decode what `encode_tree` made."""
    return decode_document(part(parts, DOCUMENT_PART), PackReader(parts.get(TENSORS_PART)))
