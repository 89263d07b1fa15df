"""polars: a frame or series comes back equal in dtypes and values, or is refused by the name of its column."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from decimal import Decimal

import duckdb
import hypothesis
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal
from polars.testing.parametric import dataframes

from dagster_resilient.codecs import polars_frames
from dagster_resilient.codecs.polars_frames import PARQUET, _same
from dagster_resilient.errors import IntegrityError, UnsupportedValueError

NAN = float("nan")
PEOPLE = pl.Categories("people", "tests", pl.UInt8)


def stored(value):
    """Encode a frame or series as a store would keep it."""
    codec, buffers, meta = polars_frames.encode_polars(value)
    return codec, b"".join(buffers), json.loads(json.dumps(meta))


def round_trip(value):
    """Encode and decode a frame or series."""
    return polars_frames.decode_polars(*stored(value))


def assert_equal(back, value):
    """Compare dtypes and values, and the Python values by their text: it tells -0.0 from 0.0, and NaN from None."""
    assert type(back) is type(value)
    frames = [item.to_frame() if isinstance(item, pl.Series) else item for item in (back, value)]
    assert_frame_equal(*frames, check_exact=True, categorical_as_str=False)
    assert frames[0].schema == frames[1].schema
    assert frames[0].shape == frames[1].shape
    assert repr(frames[0].to_dict(as_series=False)) == repr(frames[1].to_dict(as_series=False))


def column(values, dtype=None):
    """Return a frame whose column c is the one in question."""
    return pl.DataFrame({"a": range(len(values)), "c": pl.Series(values, dtype=dtype)})


EXACT = {
    "floats": column([1.5, None, NAN, -0.0, 0.0]),
    "half floats": column([1.5, None, NAN, -0.0], pl.Float16),
    "floats in lists": column([[NAN, None, -0.0], None, []]),
    "floats in structs in lists": column([[{"x": -0.0}, None], [], None]),
    "embeddings": column([[-0.0, 0.0], None], pl.Array(pl.Float32, 2)),
    "matrices": column([[[1, 2], [3, None]], None], pl.Array(pl.Int8, (2, 2))),
    "categories": column(["b", "a", None], pl.Categorical),
    "named categories": column(["b", "a", None], pl.Categorical(PEOPLE)),
    "enum": column(["a", None], pl.Enum(["z", "a", "unused"])),
    "enum without values": column([], pl.Enum([])),
    "lists of enums": column([["a"], None, [None]], pl.List(pl.Enum(["z", "a"]))),
    "structs of categories": column([{"x": "a"}, None], pl.Struct({"x": pl.Categorical})),
    "decimals": column([Decimal("1.10"), None], pl.Decimal(38, 2)),
    "durations": column([dt.timedelta(1), None], pl.Duration("ms")),
    "times of day": column([dt.time(1, 2, 3), None]),
    "days": column([dt.date(1, 2, 3), None]),
    "times": column([dt.datetime(2020, 1, 1, tzinfo=dt.UTC), None], pl.Datetime("ms", "Europe/Paris")),
    "nanoseconds": column([0, None]).select("a", pl.col("c").cast(pl.Datetime("ns", "UTC"))),
    "wide integers": column([2**100, None], pl.Int128),
    "wide unsigned integers in lists": column([[2**100], None], pl.List(pl.UInt128)),
    "bytes": column([b"\xff", b"", None]),
    "nulls": column([None, None]),
    "lists of nulls": column([[None], None, []], pl.List(pl.Null)),
    "maps": column([[{"key": "a", "value": -0.0}], None], pl.Map(pl.String, pl.Float64)),
    "no rows": column([], pl.List(pl.Struct({"a": pl.Int8}))),
    "no columns": pl.DataFrame(),
    "no columns, but rows": pl.DataFrame(height=3),
    "names": pl.DataFrame({"": [1], "*": [2], "^a.*$": [3], "a": [4], "a.b": [5]}),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_frame_comes_back_equal_from_parquet(name):
    """Values, dtypes, and names."""
    codec, raw, meta = stored(EXACT[name])
    assert codec == PARQUET
    assert_equal(polars_frames.decode_polars(codec, raw, meta), EXACT[name])


@pytest.mark.parametrize("name", EXACT)
def test_so_do_its_parts(name):
    """Each column as a series with its name; rows that begin inside the memory; chunks."""
    frame = EXACT[name]
    for value in (*frame.iter_columns(), frame.slice(1), frame.clear(), pl.concat([frame, frame], rechunk=False)):
        assert_equal(round_trip(value), value)


def test_structs_without_fields_and_arrays_without_width():
    """C12: each is kept by the format that can hold it."""
    empty = column([{}, None], pl.Struct([]))
    flat = column([[], None], pl.Array(pl.Int64, 0))
    for frame, form in ((empty, polars_frames.IPC), (flat, PARQUET)):
        codec, raw, meta = stored(frame)
        assert codec == form
        assert_equal(polars_frames.decode_polars(codec, raw, meta), frame)


def test_what_no_format_holds_together_is_refused_by_name():
    """C12: neither does."""
    frame = pl.DataFrame({"s": pl.Series([{}], dtype=pl.Struct([])), "w": pl.Series([[]], dtype=pl.Array(pl.Int8, 0))})
    with pytest.raises(UnsupportedValueError, match=r"'s' .*Parquet.*'w' .*Arrow IPC"):
        polars_frames.encode_polars(frame)


def test_a_column_of_objects_is_refused_by_name():
    """C12: Python objects would come back as bytes, or not at all."""
    with pytest.raises(UnsupportedValueError, match=r"'c' \(dtype Object\)"):
        polars_frames.encode_polars(column([object()], pl.Object))


def test_a_null_row_is_no_row_of_nulls():
    """C13: a struct that is null, and one whose field is null, stay distinct."""
    frame = column([{"a": None}, None], pl.Struct({"a": pl.Decimal(19, 2)}))
    assert round_trip(frame)["c"].to_list() == [{"a": None}, None]


def test_many_row_groups_and_column_groups(monkeypatch):
    """Small limits stand for frames that are larger than what is compared at once."""
    monkeypatch.setattr(polars_frames, "_GROUP_BYTES", 1000)
    frame = pl.DataFrame({name: [f"{name}{i}" for i in range(200)] for name in "abc"})
    codec, raw, meta = stored(frame)
    assert pq.ParquetFile(pa.BufferReader(raw)).num_row_groups > 1
    assert_equal(polars_frames.decode_polars(codec, raw, meta), frame)


def test_categories_come_back_in_another_process(tmp_path):
    """By name, order and width, without the objects of the process that stored them."""
    frame = column(["b", "a"], pl.Categorical(PEOPLE)).with_columns(e=pl.Series(["y", "x"], dtype=pl.Enum(["y", "x"])))
    codec, raw, _ = stored(frame)
    (tmp_path / "raw").write_bytes(raw)
    script = f"""
