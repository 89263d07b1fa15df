"""A stored table as another library's, or lazily: what the annotation of an input asks for.

All tables lie in the store as one Parquet or Arrow file, which each of the libraries reads. Its own library gets back
what was stored, equal in all that it holds; another one gets what it makes of the file: an index of pandas that is no
range is a column elsewhere.
"""

from __future__ import annotations

import io
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dagster_resilient.codecs.arrow import PARTS
from dagster_resilient.errors import IntegrityError

PARQUET, IPC = PARTS.values()
View = Callable[[bytes, str], Any]


def view_for(wanted: Any, parts: Mapping[str, bytes]) -> Callable[[], Any] | None:
    """Return what reads a stored table as a wanted class; None where no table is stored or wanted.

    Args:
        wanted: The class that an annotation names, or anything else that one can hold.
        parts: The objects of the value.
    """
    role = next((role for role in (PARQUET, IPC) if role in parts), None)
    view = _VIEWS.get(_name_of(wanted))
    if role is None or view is None:
        return None

    def read() -> Any:
        import pyarrow as pa  # noqa: PLC0415 - heavy, and needed only where tables are

        try:
            return view(parts[role], role)
        except pa.ArrowException as error:
            raise IntegrityError(f"The stored table {role} cannot be read: {error}") from error

    return read


def wanted_class(hint: Any) -> Any:
    """Return the class that an annotation names beside `None`; the annotation itself where it names several."""
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        return choices[0] if len(choices) == 1 else hint
    return hint


def _name_of(wanted: Any) -> str:
    """A class by its package and name: their modules are the libraries' own affair. Nothing is imported for it."""
    package = getattr(wanted, "__module__", "").partition(".")[0].removeprefix("_")
    return f"{package}.{getattr(wanted, '__qualname__', '')}"


def _arrow(raw: bytes, role: str) -> Any:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    source = pa.BufferReader(raw)
    return pq.read_table(source) if role == PARQUET else pa.ipc.open_file(source).read_all()


def _batches(raw: bytes, role: str) -> Any:
    """One group of rows after the other is decoded."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    source = pa.BufferReader(raw)
    if role == PARQUET:
        file = pq.ParquetFile(source)
        return pa.RecordBatchReader.from_batches(file.schema_arrow, file.iter_batches())
    opened = pa.ipc.open_file(source)
    batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
    return pa.RecordBatchReader.from_batches(opened.schema, batches)


def _dataset(raw: bytes, role: str) -> Any:
    import pyarrow.dataset as ds  # noqa: PLC0415

    return ds.dataset(_arrow(raw, role))


def _pandas(raw: bytes, role: str) -> Any:
    return _arrow(raw, role).to_pandas()


def _polars(raw: bytes, role: str) -> Any:
    import polars as pl  # noqa: PLC0415

    return pl.read_parquet(io.BytesIO(raw)) if role == PARQUET else pl.read_ipc(io.BytesIO(raw))


def _lazy(raw: bytes, role: str) -> Any:
    """What a query does not ask for is not decoded."""
    import polars as pl  # noqa: PLC0415

    return pl.scan_parquet(io.BytesIO(raw)) if role == PARQUET else pl.scan_ipc(io.BytesIO(raw))


def _duckdb(raw: bytes, role: str) -> Any:
    import duckdb  # noqa: PLC0415

    return duckdb.from_arrow(_arrow(raw, role))


_VIEWS: dict[str, View] = {
    "pyarrow.Table": _arrow,
    "pyarrow.RecordBatchReader": _batches,
    "pyarrow.Dataset": _dataset,
    "pandas.DataFrame": _pandas,
    "polars.DataFrame": _polars,
    "polars.LazyFrame": _lazy,
    "duckdb.DuckDBPyRelation": _duckdb,
}
