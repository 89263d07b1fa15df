"""Arrow tables as Parquet, or as an Arrow IPC file where Parquet would change them.

Parquet is what most engines read, so it comes first. But it has no seconds, no unions, no empty structs, no categories
of integers, and changes them silently or refuses them. So the file is read again, group by group, and compared with the
table; a table that would come back different is written as an Arrow IPC file, and if that is different too, refused.

What comes back equal: the schema with its order, types, nullability and metadata; values and nulls; dictionaries in
their order, with what is unused; the sign of zero. What may change: the bounds of chunks and runs, the bits of a NaN
beyond its being one, and the dictionaries of chunks that differ, which become one.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_resilient.codecs.arrow_equal import inner_types, same_columns
from dagster_resilient.codecs.codec import HEAD_COLUMNS, HEAD_ROWS, Cell, Summary, shown
from dagster_resilient.errors import IntegrityError, UnsupportedValueError
from dagster_resilient.storage.object_store import Buffer

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET, IPC = "arrow-parquet/1", "arrow-ipc/1"
PARTS = {PARQUET: "table.parquet", IPC: "table.arrow"}
# A row group is what is held twice while a table is compared, and the least that a reader in batches must hold. Small
# ones also keep the text of one array under the 2 GiB that its 32-bit offsets can address.
_GROUP_BYTES, _GROUP_ROWS = 2**26, 2**20
_ADVICE = {
    "Array": 'put it in a table: pa.table({"values": value})',
    "ChunkedArray": 'put it in a table: pa.table({"values": value})',
    "RecordBatchReader": "read it first: .read_all()",
    "Dataset": "read it first: .to_table()",
    "Scanner": "read it first: .to_table()",
    "Scalar": "use its Python value: .as_py()",
}


class _Form(NamedTuple):
    """A file format. `groups` yields one table at least, which holds the schema."""

    codec: str
    write: Callable[[pa.Table], pa.Buffer]
    groups: Callable[[Any], Iterator[pa.Table]]


def is_arrow(value: Any) -> bool:
    """Whether a value is an object of pyarrow, of whatever class."""
    return any(str(base.__module__).partition(".")[0] == "pyarrow" for base in type(value).__mro__)


def encode_table(value: Any) -> tuple[str, list[Buffer], dict[str, Any]]:
    """Return the codec's name, the file's buffers, and what else is needed to decode it to an equal table or batch.

    Args:
        value: A `pyarrow.Table` or `pyarrow.RecordBatch`.

    Raises:
        UnsupportedValueError: It is something else of pyarrow, or neither format gives it back equal. Names the column.
    """
    table, meta = _as_table(value)
    table = _with_one_dictionary(table)
    trouble = ""
    for form in _forms(table):
        raw, trouble = _attempt(table, form)
        if raw is not None:
            return form.codec, [memoryview(raw).cast("B")], meta
    raise UnsupportedValueError(f"{trouble}. Convert it, or store another type.")


def decode_table(codec: str, raw: Buffer, meta: Mapping[str, Any]) -> Any:
    """Return the table, or the record batch, of a file.

    Args:
        codec: `PARQUET` or `IPC`.
        raw: The file.
        meta: What `encode_table` gave.

    Raises:
        IntegrityError: The bytes are no such file.
        UnsupportedValueError: An extension type of the table is not registered in this process.
    """
    import pyarrow as pa  # noqa: PLC0415 - heavy, and needed only where tables are

    try:
        groups = list(_FORMS[codec].groups(raw))
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError, NotImplementedError) as error:
        raise IntegrityError(f"The stored table cannot be read as {_named(codec)}: {error}") from error
    table = groups[0] if len(groups) == 1 else pa.concat_tables(groups)
    _require_extensions(table.schema, meta.get("extensions", []))
    return _as_batch(table) if meta.get("batch") else table


def summary_of(value: Any) -> Summary:
    """Return what people are shown of a table or a batch."""
    columns = {field.name: str(field.type) for field in value.schema}
    head = value.slice(0, HEAD_ROWS)
    heads = zip(value.schema.names[:HEAD_COLUMNS], head.columns, strict=False)
    cells = {name: [_cell(scalar) for scalar in column] for name, column in heads}
    return Summary(value.num_rows, columns, [{n: c[row] for n, c in cells.items()} for row in range(head.num_rows)])


def _cell(scalar: pa.Scalar) -> Cell:
    """A time that Python cannot hold is shown by its type: a summary must not refuse what was stored."""
    try:
        return shown(scalar.as_py())
    except (ValueError, OverflowError, NotImplementedError):
        return f"<{scalar.type}>"


def _as_table(value: Any) -> tuple[pa.Table, dict[str, Any]]:
    import pyarrow as pa  # noqa: PLC0415

    meta: dict[str, Any] = {}
    if isinstance(value, pa.RecordBatch):
        value, meta = pa.Table.from_batches([value]), {"batch": True}
    if not isinstance(value, pa.Table):
        kinds = (base.__name__ for base in type(value).__mro__)
        advice = next((_ADVICE[kind] for kind in kinds if kind in _ADVICE), "store what it is made of")
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedValueError(
            f"The value is a {name}; of pyarrow only a Table or a RecordBatch can be stored. Instead, {advice}."
        )
    extensions = _extensions(value.schema)
    return value, meta | ({"extensions": extensions} if extensions else {})


def _as_batch(table: pa.Table) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415

    batches = table.to_batches()
    if batches:
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    return pa.RecordBatch.from_arrays([column.combine_chunks() for column in table.columns], schema=table.schema)


def _extensions(schema: pa.Schema) -> list[str]:
    """Name the extension types: a process that does not know them reads their storage, without a word."""
    import pyarrow as pa  # noqa: PLC0415

    kinds = itertools.chain.from_iterable(inner_types(field.type) for field in schema)
    return sorted({kind.extension_name for kind in kinds if isinstance(kind, pa.BaseExtensionType)})


def _require_extensions(schema: pa.Schema, stored: list[str]) -> None:
    missing = sorted(set(stored) - set(_extensions(schema)))
    if missing:
        raise UnsupportedValueError(
            f"The stored table has the extension type(s) {', '.join(missing)}, which this process does not know. "
            "Import the module that registers them (pyarrow.register_extension_type) before you load it."
        )


def _with_one_dictionary(table: pa.Table) -> pa.Table:
    """Both formats hold one dictionary for all chunks. The order of an ordered one is a meaning, so it must be one."""
    import pyarrow as pa  # noqa: PLC0415

    try:
        unified = table.unify_dictionaries()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return table  # The comparison decides whether that matters.
    for field, before, after in zip(table.schema, table.columns, unified.columns, strict=True):
        ordered = any(pa.types.is_dictionary(kind) and kind.ordered for kind in inner_types(field.type))
        if ordered and not same_columns(before, after):
            raise UnsupportedValueError(
                f"Column {field.name!r} (type {field.type}) has chunks whose ordered dictionaries differ. "
                "Give all chunks one dictionary, in one order."
            )
    return unified


# ---- attempts


def _forms(table: pa.Table) -> list[_Form]:
    """Forms to try. Parquet that repeats a name is read by some engines only; pyarrow's own plain reader refuses it."""
    repeated = len(set(table.schema.names)) < len(table.schema.names)
    return [form for form in _FORMS.values() if not (repeated and form.codec == PARQUET)]


