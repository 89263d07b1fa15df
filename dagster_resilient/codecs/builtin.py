"""The codecs that come with the library. The first that takes a value stores it; a document takes all that is left."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dagster_resilient.codecs import arrow, polars_frames
from dagster_resilient.codecs.codec import Codec, Encoded, part
from dagster_resilient.codecs.documents import decode_document, encode_document
from dagster_resilient.codecs.tables import decode_frame, encode_frame, summary_of
from dagster_resilient.codecs.tensors import PackReader, PackWriter
from dagster_resilient.errors import UnsupportedValueError
from dagster_resilient.storage.object_store import Buffer

NONE, BYTES, FRAME, DOCUMENT = "none/1", "bytes/1", "pandas-parquet/1", "document/1"
BYTES_PART, FRAME_PART = "value.bin", "table.parquet"
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


def _is_class(wanted: Any, package: str, name: str) -> bool:
    module = sys.modules.get(package)
    return module is not None and wanted is getattr(module, name)


class NoneCodec(Codec):
    """`None`: a manifest without objects."""

    names = (NONE,)
    types = (type(None),)

    def encode(self, value: None) -> Encoded:  # noqa: ARG002 - the interface's
        """See `Codec`."""
        return Encoded(NONE, {})

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """See `Codec`."""


class BytesCodec(Codec):
    """Bytes as they are."""

    names = (BYTES,)
    types = (bytes,)

    def encode(self, value: bytes) -> Encoded:
        """See `Codec`."""
        return Encoded(BYTES, {BYTES_PART: [value]})

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> bytes:  # noqa: ARG002
        """See `Codec`."""
        return part(parts, BYTES_PART)


class PandasCodec(Codec):
    """pandas frames as Parquet; see `tables`."""

    names = (FRAME,)

    def takes(self, value: Any) -> bool:
        """Whether it is of pandas; the kinds that cannot be stored are refused with advice, in `encode`."""
        pandas = sys.modules.get("pandas")
        return pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index))

    def gives(self, wanted: Any, meta: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """See `Codec`."""
        return _is_class(wanted, "pandas", "DataFrame")

    def encode(self, value: Any) -> Encoded:
        """See `Codec`."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if type(value) is not sys.modules["pandas"].DataFrame:
            raise UnsupportedValueError(
                f"The value is a {kind}; of pandas only a plain DataFrame can be stored. Convert it to one."
            )
        raw, meta = encode_frame(value)
        return Encoded(FRAME, {FRAME_PART: [raw]}, meta, summary_of(value))

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """See `Codec`."""
        return decode_frame(part(parts, FRAME_PART), meta)


class ArrowCodec(Codec):
    """pyarrow tables and record batches, as Parquet or Arrow IPC; see `arrow`."""

    names = tuple(arrow.PARTS)

    def takes(self, value: Any) -> bool:
        """Whether it is of pyarrow; the kinds that cannot be stored are refused with advice, in `encode`."""
        return arrow.is_arrow(value)

    def gives(self, wanted: Any, meta: Mapping[str, Any]) -> bool:
        """See `Codec`."""
        return _is_class(wanted, "pyarrow", "RecordBatch" if meta.get("batch") else "Table")

    def encode(self, value: Any) -> Encoded:
        """See `Codec`."""
        name, buffers, meta = arrow.encode_table(value)
        return Encoded(name, {arrow.PARTS[name]: buffers}, meta, arrow.summary_of(value))

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:
        """See `Codec`."""
        return arrow.decode_table(name, part(parts, arrow.PARTS[name]), meta)


class PolarsCodec(Codec):
    """polars frames and series, as Parquet or Arrow IPC; see `polars_frames`."""

    names = tuple(polars_frames.PARTS)

    def takes(self, value: Any) -> bool:
        """Whether it is of polars; the kinds that cannot be stored are refused with advice, in `encode`."""
        return polars_frames.is_polars(value)

    def gives(self, wanted: Any, meta: Mapping[str, Any]) -> bool:
        """See `Codec`."""
        return _is_class(wanted, "polars", "Series" if "series" in meta else "DataFrame")

    def encode(self, value: Any) -> Encoded:
        """See `Codec`."""
        name, buffers, meta = polars_frames.encode_polars(value)
        return Encoded(name, {polars_frames.PARTS[name]: buffers}, meta, polars_frames.summary_of(value))

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:
        """See `Codec`."""
        return polars_frames.decode_polars(name, part(parts, polars_frames.PARTS[name]), meta)


class DocumentCodec(Codec):
    """Trees of Python values, numpy arrays and torch tensors; see `documents` and `tensors`."""

    names = (DOCUMENT,)

    def takes(self, value: Any) -> bool:  # noqa: ARG002
        """Everything: it is the last one, and its refusals name the path."""
        return True

    def encode(self, value: Any) -> Encoded:
        """See `Codec`."""
        return encode_tree(value)

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """See `Codec`."""
        return decode_tree(parts)


BUILT_IN: tuple[Codec, ...] = (NoneCodec(), BytesCodec(), PandasCodec(), ArrowCodec(), PolarsCodec(), DocumentCodec())
