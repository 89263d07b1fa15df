"""polars frames and series as Parquet, or as an Arrow IPC file where Parquet cannot hold them.

polars' own writers keep more than its way through pyarrow does: 128-bit integers, enums, named categories. What they
wrote is read again here, some columns at a time, and compared; what would come back different is refused with the name
of the column. Not kept: the bounds of chunks, whether a column is known to be sorted, which of the NaNs a NaN is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_resilient.codecs.codec import HEAD_COLUMNS, HEAD_ROWS, Cell, Summary, shown
from dagster_resilient.errors import IntegrityError, UnsupportedValueError
from dagster_resilient.storage.object_store import Buffer

if TYPE_CHECKING:
    import polars as pl

PARQUET, IPC = "polars-parquet/1", "polars-ipc/1"
PARTS = {PARQUET: "table.parquet", IPC: "table.arrow"}
# What is held twice while a frame is compared, and the size of a row group.
_GROUP_BYTES, _GROUP_ROWS = 2**26, 2**18


class _Form(NamedTuple):
    """A file format. `read` takes the positions of the columns; None is all."""

    codec: str
    name: str
    write: Callable[[pl.DataFrame], bytes]
    read: Callable[[bytes, list[int] | None], pl.DataFrame]


def is_polars(value: Any) -> bool:
    """Whether a value is an object of polars, of whatever class."""
    return any(str(base.__module__).partition(".")[0] == "polars" for base in type(value).__mro__)


def encode_polars(value: Any) -> tuple[str, list[Buffer], dict[str, Any]]:
    """Return the codec's name, the file's buffers, and what else is needed to decode it to an equal frame or series.

    Args:
        value: A `polars.DataFrame` or `polars.Series`.

    Raises:
        UnsupportedValueError: It is something else of polars, or neither format gives it back equal. Names the column.
    """
    frame, meta = _as_frame(value)
    _require_storable(frame)
    troubles = []
    for form in _FORMS.values():
        raw, trouble = _attempt(frame, form)
        if raw is not None:
            return form.codec, [raw], meta
        troubles.append(trouble)
    raise UnsupportedValueError(f"{'; and '.join(troubles)}. Convert it, or store another type.")


def decode_polars(codec: str, raw: Buffer, meta: Mapping[str, Any]) -> Any:
    """Return the frame, or the series, of a file.

    Args:
        codec: `PARQUET` or `IPC`.
        raw: The file.
        meta: What `encode_polars` gave.

    Raises:
        IntegrityError: The bytes are no such file.
    """
    form = _FORMS[codec]
    try:
        frame = form.read(raw if isinstance(raw, bytes) else bytes(raw), None)
    except _refusals() as error:
        raise IntegrityError(f"The stored table cannot be read as {form.name}: {error}") from error
    return frame.to_series() if meta.get("series") else frame


def summary_of(value: Any) -> Summary:
    """Return what people are shown of a frame or a series."""
    frame, _ = _as_frame(value)
    columns = {name: str(kind) for name, kind in frame.schema.items()}
    head = frame.head(HEAD_ROWS)
    shown_columns = head.get_columns()[:HEAD_COLUMNS]
    rows = [{series.name: _cell(series, row) for series in shown_columns} for row in range(head.height)]
    return Summary(frame.height, columns, rows)


def _cell(series: pl.Series, row: int) -> Cell:
    """A time that Python cannot hold is shown by its type: a summary must not refuse what was stored."""
    try:
        return shown(series.item(row))
    except (ValueError, OverflowError):
        return f"<{series.dtype}>"


def _as_frame(value: Any) -> tuple[pl.DataFrame, dict[str, Any]]:
    import polars as pl  # noqa: PLC0415 - heavy, and needed only where frames are

    if type(value) is pl.DataFrame:
        return value, {}
    if type(value) is pl.Series:
        return value.to_frame(), {"series": True}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, pl.LazyFrame):
        raise UnsupportedValueError(
            f"The value is a {name}, a plan that holds no data. Store its result: .collect(); one that does not fit "
            "into memory can be written with .sink_parquet(path) and stored as a file."
        )
    raise UnsupportedValueError(
        f"The value is a {name}; of polars only a plain DataFrame or Series can be stored. Convert it to one."
    )


def _require_storable(frame: pl.DataFrame) -> None:
    """Refuse what a file may seem to hold, but another process would read as something else."""
    import polars as pl  # noqa: PLC0415

    for series in frame.iter_columns():
        for kind in _inner_types(series.dtype):
            if isinstance(kind, pl.Object):
                advice = "holds Python objects. Store them beside the frame, or convert the column"
            elif isinstance(kind, pl.BaseExtension):
                advice = "has an extension type, which other processes may not know. Use its storage: .ext.storage()"
            else:
                continue
            raise UnsupportedValueError(f"{_column(series)} {advice}.")


def _inner_types(kind: Any) -> Iterator[Any]:
    """Yield a type and the types that it is made of."""
    yield kind
    for name in ("inner", "key", "value"):
        if hasattr(kind, name):
            yield from _inner_types(getattr(kind, name))
    for field in getattr(kind, "fields", ()):
        yield from _inner_types(field.dtype)


# ---- attempts


def _attempt(frame: pl.DataFrame, form: _Form) -> tuple[bytes | None, str]:
    """Return the file if it holds the frame; else None, and what is the trouble."""
    try:
        raw = form.write(frame)
        changed = _difference(frame, raw, form)
    except _refusals() as error:
        return None, f"{_culprit(frame, form)} cannot be stored as {form.name}: {error}"
    if changed:
        return None, f"{changed} would come back from {form.name} different from what it is"
    return raw, ""


def _difference(frame: pl.DataFrame, raw: bytes, form: _Form) -> str | None:
    """Name what is different in the columns that came back."""
    if not frame.width and form.read(raw, None).shape != frame.shape:
        return "The number of rows"
    for positions in _column_groups(frame):
        back = form.read(raw, positions)
        ours = [frame.to_series(i) for i in positions]
        for one, other in zip(ours, back.iter_columns(), strict=True):
            if not _same(one, other):
                return _column(one)
    return None


def _column_groups(frame: pl.DataFrame) -> Iterator[list[int]]:
    """Yield positions of columns that are small enough together to be held twice."""
    group: list[int] = []
    size = 0
    for position, series in enumerate(frame.iter_columns()):
        added = int(series.estimated_size())
        if group and size + added > _GROUP_BYTES:
            yield group
            group, size = [], 0
        size += added
        group.append(position)
    if group:
        yield group


def _culprit(frame: pl.DataFrame, form: _Form) -> str:
    """Name the column that a format refuses, by trying each alone."""
    for series in frame.iter_columns():
        try:
            form.read(form.write(series.to_frame()), None)
        except _refusals():
            return _column(series)
    return "The frame"


def _refusals() -> tuple[type[BaseException], ...]:
    """What polars raises for types that a format lacks, and for bytes that are none."""
    import polars as pl  # noqa: PLC0415

    return (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, TypeError, ValueError)


def _column(series: pl.Series) -> str:
    return f"Column {series.name!r} (dtype {series.dtype})"


# ---- the comparison


def _same(ours: pl.Series, theirs: pl.Series) -> bool:
    """Whether two columns are equal in name, type and values. polars takes 0.0 and -0.0 for one; people do not."""
    same = ours.dtype == theirs.dtype and ours.equals(theirs, check_dtypes=True, check_names=True, null_equal=True)
    return same and all(map(_same_signs, _floats(ours), _floats(theirs)))


def _same_signs(ours: pl.Series, theirs: pl.Series) -> bool:
    zeros, others = ours.filter(ours == 0), theirs.filter(theirs == 0)
    return (1 / zeros).equals(1 / others)


def _floats(series: pl.Series) -> Iterator[pl.Series]:
    """Yield the floating-point numbers of a column, of each of its nested parts."""
    import polars as pl  # noqa: PLC0415

    kind = series.dtype
    if kind.is_float():
        yield series
    elif not any(inner.is_float() for inner in _inner_types(kind)):
        return
    elif isinstance(kind, pl.Struct):
        for field in kind.fields:
            yield from _floats(series.struct.field(field.name))
    else:
        yield from _floats((_as_list(series) if isinstance(kind, pl.Map) else series).explode())


def _as_list(series: pl.Series) -> pl.Series:
    import polars as pl  # noqa: PLC0415

    kind: Any = series.dtype
    return series.cast(pl.List(pl.Struct({"key": kind.key, "value": kind.value})))


# ---- the two formats


def _group_rows(frame: pl.DataFrame) -> int:
    rows = _GROUP_BYTES * frame.height // max(int(frame.estimated_size()), 1)
    return min(max(rows, 1), _GROUP_ROWS)


def _write_parquet(frame: pl.DataFrame) -> bytes:
    target = io.BytesIO()
    frame.write_parquet(target, compression="zstd", compression_level=1, row_group_size=_group_rows(frame))
    return target.getvalue()


def _read_parquet(raw: bytes, positions: list[int] | None) -> pl.DataFrame:
    import polars as pl  # noqa: PLC0415

    return pl.read_parquet(raw, columns=positions)


def _write_ipc(frame: pl.DataFrame) -> bytes:
    target = io.BytesIO()
    frame.write_ipc(target, compression="zstd", record_batch_size=_group_rows(frame))
    return target.getvalue()


def _read_ipc(raw: bytes, positions: list[int] | None) -> pl.DataFrame:
    import polars as pl  # noqa: PLC0415

    return pl.read_ipc(raw, columns=positions)


_FORMS = {
    PARQUET: _Form(PARQUET, "Parquet", _write_parquet, _read_parquet),
    IPC: _Form(IPC, "Arrow IPC", _write_ipc, _read_ipc),
}