import pathlib
from dagster_resilient.codecs.polars_frames import decode_polars
back = decode_polars({codec!r}, pathlib.Path("raw").read_bytes(), {{}})
import polars as pl
assert back.schema == {{"a": pl.Int64, "c": pl.Categorical(pl.Categories("people", "tests", pl.UInt8)),
                       "e": pl.Enum(["y", "x"])}}, back.schema
assert back.rows() == {frame.rows()!r}, back
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)


# ---- refusals


class Celsius(pl.BaseExtension):
    """A type that only some processes know."""

    def __init__(self):
        super().__init__("test.celsius", pl.Float64)


def test_an_extension_type_is_refused_by_its_column():
    """A process that does not know it would read its storage."""
    with pytest.raises(UnsupportedValueError, match=r"'c' .*extension.*\.ext\.storage\(\)"):
        polars_frames.encode_polars(pl.DataFrame({"c": pl.Series([1.0]).ext.to(Celsius())}))


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (pl.LazyFrame({"a": [1]}), r"LazyFrame.*\.collect\(\)"),
        (pl.col("a"), "Expr"),
        (type("Special", (pl.DataFrame,), {})({"a": [1]}), "Special"),
    ],
    ids=["lazy frame", "expression", "subclass"],
)
def test_other_objects_of_polars_are_refused_with_advice(value, advice):
    """By the name of their class."""
    assert polars_frames.is_polars(value)
    with pytest.raises(UnsupportedValueError, match=advice):
        polars_frames.encode_polars(value)


@pytest.mark.parametrize("value", [None, [1], "polars", pd.DataFrame({"a": [1]}), pa.table({"a": [1]})])
def test_what_is_not_of_polars(value):
    """Is left to the other codecs."""
    assert not polars_frames.is_polars(value)


def test_a_file_that_came_back_different_is_not_stored(monkeypatch):
    """Whatever a writer does: the next format is taken, and after the last the column is named."""
    frame = column([1, 2])

    def planted(raw, positions):
        return pl.DataFrame({"a": [0, 1], "c": [1, 3]})

    monkeypatch.setitem(polars_frames._FORMS, PARQUET, polars_frames._FORMS[PARQUET]._replace(read=planted))
    assert stored(frame)[0] == polars_frames.IPC
    ipc = polars_frames._FORMS[polars_frames.IPC]
    monkeypatch.setitem(polars_frames._FORMS, polars_frames.IPC, ipc._replace(read=planted))
    with pytest.raises(UnsupportedValueError, match=r"'c' \(dtype Int64\) would come back from Arrow IPC different"):
        polars_frames.encode_polars(frame)


# ---- the comparison

PAIR = pl.Struct({"x": pl.Float64})


