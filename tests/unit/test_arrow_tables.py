"""Arrow tables: one comes back equal in schema and values, as Parquet or as Arrow IPC, or is refused by its column."""

from __future__ import annotations

import datetime as dt
import json
import os
import string
from decimal import Decimal

import duckdb
import hypothesis
import hypothesis.strategies as st
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from arrow_strategies import tables

from dagster_resilient.codecs import arrow
from dagster_resilient.codecs.arrow_equal import same_columns
from dagster_resilient.errors import IntegrityError, UnsupportedValueError

NAN = float("nan")


def stored(value):
    """Encode a table or batch as a store would keep it."""
    codec, buffers, meta = arrow.encode_table(value)
    return codec, b"".join(buffers), json.loads(json.dumps(meta))


def round_trip(value):
    """Encode and decode a table or batch."""
    return arrow.decode_table(*stored(value))


def assert_equal(back, value):
    """Compare schemas in full, and the Python values by their text: it tells -0.0 from 0.0, and NaN from None."""
    assert type(back) is type(value)
    assert back.schema.equals(value.schema, check_metadata=True)
    assert back.num_rows == value.num_rows
    for ours, theirs in zip(value.columns, back.columns, strict=True):
        assert repr(theirs.to_pylist()) == repr(ours.to_pylist())


def column(values, kind=None):
    """Return a table whose column c is the one in question."""
    values = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values, kind)
    return pa.table({"a": pa.array(range(len(values)), pa.int16()), "c": values})


def dictionary(indices, values, *, ordered=False):
    """Return an array of categories."""
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), pa.array(values), ordered=ordered)


AS_PARQUET = {
    "numbers": column([1.5, None, NAN, -0.0, 0.0]),
    "half floats": column([1.5, None, NAN, -0.0], pa.float16()),
    "text": column(["a", None, ""]),
    "text views": column(["a", None], pa.string_view()),
    "large text": column(["a", None], pa.large_string()),
    "times": column([dt.datetime(2020, 1, 1, tzinfo=dt.UTC), None], pa.timestamp("ns", "Europe/Paris")),
    "seconds, kept by the schema": column([1], pa.duration("s")),
    "wide decimals": column([Decimal("1.10")], pa.decimal256(60, 2)),
    "lists": column([[1, None], None, []], pa.list_(pa.int8())),
    "lists of named, required items": column([[1]], pa.list_(pa.field("n", pa.int8(), False, {"k": "v"}))),
    "list views": column([[1], None], pa.list_view(pa.int8())),
    "embeddings": column([[1, 2], None], pa.list_(pa.float32(), 2)),
    "categories, one unused": column(dictionary([1, None], ["z", "y", "u"])),
    "ordered categories": column(dictionary([1, None], ["z", "y", "u"], ordered=True)),
    "nulls": column(pa.nulls(3)),
    "uuids": column([b"0" * 16], pa.uuid()),
    "no columns": pa.table({}),
    "no rows": column([], pa.int8()),
    "names": pa.table({"": [1], "a.b": [2], "x\ny": [3], "^a.*$": [4]}),
}
AS_IPC = {
    "no columns, but rows": column([1, 2, 3]).select([]),
    "seconds of a day": column([dt.time(1), None], pa.time32("s")),
    "days in milliseconds": column(pa.array([5], pa.int64()).view(pa.date64())),
    "maps": column([[("a", -0.0)], None, []], pa.map_(pa.string(), pa.float64())),
    "categories of numbers": column(dictionary([1, None], [4, 5])),
    "categories with a null": column(dictionary([1, 0], ["z", None])),
    "categories without rows": column(dictionary([], ["z", "y"])),
    "lists without width": column([[], None], pa.list_(pa.int8(), 0)),
    "bytes without width": column([b"", None], pa.binary(0)),
    "null where none may be": pa.table({"c": [1, None]}, pa.schema([pa.field("c", pa.int64(), False)])),
}


@pytest.mark.parametrize("name", AS_PARQUET)
def test_parquet_is_the_form_wherever_it_is_exact(name):
    """Most engines read it."""
    codec, raw, meta = stored(AS_PARQUET[name])
    assert codec == arrow.PARQUET
    assert_equal(arrow.decode_table(codec, raw, meta), AS_PARQUET[name])


@pytest.mark.parametrize("name", AS_IPC)
def test_what_parquet_changes_or_refuses_is_kept_by_arrow_ipc(name):
    """And comes back equal from there."""
    codec, raw, meta = stored(AS_IPC[name])
    assert codec == arrow.IPC
    assert_equal(arrow.decode_table(codec, raw, meta), AS_IPC[name])


