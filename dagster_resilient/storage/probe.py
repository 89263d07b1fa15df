"""Whether a store decides create-if-absent, on which all ownership rests. Some servers ignore the condition."""

from __future__ import annotations

import uuid

from dagster_resilient.errors import ConfigurationError, ObjectExistsError
from dagster_resilient.storage.object_store import ObjectStore

PROBE_KEY = "probes/create-if-absent"


def require_create(store: ObjectStore) -> None:
    """Refuse a store in which two creates of one key both succeed.

    Costs one request, and two at the very first use: the object that it creates stays, so that later probes are refused
    at once.

    Raises:
        ConfigurationError: Both succeeded. Two runs could own one task in such a store, and lose each other's work.
    """
    for _ in range(2):
        try:
            store.create(PROBE_KEY, uuid.uuid4().hex.encode())
        except ObjectExistsError:
            return
    raise ConfigurationError(
        f"{store.url} overwrites objects that it was asked to create only if absent (If-None-Match: *). Two runs could "
        "own one task there. Use AWS S3, or a server that honours conditional writes."
    )