def _attempt(table: pa.Table, form: _Form) -> tuple[pa.Buffer | None, str]:
    """Return the file if it holds the table; else None, and what is the trouble."""
    if not _keeps_schema(table, form):
        single = (field for i, field in enumerate(table.schema) if not _keeps_schema(table.select([i]), form))
        return None, f"{_column(next(single, None))} cannot be stored as {_named(form.codec)}"
    try:
        raw = form.write(table)
        changed = _difference(table, form.groups(raw))
    except _refusals() as error:
        return None, f"{_culprit(table, form)} cannot be stored as {_named(form.codec)}: {error}"
    if changed:
        return None, f"{changed} would come back from {_named(form.codec)} different from what it is"
    return raw, ""


def _keeps_schema(table: pa.Table, form: _Form) -> bool:
    """Whether a table comes back with its schema if it has no rows: spares the writing of one that cannot."""
    try:
        back = next(form.groups(form.write(table.slice(0, 0))))
    except _refusals():
        return False
    return bool(back.schema.equals(table.schema, check_metadata=True))


def _difference(table: pa.Table, groups: Iterator[pa.Table]) -> str | None:
    """Name what is different in the groups of rows that came back."""
    done = 0
    for group in groups:
        if not group.schema.equals(table.schema, check_metadata=True):
            return "The schema"
        ours = table.slice(done, group.num_rows)
        for field, *pair in zip(table.schema, ours.columns, group.columns, strict=True):
            if not same_columns(*pair):
                return _column(field)
        done += group.num_rows
    return None if done == table.num_rows else "The number of rows"


