"""The codecs that come with the library. The first that takes a value stores it; a document takes all that is left."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from dagster_resilient.codecs import arrow, polars_frames
from dagster_resilient.codecs.codec import Codec, Encoded, part
from dagster_resilient.codecs.models import ModelCodec
from dagster_resilient.codecs.tables import decode_frame, encode_frame, summary_of
from dagster_resilient.codecs.trees import DOCUMENT, decode_tree, encode_tree
from dagster_resilient.codecs.views import view_for
from dagster_resilient.errors import UnsupportedValueError

NONE, BYTES, FRAME = "none/1", "bytes/1", "pandas-parquet/1"
BYTES_PART, FRAME_PART = "value.bin", "table.parquet"


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


class TableCodec(Codec):
    """A table, which comes as another library's where that is wanted; see `views`."""

    @abstractmethod
    def own_class(self, meta: Mapping[str, Any]) -> tuple[str, str]:
        """Return package and name of the class that `decode` gives: it alone comes back equal."""

    def decode_as(self, wanted: Any, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:
        """See `Codec`."""
        view = view_for(wanted, parts)
        if view is None or _is_class(wanted, *self.own_class(meta)):
            return self.decode(name, parts, meta)
        return view()


class PandasCodec(TableCodec):
    """pandas frames as Parquet; see `tables`."""

    names = (FRAME,)

    def takes(self, value: Any) -> bool:
        """Whether it is of pandas; the kinds that cannot be stored are refused with advice, in `encode`."""
        pandas = sys.modules.get("pandas")
        return pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index))

    def own_class(self, meta: Mapping[str, Any]) -> tuple[str, str]:  # noqa: ARG002
        """See `TableCodec`."""
        return "pandas", "DataFrame"

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


class ArrowCodec(TableCodec):
    """pyarrow tables and record batches, as Parquet or Arrow IPC; see `arrow`."""

    names = tuple(arrow.PARTS)

    def takes(self, value: Any) -> bool:
        """Whether it is of pyarrow; the kinds that cannot be stored are refused with advice, in `encode`."""
        return arrow.is_arrow(value)

    def own_class(self, meta: Mapping[str, Any]) -> tuple[str, str]:
        """See `TableCodec`."""
        return "pyarrow", "RecordBatch" if meta.get("batch") else "Table"

    def encode(self, value: Any) -> Encoded:
        """See `Codec`."""
        name, buffers, meta = arrow.encode_table(value)
        return Encoded(name, {arrow.PARTS[name]: buffers}, meta, arrow.summary_of(value))

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:
        """See `Codec`."""
        return arrow.decode_table(name, part(parts, arrow.PARTS[name]), meta)


class PolarsCodec(TableCodec):
    """polars frames and series, as Parquet or Arrow IPC; see `polars_frames`."""

    names = tuple(polars_frames.PARTS)

    def takes(self, value: Any) -> bool:
        """Whether it is of polars; the kinds that cannot be stored are refused with advice, in `encode`."""
        return polars_frames.is_polars(value)

    def own_class(self, meta: Mapping[str, Any]) -> tuple[str, str]:
        """See `TableCodec`."""
        return "polars", "Series" if "series" in meta else "DataFrame"

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


BUILT_IN: tuple[Codec, ...] = (
    NoneCodec(),
    BytesCodec(),
    PandasCodec(),
    ArrowCodec(),
    PolarsCodec(),
    ModelCodec(),
    DocumentCodec(),
)
