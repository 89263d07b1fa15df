"""What a materialization shows of a stored value, in Dagster's terms."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from dagster_resilient.codecs import Summary
from dagster_resilient.values import StoredValue


def value_metadata(stored: StoredValue, *, partitioned: bool, preview_rows: int) -> Mapping[str, Any]:
    """Return the metadata of a materialization; Dagster plots the numbers over time.

    Args:
        stored: The value.
        partitioned: Whether it is one of several partitions: Dagster keeps the count of its rows apart.
        preview_rows: How many rows of a table are shown.
    """
    shown = {
        "dagster/uri": dg.MetadataValue.text(stored.uri),
        "resilient/codec": stored.codec,
        "resilient/bytes": stored.size,
        "resilient/checksum": stored.checksum,
        "resilient/seconds": round(stored.seconds, 3),
    }
    if stored.summary is None:
        return shown
    return shown | _table_metadata(stored.summary, partitioned=partitioned, preview_rows=preview_rows)


def _table_metadata(summary: Summary, *, partitioned: bool, preview_rows: int) -> dict[str, Any]:
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in summary.columns.items()])
    shown: dict[str, Any] = {
        "dagster/partition_row_count" if partitioned else "dagster/row_count": summary.rows,
        "dagster/column_schema": schema,
        "resilient/columns": len(summary.columns),
    }
    head = [dg.TableRecord(row) for row in summary.head[:preview_rows]]
    if head:
        columns = [column for column in schema.columns if column.name in head[0].data]
        shown["resilient/preview"] = dg.MetadataValue.table(head, schema=dg.TableSchema(columns))
    return shown
