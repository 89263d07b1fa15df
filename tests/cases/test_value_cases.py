"""The cases of ``shared/cases/frames.md`` (C01 to C18) and ``values.md`` (D02 to D04), through a store.

Each value comes back equal, in type and in all that it holds, or it is refused by the name of what in it is to blame,
and nothing of it is stored.
"""

from __future__ import annotations

import datetime as dt
import math
import pathlib
import struct
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from polars.testing import assert_frame_equal as assert_polars_equal

from dagster_resilient import open_task
from dagster_resilient.codecs import arrow
from dagster_resilient.errors import UnsupportedValueError
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.task import Task

DAYS = pd.date_range("2020-01-01", periods=2, freq="D")
PARIS = pd.date_range("2020", periods=2, tz="Europe/Paris")


@pytest.fixture
def task(place) -> Task:
    """A task on an empty store, one of each kind."""
    url, options = place
    return open_task(open_store(url, options), "case")


def column(values: Any, dtype: Any = None) -> pd.DataFrame:
    """A frame whose column c is the one in question."""
    return pd.DataFrame({"a": [1, 2], "c": pd.Series(values, dtype=dtype)})


def same_frame(ours: Any, theirs: Any) -> bool:
    """Whether frames are equal in values, types, labels and marks of what is missing."""
    if isinstance(ours, pl.DataFrame):
        assert_polars_equal(ours, theirs, check_exact=True, categorical_as_str=False)
        return ours.schema == theirs.schema and repr(ours.to_dicts()) == repr(theirs.to_dicts())
    if isinstance(ours, pa.Table):
        rows = [
            table.to_pydict() if len(set(table.schema.names)) == table.num_columns else table
            for table in (ours, theirs)
        ]
        return ours.schema.equals(theirs.schema, check_metadata=True) and (repr(rows[0]) == repr(rows[1]))
    freq = not isinstance(ours.index, pd.MultiIndex)
    pd.testing.assert_frame_equal(
        theirs, ours, check_exact=True, check_freq=freq, check_index_type=True, check_column_type=True
    )
    labels = [list(map(type, frame.columns)) for frame in (ours, theirs)]
    cells = [[list(map(repr, frame.iloc[:, i])) for i in range(frame.shape[1])] for frame in (ours, theirs)]
    return labels[0] == labels[1] and cells[0] == cells[1] and ours.attrs == theirs.attrs


def assert_kept(task: Task, value: Any) -> None:
    """Saving and loading gives an equal frame of the same class."""
    task.save(value)
    back = task.load("case")
    assert type(back) is type(value)
    assert same_frame(value, back)


def assert_refused(task: Task, value: Any, named: str) -> None:
    """Saving is refused by a name, and no object is left."""
    with warnings.catch_warnings(action="ignore"), pytest.raises(UnsupportedValueError) as caught:
        task.save(value)
    assert named in str(caught.value)
    assert [info.key for info in task.store.list("tasks/")] == []