@pytest.mark.parametrize(
    ("ours", "theirs", "dtypes"),
    [
        ([0.0], [-0.0], (pl.Float64, pl.Float64)),
        ([0.0, -0.0], [-0.0, 0.0], (pl.Float16, pl.Float16)),
        ([NAN], [None], (pl.Float64, pl.Float64)),
        ([[0.0]], [[-0.0]], (pl.List(pl.Float64), pl.List(pl.Float64))),
        ([[0.0]], [[-0.0]], (pl.Array(pl.Float32, 1), pl.Array(pl.Float32, 1))),
        ([[{"x": 0.0}]], [[{"x": -0.0}]], (pl.List(PAIR), pl.List(PAIR))),
        ([{"x": None}, None], [None, {"x": None}], (PAIR, PAIR)),
        ([[{"key": "a", "value": 0.0}]], [[{"key": "a", "value": -0.0}]], (pl.Map(pl.String, pl.Float64),) * 2),
        (["a"], ["a"], (pl.Enum(["a", "b"]), pl.Enum(["b", "a"]))),
        (["a"], ["a"], (pl.Categorical, pl.Categorical(PEOPLE))),
        ([0], [0], (pl.Datetime("us"), pl.Datetime("us", "UTC"))),
        ([0], [0], (pl.Duration("us"), pl.Duration("ms"))),
        ([1], [1], (pl.Int8, pl.Int16)),
    ],
)
def test_the_comparison_sees(ours, theirs, dtypes):
    """What polars' own passes over: the sign of zero, everywhere; and each series is the same as itself."""
    one, other = (pl.Series(values, dtype=dtype) for values, dtype in zip((ours, theirs), dtypes, strict=True))
    assert not _same(one, other)
    assert _same(one, one)
    assert _same(other, other)


# ---- what people see


def test_the_summary_shows_types_and_the_first_rows():
    """Of a frame or a series; also of values that Python cannot hold."""
    frame = column([2**50, None]).select("a", pl.col("c").cast(pl.Datetime("ms")))
    summary = polars_frames.summary_of(frame)
    assert (summary.rows, summary.columns["a"]) == (2, "Int64")
    assert [row["a"] for row in summary.head] == [0, 1]
    assert summary.head[1]["c"] == "None"
    assert polars_frames.summary_of(pl.Series("s", ["x"] * 9)).head == [{"s": "x"}] * 5


# ---- other engines, and damage


def test_the_parquet_is_read_by_every_engine(tmp_path):
    """DuckDB, pandas, pyarrow and polars, without us."""
    frame = pl.DataFrame({"n": [1, None], "l": [[1, 2], None], "c": pl.Series(["x", None], dtype=pl.Categorical)})
    path = tmp_path / "table.parquet"
    path.write_bytes(stored(frame)[1])
    assert duckdb.sql(f"select * from '{path}'").fetchall() == frame.rows()
    assert_frame_equal(pl.read_parquet(path), frame)
    assert pq.read_table(path).to_pylist() == frame.to_dicts()
    assert pd.read_parquet(path, dtype_backend="pyarrow")["c"].tolist()[0] == "x"


def test_the_arrow_file_is_read_by_every_engine(tmp_path):
    """polars, pandas and pyarrow by themselves, DuckDB by way of pyarrow."""
    frame = pl.DataFrame({"n": [1, 2], "s": pl.Series([{}, None], dtype=pl.Struct([]))})
    codec, raw, _ = stored(frame)
    assert codec == polars_frames.IPC
    path = tmp_path / "table.arrow"
    path.write_bytes(raw)
    with pa.memory_map(str(path)) as source:
        opened = pa.ipc.open_file(source).read_all().select(["n"])
    assert opened["n"].to_pylist() == [1, 2]
    assert duckdb.sql("select n from opened").fetchall() == [(1,), (2,)]
    assert pd.read_feather(path, columns=["n"])["n"].tolist() == [1, 2]
    assert_frame_equal(pl.read_ipc(path), frame)


@pytest.mark.parametrize("frame", [column(["x"] * 100), column([{}] * 100, pl.Struct([]))], ids=["parquet", "ipc"])
def test_truncated_bytes_are_an_integrity_error(frame):
    """Wherever they end."""
    codec, raw, meta = stored(frame)
    for end in range(0, len(raw), max(1, len(raw) // 50)):
        with pytest.raises(IntegrityError, match="stored table cannot be read"):
            polars_frames.decode_polars(codec, raw[:end], meta)


# ---- whatever frames people make


@hypothesis.given(dataframes(max_cols=3, max_size=4, excluded_dtypes=[pl.Object, pl.Extension]))
def test_every_frame_comes_back_equal(frame):
    """Of any dtype that polars' own strategy makes, chunked or not."""
    assert_equal(round_trip(frame), frame)
