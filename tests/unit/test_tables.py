"""Tables: a frame comes back equal in every detail, or is refused by the name of its column."""

from __future__ import annotations

import datetime as dt
import json
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dagster_resilient import codecs
from dagster_resilient.errors import IntegrityError, UnsupportedValueError

DAYS = pd.date_range("2020", periods=2)


def round_trip(frame):
    """Encode and decode a frame as a store would do it."""
    encoded = codecs.encode(frame)
    parts = {role: b"".join(buffers) for role, buffers in encoded.parts.items()}
    return codecs.decode(encoded.codec, parts, json.loads(json.dumps(encoded.meta)))


def column(values, dtype=None):
    """Return a frame whose column c is the one in question."""
    return pd.DataFrame({"a": [1, 2], "c": pd.Series(values, dtype=dtype)})


EXACT = {
    "plain": pd.DataFrame({"a": [1, 2], "s": ["x", None], "f": [1.0, np.nan], "t": DAYS}),
    "narrow": pd.DataFrame(
        {"f4": np.zeros(2, "f4"), "u1": np.zeros(2, "u1"), "f2": np.zeros(2, "f2"), "b": [True, False]}
    ),
    "named range index": pd.DataFrame({"a": [1, 2]}, index=pd.RangeIndex(5, 9, 2, name="n")),
    "frequency": pd.DataFrame({"a": [1, 2]}, index=DAYS),
    "no frequency": pd.DataFrame({"a": [1, 2]}, index=pd.DatetimeIndex(["2020-01-01", "2020-01-05"])),
    "index in seconds": pd.DataFrame({"a": [1, 2]}, index=DAYS.as_unit("s")),
    "index only": pd.DataFrame(index=range(3)),
    "empty": pd.DataFrame(),
    "no rows": pd.DataFrame({"a": pd.Series([], dtype="str"), "b": pd.Series([], dtype="int64")}),
    "range columns": pd.DataFrame(np.eye(2)),
    "integer columns": pd.DataFrame({3: [1], 1: [2]}),
    "named columns": pd.DataFrame([[1]], columns=pd.Index(["a"], name="n")),
    "two-level columns": pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", "x"), ("b", "y")])),
    "two-level index": pd.DataFrame({"c": [1, 2]}, index=pd.MultiIndex.from_product([["x"], DAYS], names=["k", "t"])),
    "seconds": column(DAYS.as_unit("s")),
    "time zone": column(pd.date_range("2020", periods=2, tz="Europe/Paris")),
    "ordered categories": column(pd.Categorical(["a", "b"], categories=["b", "z", "a"], ordered=True)),
    "integer categories": column(pd.Categorical([1, 2])),
    "nullable": column([1, None], "Int64"),
    "nullable float": column(pd.array(np.array([1.0, np.nan]), dtype="Float64")),
    "string[pyarrow]": column(["a", None], "string[pyarrow]"),
    "string[python]": column(["a", None], "string[python]"),
    "arrow": column([1.5, None], pd.ArrowDtype(pa.float64())),
    "period": column(pd.period_range("2020", periods=2, freq="M")),
    "interval": column(pd.interval_range(0, 2)),
    "duration": column(pd.to_timedelta([1, 2], unit="s")),
    "bytes": column([b"a", b"b"]),
    "dates": column([dt.date(2020, 1, 1), None]),
    "decimals": column([Decimal("1.10"), Decimal("2.20")]),
    "integers as objects": column([1, 2], object),
    "arrays": column([np.array([1]), np.array([2, 3])]),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_frame_comes_back_equal(name):
    """Values, dtypes, labels, index and frequency."""
    frame = EXACT[name]
    back = round_trip(frame)
    freq = not isinstance(frame.index, pd.MultiIndex)
    pd.testing.assert_frame_equal(
        back, frame, check_exact=True, check_freq=freq, check_index_type=True, check_column_type=True
    )
    assert list(map(str, back.dtypes)) == list(map(str, frame.dtypes))
    assert type(back.columns) is type(frame.columns)


REFUSED = {
    "sets": column([{1}, {2}]),
    "lists": column([[1], [2]]),
    "ragged dicts": column([{"k": 1}, {"j": "s"}]),
    "mixed objects": column([1, "a"], object),
    "booleans and integers": column([True, 1], object),
    "None in objects": column(["a", None], object),
    "mixed time zones": column([pd.Timestamp("2020", tz="UTC"), pd.Timestamp("2020", tz="Europe/Paris")], object),
    "beyond 64 bits": column([2**70, 1], object),
    "complex": column([1j, 2j]),
    "sparse": column(pd.arrays.SparseArray([0, 1])),
    "surrogate": column(["a", "\ud800"], object),
    "trailing zeros": column([Decimal("1.1"), Decimal("1.10")]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_column_that_parquet_changes_is_refused_by_name(name):
    """Never silently different."""
    with pytest.raises(UnsupportedValueError, match="'c'"):
        codecs.encode(REFUSED[name])


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "repeats the column label"),
        (pd.DataFrame({0: [1], "a": [2]}), "column labels"),
        (pd.DataFrame({"a": [1, 2]}, index=pd.Index([1, "x"], dtype=object)), "."),
        (pd.Series([1, 2]), "Series"),
        (type("Special", (pd.DataFrame,), {})({"a": [1]}), "Special"),
    ],
    ids=["duplicates", "mixed labels", "mixed index", "series", "subclass"],
)
def test_other_losses_are_refused_too(frame, what):
    """Labels, index, and pandas types that are no plain frame."""
    with warnings.catch_warnings(action="error"), pytest.raises(UnsupportedValueError, match=what):
        codecs.encode(frame)


def test_attrs_keep_their_types():
    """Parquet alone would turn the tuple into a list."""
    frame = pd.DataFrame({"a": [1]})
    frame.attrs = {"n": (1, 2), 3: b"x"}
    assert round_trip(frame).attrs == {"n": (1, 2), 3: b"x"}


def test_attrs_that_cannot_be_stored_are_refused():
    """With the path inside the attrs."""
    frame = pd.DataFrame({"a": [1]})
    frame.attrs = {"f": print}
    with pytest.raises(UnsupportedValueError, match=r"attrs .*\$\.f"):
        codecs.encode(frame)


def test_encoding_leaves_the_frame_as_it_is():
    """Neither its attrs nor its values change."""
    frame = pd.DataFrame({"a": [1]})
    frame.attrs = {"k": 1}
    codecs.encode(frame)
    assert frame.attrs == {"k": 1}


def test_bytes_that_are_no_parquet_are_an_integrity_error():
    """Whatever was stored in the place of the table."""
    with pytest.raises(IntegrityError, match="Parquet"):
        codecs.decode("pandas-parquet/1", {"table.parquet": b"PAR1 but not really"}, {})


def test_pandas_own_utc_comes_back_as_it_was():
    """`to_datetime(utc=True)` makes another UTC object than Parquet does; the frame's own one comes back."""
    times = pd.to_datetime(["2026-01-01", None, "2026-03-01"], utc=True)
    frame = pd.DataFrame({"t": times, "n": [1, 2, 3]}, index=pd.DatetimeIndex(["2026-01-01"] * 3, tz="UTC", name="at"))
    encoded = codecs.encode(frame)
    parts = {role: b"".join(chunks) for role, chunks in encoded.parts.items()}
    back = codecs.decode(encoded.codec, parts, encoded.meta)
    pd.testing.assert_frame_equal(back, frame)
    assert type(back["t"].dt.tz) is type(frame["t"].dt.tz)
    assert type(back.index.tz) is type(frame.index.tz)