def test_repeated_names_come_back():
    """C01: two columns of one name are kept, in a file that pyarrow's own plain reader opens."""
    table = pa.table([pa.array([1]), pa.array(["x"])], names=["a", "a"])
    codec, raw, meta = stored(table)
    assert_equal(arrow.decode_table(codec, raw, meta), table)
    assert_equal(pa.ipc.open_file(raw).read_all(), table)


def test_a_null_row_is_no_row_of_nulls():
    """C13: a struct that is null, and one whose field is null, stay distinct."""
    table = column([{"a": None}, None], pa.struct([("a", pa.decimal128(19, 2))]))
    assert round_trip(table)["c"].to_pylist() == [{"a": None}, None]


C14 = {
    "dense union": pa.UnionArray.from_dense(
        pa.array([1, 0, 1], pa.int8()), pa.array([0, 0, 1], pa.int32()), [pa.array([-0.0]), pa.array(["x", None])]
    ),
    "sparse union": pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["x", "y"])]),
    "interval": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
    "runs": pc.run_end_encode(pa.array([1, 1, None, 2])),
    "empty struct": pa.array([{}, None], pa.struct([])),
}


@pytest.mark.parametrize("name", C14)
@pytest.mark.parametrize("rows", [slice(None), slice(1, None), slice(0, 0)], ids=["all", "sliced", "none"])
def test_types_that_parquet_lacks(name, rows):
    """C14: they go through Arrow IPC, sliced or not."""
    table = column(C14[name][rows])
    codec, raw, meta = stored(table)
    assert codec == arrow.IPC
    assert_equal(arrow.decode_table(codec, raw, meta), table)


def test_metadata_and_nullability_are_kept():
    """C17: of the schema, and of each field."""
    fields = [pa.field("a", pa.int64(), nullable=False, metadata={"unit": "mm"}), pa.field("b", pa.string())]
    table = pa.table({"a": [1], "b": ["x"]}, schema=pa.schema(fields, metadata={"made": "by us", b"\xff": b"\x00"}))
    back = round_trip(table).schema
    assert back.metadata == {b"made": b"by us", b"\xff": b"\x00"}
    assert back.field("a").metadata == {b"unit": b"mm"}
    assert [field.nullable for field in back] == [False, True]


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.string())], ids=str)
def test_text_of_many_chunks_is_never_laid_out_anew(kind, monkeypatch):
    """C18: small groups stand for the limit of 2 GiB; each comes back as a chunk of its own."""
    monkeypatch.setattr(arrow, "_GROUP_BYTES", 1000)
    text = [letter * 300 for letter in string.ascii_letters]
    chunk = pa.array([[item] for item in text] if pa.types.is_list(kind) else text, kind)
    table = column(pa.chunked_array([chunk, chunk[5:], chunk[:1]]))
    back = round_trip(table)
    assert_equal(back, table)
    assert back["c"].num_chunks > 10


@pytest.mark.skipif(os.environ.get("RESILIENT_SOAK") != "1", reason="holds 4 GiB: RESILIENT_SOAK=1")
def test_text_beyond_two_gibibytes_comes_back():
    """C18: in chunks, without an overflow of 32-bit offsets."""
    chunk = pa.array([str(i) * 2**20 for i in range(100, 376)])
    table = pa.table({"c": pa.chunked_array([chunk] * 3)})
    assert table.nbytes > 2**31
    back = round_trip(table)
    assert same_columns(back["c"], table["c"])


def test_chunks_with_dictionaries_of_their_own_come_back_with_one():
    """Both formats hold one; the values are the same."""
    table = column(pa.chunked_array([dictionary([0, 1], ["x", "y"]), dictionary([0], ["z"])]))
    back = round_trip(table)
    assert_equal(back, table)
    assert {tuple(chunk.dictionary.to_pylist()) for chunk in back["c"].chunks} == {("x", "y", "z")}


def test_a_batch_comes_back_as_a_batch():
    """Not as a table; one without rows too."""
    batch = column(["a", None]).to_batches()[0]
    for value in (batch, batch.slice(0, 0), column([[("a", 1)]], pa.map_(pa.string(), pa.int8())).to_batches()[0]):
        assert_equal(round_trip(value), value)


def test_a_batch_of_many_groups_comes_back_as_one(monkeypatch):
    """However it was cut when it was written."""
    monkeypatch.setattr(arrow, "_GROUP_BYTES", 10)
    batch = column([str(i) for i in range(50)]).to_batches()[0]
    assert_equal(round_trip(batch), batch)


# ---- refusals


