"""Connections to the instance's database."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

_ENGINE = "_engine"
# A query that takes longer is given up, as everything in a tick is bounded; the next tick asks again.
_STATEMENT_MILLISECONDS = 30_000
_RECYCLE_SECONDS = 3600
_MOST_CONNECTIONS = 20


@contextmanager
def kept_connections(instance: dg.DagsterInstance) -> Iterator[None]:
    """Keep connections to the instance's database open inside the block.

    Dagster opens one for each query, except in its web server. On PostgreSQL with a password that makes a query of
    1 ms one of 11, and a tick has dozens of them. Afterwards the instance is as it was. SQLite knows no difference.

    Private: `optimize_for_webserver` of the run storage and the event log storage, and the engine that it replaces.
    """
    storages = [one for one in (instance.run_storage, instance.event_log_storage) if _ENGINE in vars(one)]
    before = [vars(storage)[_ENGINE] for storage in storages]
    for storage in storages:
        storage.optimize_for_webserver(_STATEMENT_MILLISECONDS, _RECYCLE_SECONDS, _MOST_CONNECTIONS)
    try:
        yield
    finally:
        for storage, engine in zip(storages, before, strict=True):
            if vars(storage)[_ENGINE] is not engine:
                vars(storage)[_ENGINE].dispose()
                setattr(storage, _ENGINE, engine)