def _culprit(table: pa.Table, form: _Form) -> str:
    """Name the column that a format refuses, by trying each alone."""
    for position, field in enumerate(table.schema):
        try:
            collections.deque(form.groups(form.write(table.select([position]))), maxlen=0)
        except _refusals():
            return _column(field)
    return "The table"


def _refusals() -> tuple[type[Exception], ...]:
    """What pyarrow raises for types that a format lacks. Parquet's own errors are OSErrors."""
    import pyarrow as pa  # noqa: PLC0415

    return (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowCapacityError, OSError)


def _column(field: pa.Field | None) -> str:
    return "The table" if field is None else f"Column {field.name!r} (type {field.type})"


def _named(codec: str) -> str:
    return "Parquet" if codec == PARQUET else "Arrow IPC"


# ---- the two formats


def _group_rows(table: pa.Table) -> int:
    if not table.num_columns:
        return max(int(table.num_rows), 1)  # Groups without columns could not be put together again.
    rows: int = _GROUP_BYTES * table.num_rows // max(table.nbytes, 1)
    return min(max(rows, 1), _GROUP_ROWS)


def _write_parquet(table: pa.Table) -> pa.Buffer:
    """Other readers take any name for the items of a list; "compliant" would rename them all to "element"."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    target = pa.BufferOutputStream()
    pq.write_table(
        table,
        target,
        row_group_size=_group_rows(table),
        compression="zstd",
        compression_level=1,
        use_compliant_nested_type=False,
    )
    return target.getvalue()


def _parquet_groups(raw: Any) -> Iterator[pa.Table]:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    file = pq.ParquetFile(pa.BufferReader(raw))
    if not file.num_row_groups:
        yield file.read()
    for group in range(file.num_row_groups):
        yield file.read_row_group(group)


def _write_ipc(table: pa.Table) -> pa.Buffer:
    import pyarrow as pa  # noqa: PLC0415

    target = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
    with pa.ipc.new_file(target, table.schema, options=options) as writer:
        if not table.num_rows and table.num_columns:  # A batch without rows still holds the dictionaries.
            writer.write_batch(_as_batch(table))
        writer.write_table(table, max_chunksize=_group_rows(table))
    return target.getvalue()


def _ipc_groups(raw: Any) -> Iterator[pa.Table]:
    import pyarrow as pa  # noqa: PLC0415

    file = pa.ipc.open_file(pa.BufferReader(raw))
    if not file.num_record_batches:
        yield file.schema.empty_table()
    for batch in range(file.num_record_batches):
        yield pa.Table.from_batches([file.get_batch(batch)], file.schema)


_FORMS = {
    PARQUET: _Form(PARQUET, _write_parquet, _parquet_groups),
    IPC: _Form(IPC, _write_ipc, _ipc_groups),
}