def ordered_apart():
    """Return chunks whose orders contradict each other."""
    chunks = (dictionary([0, 1], values, ordered=True) for values in (["x", "y"], ["y", "x"]))
    return column(pa.chunked_array(chunks))


def too_many_categories():
    """Return chunks whose dictionaries together have more entries than their indices can count."""
    chunks = (dictionary(range(100), [f"{i}{name}" for i in range(100)]) for name in "ab")
    return column(pa.chunked_array(chunks))


@pytest.mark.parametrize("make", [ordered_apart, too_many_categories])
def test_a_column_that_neither_format_keeps_is_refused_by_name(make):
    """With its type."""
    table = pa.table({"c": make()["c"]})
    with pytest.raises(UnsupportedValueError, match=r"'c' \(type dictionary"):
        arrow.encode_table(table)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (pa.array([1]), "pa.table"),
        (pa.chunked_array([[1]]), "pa.table"),
        (pa.scalar(1), "as_py"),
        (pa.RecordBatchReader.from_batches(pa.schema([]), []), "read_all"),
        (pyarrow.dataset.dataset(pa.table({"a": [1]})), "to_table"),
        (pa.schema([]), "made of"),
    ],
    ids=["array", "chunks", "scalar", "reader", "dataset", "schema"],
)
def test_other_objects_of_pyarrow_are_refused_with_advice(value, advice):
    """By the name of their class."""
    assert arrow.is_arrow(value)
    with pytest.raises(UnsupportedValueError, match=rf"{type(value).__name__}.*{advice}"):
        arrow.encode_table(value)


@pytest.mark.parametrize("value", [None, [1], "pyarrow", pd.DataFrame({"a": pd.array([1], "int64[pyarrow]")})])
def test_what_is_not_of_pyarrow(value):
    """Is left to the other codecs, even if it holds some of it."""
    assert not arrow.is_arrow(value)


class Celsius(pa.ExtensionType):
    """A type that only some processes know."""

    def __init__(self):
        super().__init__(pa.float64(), "test.celsius")

    def __arrow_ext_serialize__(self):
        """Return no parameters."""
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        """Make the type."""
        return cls()


def test_an_extension_type_needs_its_module_when_it_is_loaded():
    """Without it pyarrow would give the bare numbers, and not say so."""
    pa.register_extension_type(Celsius())
    try:
        table = column(pa.ExtensionArray.from_storage(Celsius(), pa.array([-0.0, None])))
        codec, raw, meta = stored(table)
        assert_equal(arrow.decode_table(codec, raw, meta), table)
    finally:
        pa.unregister_extension_type("test.celsius")
    with pytest.raises(UnsupportedValueError, match=r"test\.celsius.*register"):
        arrow.decode_table(codec, raw, meta)


# ---- the comparison


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pa.array([0.0]), pa.array([-0.0])),
        (pa.array([0.0], pa.float16()), pa.array([-0.0], pa.float16())),
        (pa.array([NAN]), pa.array([None], pa.float64())),
        (pa.array([[0.0]]), pa.array([[-0.0]])),
        (pa.array([[1, 2], []]), pa.array([[1], [2]])),
        (pa.array([None, [1]]), pa.array([[], [1]])),
        (pa.array([{"a": None}, None]), pa.array([None, {"a": None}])),
        (pa.array([[("a", 0.0)]], pa.map_("string", "double")), pa.array([[("a", -0.0)]], pa.map_("string", "double"))),
        (dictionary([0], ["x", "y"]), dictionary([0], ["x"])),
        (dictionary([], ["x"]), dictionary([], ["y"])),
        (C14["runs"], pc.run_end_encode(pa.array([1, 1, 2, None]))),
        (C14["dense union"], C14["dense union"].take(pa.array([1, 0, 2]))),
        (C14["sparse union"][1:], C14["sparse union"][:1]),
        (C14["dense union"][1:], C14["dense union"][:2]),
        (pa.array([1, 2]), pa.array([1])),
    ],
)  # fmt: skip
def test_the_comparison_sees(ours, theirs):
    """What pyarrow's own may pass over; and each array is the same as itself."""
    one, other = pa.chunked_array([ours]), pa.chunked_array([theirs])
    assert not same_columns(one, other)
    assert same_columns(one, one)
    assert same_columns(other, other)


