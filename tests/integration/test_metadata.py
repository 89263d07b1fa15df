"""What a materialization shows of a stored table, in the event log that people look at."""

import datetime as dt
import uuid
from typing import Any

import dagster as dg
import pandas as pd
import pytest

from dagster_resilient import ResilientIOManager, ResilientResource

FRAME = pd.DataFrame(
    {
        "n": range(7),
        "price": [1.5, float("nan"), float("inf"), 0.0, 1.0, 2.0, 3.0],
        "name": ["x" * 200, None, "b", "c", "d", "e", "f"],
        "at": [dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in range(1, 8)],
        "kind": pd.Categorical(list("aabbaab")),
    }
)
LETTERS = dg.StaticPartitionsDefinition(["a", "b"])


@dg.asset
def table() -> pd.DataFrame:
    """A table."""
    return FRAME


@dg.asset(partitions_def=LETTERS)
def parted() -> pd.DataFrame:
    """One partition of a table."""
    return FRAME.head(3)


@dg.asset(partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run())
def looped(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
    """Each partition saved by itself."""
    for part in resilient.task(context).partitions():
        part.save(FRAME.head(3))


@dg.asset
def number() -> int:
    """No table."""
    return 3


def shown(asset: Any, partitions: list[str] | None = None, **settings: Any) -> list[dict[str, Any]]:
    """Materialize an asset; return the metadata of its materializations as the event log keeps it."""
    resilient = ResilientResource(url=f"memory://{uuid.uuid4().hex}", **settings)
    resources = {"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)}
    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"}
    with dg.DagsterInstance.ephemeral() as instance:
        key = partitions[0] if partitions and len(partitions) == 1 else None
        given: dict[str, Any] = {"partition_key": key} if key else {"tags": tags if partitions else {}}
        assert dg.materialize([asset], resources=resources, instance=instance, **given).success
        records = instance.fetch_materializations(asset.key, limit=9).records
        found = [record.asset_materialization for record in records]
    metadata = [dict(event.metadata) for event in found if event is not None]
    return [one for one in metadata if "resilient/codec" in one]


def test_a_table_shows_its_shape_and_its_first_rows() -> None:
    """Rows and columns as numbers, which Dagster plots; the schema where Dagster looks for it; five rows."""
    (found,) = shown(table)
    assert (found["dagster/row_count"].value, found["resilient/columns"].value) == (7, 5)
    columns = [(column.name, column.type) for column in found["dagster/column_schema"].value.columns]
    assert columns == [(str(name), str(dtype)) for name, dtype in FRAME.dtypes.items()]
    records = [record.data for record in found["resilient/preview"].records]
    assert [record["n"] for record in records] == [0, 1, 2, 3, 4]


def test_cells_are_numbers_or_short_text() -> None:
    """What JSON lacks, and what is long, is shown as text; the event log and the UI can read it."""
    (found,) = shown(table)
    first, second, third, *_ = (record.data for record in found["resilient/preview"].records)
    assert (first["price"], second["price"], third["price"]) == (1.5, "nan", "inf")
    assert (len(first["name"]), first["kind"], first["at"]) == (80, "a", "2026-01-01 00:00:00+00:00")


@pytest.mark.parametrize(("asset", "partitions"), [(parted, ["a"]), (looped, ["a", "b"])], ids=["one", "a loop"])
def test_the_rows_of_partitions_are_counted_apart(asset: Any, partitions: list[str]) -> None:
    """Dagster adds them up itself."""
    found = shown(asset, partitions)
    assert [one["dagster/partition_row_count"].value for one in found] == [3] * len(partitions)
    assert not any("dagster/row_count" in one for one in found)


def test_no_rows_are_shown_where_they_must_not_be() -> None:
    """They would go to Dagster's database; the shape is still shown."""
    (found,) = shown(table, preview_rows=0)
    assert "resilient/preview" not in found
    assert found["dagster/row_count"].value == 7


def test_a_value_that_is_no_table_has_none_of_it() -> None:
    """How and where it is stored is all."""
    (found,) = shown(number)
    assert set(found) == {
        "dagster/uri",
        "resilient/codec",
        "resilient/bytes",
        "resilient/checksum",
        "resilient/seconds",
    }