KEPT = {
    "C05 integers as labels": pd.DataFrame({3: [1], 1: [2]}),
    "C05 tuples as labels": pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", "x"), ("b", "y")])),
    "C06 frequency": pd.DataFrame({"a": [1, 2]}, index=DAYS),
    "C07 intervals as index": pd.DataFrame({"c": [1, 2]}, index=pd.interval_range(0, 2)),
    "C07 time zone in a level": pd.DataFrame({"c": [1, 2]}, index=pd.MultiIndex.from_arrays([["x", "y"], PARIS])),
    "C08 integers": column(pd.Categorical([1, 2])),
    "C08 ordered, one unused": column(pd.Categorical(["a", "b"], categories=["b", "z", "a"], ordered=True)),
    "C09 str": column(["a", None], "str"),
    "C09 string[python]": column(["a", None], "string[python]"),
    "C09 string[pyarrow]": column(["a", None], "string[pyarrow]"),
    "C11 decimals of Arrow": column([Decimal("1.10"), None], pd.ArrowDtype(pa.decimal128(10, 2))),
    "C11 lists of Arrow": column([[1], None], pd.ArrowDtype(pa.list_(pa.int64()))),
    "C11 dictionary of Arrow": column(["x", None], pd.ArrowDtype(pa.dictionary(pa.int8(), pa.string()))),
    "C12 struct without fields": pl.DataFrame({"c": pl.Series([{}, {}], dtype=pl.Struct([]))}),
    "C13 struct of null": pl.DataFrame(
        {"c": pl.Series([{"a": None}, None], dtype=pl.Struct({"a": pl.Decimal(19, 2)}))}
    ),
    "C14 interval": pa.table({"c": pa.array([(1, 2, 3), None], pa.month_day_nano_interval())}),
    "C14 runs": pa.table({"c": pc.run_end_encode(pa.array([1, 1, None, 2]))}),
    "C14 struct without fields": pa.table({"c": pa.array([{}, None], pa.struct([]))}),
    "C14 union": pa.table(
        {"c": pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["x", "y"])])}
    ),
    "C17 metadata": pa.table(
        {"a": [1]}, schema=pa.schema([pa.field("a", pa.int64(), nullable=False, metadata={"k": "v"})], {"n": "1"})
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_others_change_comes_back_equal(task, name):
    """Labels, index, categories, text of every flavour, types that Parquet lacks."""
    assert_kept(task, KEPT[name])


def test_c01_repeated_names_are_kept_by_arrow_and_refused_of_pandas(task):
    """Pandas cannot tell two columns of one label apart on the way back; the refusal names the label."""
    assert_refused(task, pd.DataFrame([[1, 2]], columns=["a", "a"]), "['a']")
    table = pa.table([pa.array([1]), pa.array(["x"])], names=["a", "a"])
    task.save(table)
    assert task.load("case").equals(table)


LOST = {
    "C02 integers and text": column([1, "a"], object),
    "C02 paths": column([pathlib.Path("/x"), pathlib.Path("/y")], object),
    "C02 beyond 64 bits": column([2**70, 1], object),
    "C02 complex": column([1j, 2j]),
    "C02 sparse": column(pd.arrays.SparseArray([0, 1])),
    "C02 arrays of two dimensions": column([np.eye(2), np.eye(2)], object),
    "C02 surrogate": column(["a", "\ud800"], object),
    "C03 sets": column([{1}, {2}]),
    "C03 ragged dicts": column([{"k": 1}, {"j": "s"}]),
    "C03 mixed time zones": column([pd.Timestamp("2020", tz="UTC"), pd.Timestamp("2020", tz="Europe/Paris")], object),
    "C09 text with None": column(["a", None], object),
}


@pytest.mark.parametrize("name", LOST)
def test_what_parquet_changes_is_refused_by_its_column(task, name):
    """C02 and C03: never silently different, and nothing is left."""
    assert_refused(task, LOST[name], "'c'")


def test_c03_integers_as_objects_stay_objects(task):
    """They do not become int64."""
    assert_kept(task, column([1, 2], object))


EITHER = {
    "C05 mixed labels": (pd.DataFrame({0: [1], "a": [2]}), "column labels"),
    "C05 times as labels": (pd.DataFrame([[1, 2]], columns=DAYS), "column labels"),
    "C05 None as label": (pd.DataFrame([[1]], columns=pd.Index([None], dtype=object)), "column labels"),
    "C07 periods in a level": (
        pd.DataFrame(
            {"c": [1, 2]}, index=pd.MultiIndex.from_arrays([["x", "y"], pd.period_range("2020", periods=2, freq="M")])
        ),
        "index",
    ),
    "C08 times in a zone": (column(pd.Categorical(PARIS)), "'c'"),
    "C08 all null": (column(pd.Categorical([None, None], categories=["x"])), "'c'"),
    "C08 no rows": (pd.DataFrame({"c": pd.Categorical([], categories=["b", "a"], ordered=True)}), "'c'"),
    "C08 polars without rows": (pl.DataFrame({"c": pl.Series([], dtype=pl.Enum(["b", "a"]))}), "'c'"),
    "C09 text of Arrow": (column(["a", None], pd.ArrowDtype(pa.string())), "'c'"),
    "C11 index of Arrow": (
        pd.DataFrame({"c": [1]}, index=pd.Index([[1]], dtype=pd.ArrowDtype(pa.list_(pa.int8())))),
        "index",
    ),
    "C12 objects": (pl.DataFrame({"c": pl.Series([object()], dtype=pl.Object)}), "'c'"),
    "C12 arrays without width": (pl.DataFrame({"c": pl.Series([[], []], dtype=pl.Array(pl.Int8, 0))}), "'c'"),
}


@pytest.mark.parametrize("name", EITHER)
def test_the_rest_is_kept_or_refused_by_name(task, name):
    """Which of both depends on the versions of the libraries; a third thing never happens."""
    value, named = EITHER[name]
    try:
        task.save(value)
    except UnsupportedValueError:
        assert_refused(task, value, named)
    else:
        assert same_frame(value, task.load("case"))


def test_c17_attrs_keep_their_types(task):
    """A tuple stays one."""
    frame = pd.DataFrame({"a": [1]})
    frame.attrs = {"n": (1, 2)}
    assert_kept(task, frame)


def test_c18_text_of_many_chunks_is_not_joined(task, monkeypatch):
    """A small limit stands for the 2 GiB of 32-bit offsets: the chunks come back as chunks."""
    monkeypatch.setattr(arrow, "_GROUP_BYTES", 1000)
    table = pa.table({"c": pa.chunked_array([pa.array(["x" * 100] * 20)] * 3)})
    task.save(table)
    back = task.load("case")
    assert back.equals(table)
    assert back["c"].num_chunks > 1


ARRAYS = [
    np.array(1.5),
    np.float32(1.5),
    np.arange(3, dtype=">i4"),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array([(1, 2.5)], dtype=[("a", ">i4"), ("b", "<f8")]),
]


@pytest.mark.parametrize("value", ARRAYS, ids=range(len(ARRAYS)))
def test_d02_arrays_keep_type_order_and_bytes(task, value):
    """A scalar is no array without dimensions; byte order, memory order and fields are kept."""
    task.save(value)
    back = task.load("case")
    assert (type(back), back.dtype, back.shape) == (type(value), value.dtype, value.shape)
    assert back.tobytes() == value.tobytes()
    if isinstance(value, np.ndarray):
        assert back.flags.f_contiguous == value.flags.f_contiguous


UNFIT_ARRAYS = {
    "matrix": np.zeros((1, 1)).view(np.matrix),
    "recarray": np.rec.array([(1,)], dtype=[("a", int)]),
    "variable text": np.array(["a"], dtype=np.dtypes.StringDType()),
    "objects": np.array([object()]),
    "masked": np.ma.masked_array([1], [True]),
}


@pytest.mark.parametrize("name", UNFIT_ARRAYS)
def test_d02_other_arrays_are_refused_with_their_path(task, name):
    """None becomes a plain array; objects are not pickled."""
    assert_refused(task, {"layers": [UNFIT_ARRAYS[name]]}, "$.layers[0]")


@pytest.mark.parametrize(
    "value",
    [{1: "a", "1": "b"}, {True: 1, None: 2}, {"t": (1, [2])}, {(1, 2): 3}, {1: "int", "true": True}],
    ids=["1 and '1'", "True and None", "tuple", "tuple as key", "true"],
)
def test_d03_keys_and_tuples_keep_their_types(task, value):
    """JSON alone merges the keys, and makes lists of tuples."""
    task.save(value)
    back = task.load("case")
    assert repr(back) == repr(value)


def test_d04_every_plain_value_keeps_its_type_and_bits(task):
    """NaN by its bits, the sign of zero, integers of any size, lone surrogates, numpy's scalars, Decimal, sets."""
    value = [
        math.inf, -0.0, 2**70, "\ud800", np.int64(1), np.float64(0.5), Decimal("1.10"), b"x", {1, 2},
        dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.date(2020, 1, 1),
    ]  # fmt: skip
    nan = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    task.save([*value, nan])
    *back, last = task.load("case")
    assert [(type(one), repr(one)) for one in back] == [(type(one), repr(one)) for one in value]
    assert struct.pack(">d", last) == bytes.fromhex("fff8000000000001")


def test_d04_what_is_refused_is_named_by_its_path(task):
    """Down to the key."""
    assert_refused(task, {"a": [0, 1, 2, {"b": object()}]}, "$.a[3].b")