def test_the_comparison_passes_over_chunks_runs_nans_and_what_nulls_hide():
    """None of these is a value."""
    payload = pa.array([0x7FF8000000000001], pa.int64()).view(pa.float64())
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array([7, 7]))
    hidden = pa.Array.from_buffers(pa.int8(), 1, [pa.py_buffer(b"\x00"), pa.py_buffer(b"\x07")])
    entries = pa.array([[("z", 1)], [("a", 1)]], pa.map_("string", "int8"))
    assert same_columns(pa.chunked_array([payload]), pa.chunked_array([[NAN]]))
    assert same_columns(pa.chunked_array([[1, 2], [3]]), pa.chunked_array([[1], [], [2, 3]]))
    assert same_columns(pa.chunked_array([runs]), pa.chunked_array([pc.run_end_encode(pa.array([7, 7]))]))
    assert same_columns(pa.chunked_array([hidden]), pa.chunked_array([pa.nulls(1, pa.int8())]))
    assert same_columns(
        pa.chunked_array([entries[1:]]), pa.chunked_array([pa.array(entries[1:].to_pylist(), entries.type)])
    )


def test_a_file_that_came_back_different_is_not_stored(monkeypatch):
    """Whatever a writer does: the next format is taken, and after the last the column is named."""
    table = column([1, 2])

    def planted(raw):
        yield pa.table({"a": table["a"], "c": [1, 3]})

    monkeypatch.setitem(arrow._FORMS, arrow.PARQUET, arrow._FORMS[arrow.PARQUET]._replace(groups=planted))
    assert stored(table)[0] == arrow.IPC
    monkeypatch.setitem(arrow._FORMS, arrow.IPC, arrow._FORMS[arrow.IPC]._replace(groups=planted))
    with pytest.raises(UnsupportedValueError, match=r"'c' \(type int64\) would come back from Arrow IPC different"):
        arrow.encode_table(table)


# ---- what people see


def test_the_summary_shows_types_and_the_first_rows():
    """Of a table or a batch; a name that repeats is shown once, a value that Python cannot hold by its type."""
    table = column(pa.array([2**62, None], pa.int64()).view(pa.timestamp("s")))
    summary = arrow.summary_of(table)
    assert (summary.rows, summary.columns) == (2, {"a": "int16", "c": "timestamp[s]"})
    assert summary.head == [{"a": 0, "c": "<timestamp[s]>"}, {"a": 1, "c": "None"}]
    assert arrow.summary_of(column(["x"] * 9).to_batches()[0]).head[4] == {"a": 4, "c": "x"}
    assert arrow.summary_of(pa.table([[1], [2]], names=["a", "a"])).rows == 1


# ---- other engines, and damage


def test_the_parquet_is_read_by_every_engine(tmp_path):
    """DuckDB, polars, pandas and pyarrow, without us."""
    table = column([[1, 2], None], pa.list_(pa.int64())).append_column("s", pa.array(["x", None]))
    _, raw, _ = stored(table)
    path = tmp_path / "table.parquet"
    path.write_bytes(raw)
    rows = [{"a": 0, "c": [1, 2], "s": "x"}, {"a": 1, "c": None, "s": None}]
    assert duckdb.sql(f"select * from '{path}'").fetchall() == [tuple(row.values()) for row in rows]
    assert pl.read_parquet(path).to_dicts() == rows
    assert pd.read_parquet(path, dtype_backend="pyarrow")["c"].tolist()[0] == [1, 2]
    assert_equal(pq.read_table(path), table)


def test_the_arrow_file_is_read_by_every_engine(tmp_path):
    """polars, pandas and pyarrow by themselves, DuckDB by way of pyarrow."""
    table = column([dt.time(1), None], pa.time32("s"))
    _, raw, _ = stored(table)
    path = tmp_path / "table.arrow"
    path.write_bytes(raw)
    with pa.memory_map(str(path)) as source:
        opened = pa.ipc.open_file(source).read_all()
    assert_equal(opened, table)
    assert duckdb.sql("select c from opened").fetchall() == [(dt.time(1),), (None,)]
    assert pl.read_ipc(path)["c"].to_list() == [dt.time(1), None]
    assert pd.read_feather(path)["c"].tolist() == [dt.time(1), None]


@pytest.mark.parametrize(
    "table", [column(["x"] * 100), column([dt.time(1)] * 100, pa.time32("s"))], ids=["parquet", "ipc"]
)
def test_truncated_bytes_are_an_integrity_error(table):
    """Wherever they end."""
    codec, raw, meta = stored(table)
    for end in range(0, len(raw), max(1, len(raw) // 50)):
        with pytest.raises(IntegrityError, match="stored table cannot be read"):
            arrow.decode_table(codec, raw[:end], meta)


# ---- whatever tables people make


@hypothesis.given(tables(), st.sampled_from([0, 0, 1, 4]))
def test_every_table_comes_back_equal(table, start):
    """Sliced or not: in schema, metadata and values."""
    value = table.slice(start)
    assert_equal(round_trip(value), value)
