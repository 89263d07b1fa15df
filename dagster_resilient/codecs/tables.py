"""pandas frames as Parquet, read back and compared before anything is stored.

Parquet changes what a frame holds in dozens of small ways (sets become lists, seconds become milliseconds, `None`
becomes NaN, mixed labels become text). A list of the ways would never be whole, so the encoded bytes are decoded again
here, and a frame that came back different is refused with the name of the column. What can be set right after decoding,
is: see `_repairs`. The frequency of a date index is kept; one that hides in a level of a MultiIndex is not.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagster_resilient.codecs.codec import HEAD_COLUMNS, HEAD_ROWS, Summary, shown
from dagster_resilient.codecs.documents import decode_document, encode_document
from dagster_resilient.codecs.tensors import PackReader, PackWriter
from dagster_resilient.errors import IntegrityError, UnsupportedValueError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ADVICE = "Convert it, or store another type."
_UNREADABLE = (ValueError, TypeError, OverflowError, NotImplementedError)


def encode_frame(frame: pd.DataFrame) -> tuple[bytes, dict[str, Any]]:
    """Return Parquet and what else is needed to decode it to an equal frame.

    Raises:
        UnsupportedValueError: The frame would come back different. The message names the column, or the index.
    """
    of_arrow = _of_arrow(frame)
    raw, meta = _write(frame), {"attrs": _encode_attrs(frame), "arrow": of_arrow}
    try:
        meta |= _repairs(frame, _read(raw, of_arrow))
    except _UNREADABLE as error:
        raise UnsupportedValueError(
            f"The frame, or its index, does not come back from Parquet: {error}. {_ADVICE}"
        ) from error
    _require_equal(frame, raw, meta)
    return raw, meta


def decode_frame(raw: bytes, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Return the frame of Parquet bytes and their meta data."""
    frame = _repaired(_read(raw, meta.get("arrow", ())), meta)
    if meta.get("attrs"):
        frame.attrs = decode_document(meta["attrs"].encode(), PackReader(None))
    return frame


def _of_arrow(frame: pd.DataFrame) -> list[int]:
    """Return the positions of the columns whose type is one of Arrow's."""
    import pandas as pd  # noqa: PLC0415

    return [i for i, dtype in enumerate(frame.dtypes) if isinstance(dtype, pd.ArrowDtype)]


def _write(frame: pd.DataFrame) -> bytes:
    import pyarrow as pa  # noqa: PLC0415 - heavy, and needed only where frames are
    import pyarrow.parquet as pq  # noqa: PLC0415

    bare = frame.copy(deep=False)
    bare.attrs = {}
    target = io.BytesIO()
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            pq.write_table(pa.Table.from_pandas(bare), target, compression="zstd", compression_level=1)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, NotImplementedError, KeyError) as error:
        raise UnsupportedValueError(
            f"{_culprit(frame)} cannot be stored as Parquet: {error}. Convert it first."
        ) from error
    return target.getvalue()


def _read(raw: bytes, of_arrow: Sequence[int]) -> pd.DataFrame:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        return _frame_of(pq.read_table(pa.BufferReader(raw)), of_arrow)
    except pa.ArrowException as error:
        raise IntegrityError(f"The stored table cannot be read as Parquet: {error}") from error


def _frame_of(table: pa.Table, of_arrow: Sequence[int]) -> pd.DataFrame:
    """Return a table's frame, with the columns of Arrow types taken from the table as they are.

    pandas does not understand its own names of most of these types: lists, dictionaries, decimals.
    """
    import pandas as pd  # noqa: PLC0415

    if not of_arrow:
        return table.to_pandas()  # type: ignore[no-any-return]
    stored = json.loads(table.schema.metadata[b"pandas"])
    columns = [column for column in stored["columns"] if column["field_name"] not in stored["index_columns"]]
    for position in of_arrow:
        columns[position]["numpy_type"] = "object"
    metadata = {**table.schema.metadata, b"pandas": json.dumps(stored).encode()}
    frame: pd.DataFrame = table.replace_schema_metadata(metadata).to_pandas()
    for position in of_arrow:
        column = table.column(columns[position]["field_name"])
        frame.isetitem(position, pd.arrays.ArrowExtensionArray(column))
    return frame


