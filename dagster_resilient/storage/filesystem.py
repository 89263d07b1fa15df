"""A store as an fsspec filesystem, so that pandas, DuckDB, pyarrow or torch read and write it."""

from __future__ import annotations

from dagster_resilient.storage.object_store import ObjectStore


class StoreFileSystem:
    """Placeholder until the view is written."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
