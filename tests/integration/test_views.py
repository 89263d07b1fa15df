"""A table that one library stored, as another one's: by the annotation of an input, or by `expected`."""

import uuid
from typing import Any

import dagster as dg
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from dagster_resilient import ResilientIOManager, ResilientResource, load, open_store, open_task
from dagster_resilient.errors import IntegrityError, UnsupportedValueError

COLUMNS = {"n": [1, 2, 3], "s": ["x", None, "z"]}
STORED = {
    "pandas": pd.DataFrame(COLUMNS),
    "pyarrow, Parquet": pa.table(COLUMNS),
    "pyarrow, IPC": pa.table(COLUMNS | {"at": pa.array([1, 2, 3], pa.time32("s"))}),
    "polars": pl.DataFrame(COLUMNS),
}
WANTED: dict[type, Any] = {
    pd.DataFrame: lambda found: found["n"].tolist(),
    pa.Table: lambda found: found["n"].to_pylist(),
    pa.RecordBatchReader: lambda found: found.read_all()["n"].to_pylist(),
    ds.Dataset: lambda found: found.to_table(columns=["n"])["n"].to_pylist(),
    pl.DataFrame: lambda found: found["n"].to_list(),
    pl.LazyFrame: lambda found: found.select("n").collect()["n"].to_list(),
    duckdb.DuckDBPyRelation: lambda found: [row[0] for row in found.select("n").fetchall()],
}
LETTERS = dg.StaticPartitionsDefinition(["a", "b"])


def resources() -> dict[str, Any]:
    """On a store of its own."""
    resilient = ResilientResource(url=f"memory://{uuid.uuid4().hex}")
    return {"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("wanted", WANTED, ids=lambda kind: f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
def test_an_input_gets_the_class_that_its_annotation_names(stored: str, wanted: type) -> None:
    """Whatever library stored the table, and in whichever of the two formats."""
    seen = []

    @dg.asset
    def up() -> Any:
        return STORED[stored]

    def down(up: Any) -> None:
        assert isinstance(up, wanted)
        seen.append(WANTED[wanted](up))

    down.__annotations__["up"] = wanted
    assert dg.materialize([up, dg.asset(down)], resources=resources()).success
    assert seen == [[1, 2, 3]]


@pytest.mark.parametrize("hint", [pl.DataFrame | None, Any, "nothing"])
def test_an_annotation_may_leave_it_open(hint: Any) -> None:
    """`X | None` names X; `Any`, or none at all, brings what was stored."""
    seen = []

    @dg.asset
    def up() -> Any:
        return STORED["pandas"]

    def down(up) -> None:
        seen.append(type(up))

    if hint != "nothing":
        down.__annotations__["up"] = hint
    assert dg.materialize([up, dg.asset(down)], resources=resources()).success
    assert seen == [pl.DataFrame if hint == pl.DataFrame | None else pd.DataFrame]


def test_a_fan_in_gets_the_class_of_its_values() -> None:
    """`dict[str, X]`: each partition as X, in their order."""
    seen = {}

    @dg.asset(partitions_def=LETTERS)
    def up(context: dg.AssetExecutionContext) -> pd.DataFrame:
        return pd.DataFrame({"letter": [context.partition_key]})

    @dg.asset
    def down(up: dict[str, pl.DataFrame]) -> None:
        seen.update({key: frame["letter"].to_list() for key, frame in up.items()})

    given = resources()
    for key in LETTERS.get_partition_keys():
        assert dg.materialize([up], resources=given, partition_key=key).success
    assert dg.materialize([down, up.to_source_asset()], selection=[down], resources=given).success
    assert list(seen.items()) == [("a", ["a"]), ("b", ["b"])]


def test_load_takes_it_too() -> None:
    """`expected` names the class, in scripts and notebooks; what cannot be had is refused by name."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    open_task(store, "table").save(STORED["pandas"])
    open_task(store, "number").save(3)
    assert load(store, "table", pl.DataFrame)["s"].to_list() == ["x", None, "z"]
    assert load(store, "table", pd.DataFrame).equals(STORED["pandas"])
    with pytest.raises(UnsupportedValueError, match="number holds int, not DataFrame"):
        load(store, "number", pl.DataFrame)


def test_its_own_library_gets_it_back_equal() -> None:
    """Not by way of the view, which would lose what pandas does not see in the file."""
    frame = pd.DataFrame({"n": [1]}, index=pd.RangeIndex(5, 6))
    frame.attrs = {"unit": ("m", 1)}
    store = open_store(f"memory://{uuid.uuid4().hex}")
    open_task(store, "table").save(frame)
    found = load(store, "table", pd.DataFrame)
    assert (found.index.start, found.attrs) == (5, {"unit": ("m", 1)})


def test_a_damaged_table_is_an_error_in_every_view() -> None:
    """Before any engine sees its bytes."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    open_task(store, "table").save(STORED["pandas"])
    (key,) = [info.key for info in store.list("") if info.key.endswith("table.parquet")]
    store.put(key, b"PAR1" + bytes(100))
    with pytest.raises(IntegrityError, match=r"table\.parquet is damaged"):
        load(store, "table", pl.LazyFrame)