def _culprit(frame: pd.DataFrame) -> str:
    """Name the column that Arrow refuses, by trying each alone; else what can be said."""
    import pyarrow as pa  # noqa: PLC0415

    if not frame.columns.is_unique:
        repeated = frame.columns[frame.columns.duplicated()].unique().tolist()
        return f"The frame, which repeats the column label(s) {repeated},"
    for label in frame.columns:
        try:
            pa.array(frame[label], from_pandas=True)
        except (pa.ArrowException, ValueError, TypeError, OverflowError, NotImplementedError):
            return f"Column {label!r} (dtype {frame[label].dtype})"
    return "The frame"


def _encode_attrs(frame: pd.DataFrame) -> str | None:
    """Parquet would keep attrs as plain JSON, where a tuple becomes a list."""
    if not frame.attrs:
        return None
    pack = PackWriter()
    try:
        text = encode_document(dict(frame.attrs), pack).decode()
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"The frame's attrs cannot be stored: {error}") from error
    if pack.buffers():
        raise UnsupportedValueError("The frame's attrs hold arrays or tensors; store these beside the frame.")
    return text


def summary_of(frame: pd.DataFrame) -> Summary:
    """Return what people are shown of a frame: its index is no column."""
    columns = {str(label): str(dtype) for label, dtype in frame.dtypes.items()}
    head = frame.iloc[:HEAD_ROWS, :HEAD_COLUMNS]
    names = [str(label) for label in head.columns]
    rows = zip(*(head.iloc[:, i].tolist() for i in range(head.shape[1])), strict=True)
    return Summary(len(frame), columns, [dict(zip(names, map(shown, row), strict=True)) for row in rows])


# ---- what is set right after decoding


def _repairs(frame: pd.DataFrame, back: pd.DataFrame) -> dict[str, Any]:
    """What `decode_frame` must set right. Whether that is enough is decided by the comparison, not here."""
    import pandas as pd  # noqa: PLC0415

    repairs: dict[str, Any] = {}
    for axis in ("columns", "index"):
        labels = getattr(frame, axis)
        if type(labels) is pd.RangeIndex:
            repairs[f"{axis}_range"] = [labels.start, labels.stop, labels.step]
    if isinstance(frame.index, pd.DatetimeIndex) and frame.index.unit != getattr(back.index, "unit", None):
        repairs["index_unit"] = frame.index.unit
    if getattr(frame.index, "freqstr", None) and isinstance(frame.index, (pd.DatetimeIndex, pd.TimedeltaIndex)):
        repairs["index_freq"] = frame.index.freqstr
    if back.shape[1] == frame.shape[1]:
        pairs = zip(frame.dtypes, back.dtypes, strict=True)
        repairs["dtypes"] = {str(i): _dtype_text(ours) for i, (ours, theirs) in enumerate(pairs) if ours != theirs}
    # pandas' own UTC (`to_datetime(utc=True)`) is `datetime.timezone.utc`; Parquet gives back `ZoneInfo("UTC")`.
    repairs["utc_columns"] = [i for i, dtype in enumerate(frame.dtypes) if _is_plain_utc(dtype)]
    repairs["utc_index"] = _is_plain_utc(frame.index.dtype)
    return repairs


def _is_plain_utc(dtype: Any) -> bool:
    return getattr(dtype, "tz", None) is dt.UTC


def _dtype_text(dtype: Any) -> str:
    """Text that `astype` takes. pandas prints both storages of nullable text alike."""
    import pandas as pd  # noqa: PLC0415

    return f"string[{dtype.storage}]" if isinstance(dtype, pd.StringDtype) and dtype.na_value is pd.NA else str(dtype)


def _repaired(frame: pd.DataFrame, repairs: Mapping[str, Any]) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415

    for position, dtype in repairs.get("dtypes", {}).items():
        frame.isetitem(int(position), frame.iloc[:, int(position)].astype(dtype).array)
    for position in repairs.get("utc_columns", ()):
        frame.isetitem(position, frame.iloc[:, position].dt.tz_convert(dt.UTC).array)
    if repairs.get("utc_index"):
        frame.index = pd.DatetimeIndex(frame.index).tz_convert(dt.UTC)
    for axis in ("columns", "index"):
        if f"{axis}_range" in repairs:
            start, stop, step = repairs[f"{axis}_range"]
            setattr(frame, axis, pd.RangeIndex(start, stop, step, name=getattr(frame, axis).name))
    if "index_unit" in repairs:
        frame.index = pd.DatetimeIndex(frame.index).as_unit(repairs["index_unit"])
    if "index_freq" in repairs:
        frame.index.freq = repairs["index_freq"]  # type: ignore[attr-defined]
    return frame


# ---- the comparison


def _require_equal(frame: pd.DataFrame, raw: bytes, meta: Mapping[str, Any]) -> None:
    import pandas as pd  # noqa: PLC0415

    try:
        back = decode_frame(raw, meta)
    except _UNREADABLE as error:
        raise UnsupportedValueError(
            f"The frame does not come back from Parquet as it is: {error}. {_ADVICE}"
        ) from error
    for what, ours, theirs in _parts(frame, back):
        try:
            if isinstance(ours, pd.Series):
                pd.testing.assert_series_equal(ours, theirs, check_exact=True, check_index=False, check_freq=False)
            else:
                pd.testing.assert_index_equal(ours, theirs, exact=True, check_freq=False)  # type: ignore[call-arg]
            same = _same_details(ours, theirs)
        except (AssertionError, ValueError, TypeError):
            same = False
        if not same:
            raise UnsupportedValueError(f"{what} would come back from Parquet different from what it is. {_ADVICE}")


def _parts(frame: pd.DataFrame, back: pd.DataFrame) -> Iterator[tuple[str, Any, Any]]:
    """What must be equal, with the name by which a person finds it."""
    yield "The column labels", frame.columns, back.columns
    for i, label in enumerate(frame.columns):
        ours = frame.iloc[:, i]
        yield f"Column {label!r} (dtype {ours.dtype})", ours, back.iloc[:, i]
    yield "The index", frame.index, back.index


def _same_details(ours: Any, theirs: Any) -> bool:
    """What pandas' own comparison lets pass: types of objects, time zone classes, frequencies, categories."""
    import pandas as pd  # noqa: PLC0415

    if isinstance(ours, pd.MultiIndex):
        levels = ((ours.get_level_values(i), theirs.get_level_values(i)) for i in range(ours.nlevels))
        return all(_same_dtype(one, other) and _same_cells(one, other) for one, other in levels)
    same_freq = not isinstance(ours, (pd.DatetimeIndex, pd.TimedeltaIndex)) or ours.freq == theirs.freq
    same_dtype, same_cells = _same_dtype(ours, theirs), _same_cells(ours, theirs)
    if isinstance(ours.dtype, pd.CategoricalDtype):
        same_dtype = same_dtype and _same_details(ours.dtype.categories, theirs.dtype.categories)
    return same_freq and same_dtype and same_cells


def _same_dtype(ours: Any, theirs: Any) -> bool:
    same_zone_class = type(getattr(ours.dtype, "tz", None)) is type(getattr(theirs.dtype, "tz", None))
    return bool(ours.dtype == theirs.dtype) and same_zone_class


def _same_cells(ours: Any, theirs: Any) -> bool:
    return ours.dtype != object or all(map(_same, ours, theirs))


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two cells are equal in type and value, all the way down."""
    if type(ours) is not type(theirs):
        return False
    if ours is theirs or isinstance(ours, (str, bytes, bool, int)):
        return ours is theirs or bool(ours == theirs)
    if isinstance(ours, float):
        return struct.pack("d", ours) == struct.pack("d", theirs)
    if isinstance(ours, (list, tuple, dict)):
        pairs = (ours.items(), theirs.items()) if isinstance(ours, dict) else (ours, theirs)
        return len(ours) == len(theirs) and all(map(_same, *pairs))
    if hasattr(ours, "dtype") and hasattr(ours, "tolist"):
        return ours.dtype == theirs.dtype and _same(ours.tolist(), theirs.tolist())
    same_unit = getattr(ours, "unit", None) == getattr(theirs, "unit", None)
    return bool(ours == theirs) and repr(ours) == repr(theirs) and same_unit
