"""Heartbeats as an observer sees them: one small object per process under ``live/``, overwritten at each beat.

Names and times of last modification, from one LIST, are enough to judge who lives. Ages are taken by the store's clock
alone: an object's last-modified against `store_now`.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any, ClassVar, Literal, NamedTuple

import pydantic

from dagster_resilient.errors import ConfigurationError, ObjectNotFoundError, StoreUnavailableError
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Record
from dagster_resilient.storage.object_store import ObjectStore

Role = Literal["worker", "step"]

_log = logging.getLogger(__name__)
_mute: set[str] = set()


class Beat(Record):
    """What one process last said of itself.

    Attributes:
        process: Id of the process, new at each start.
        root: Root run of the lineage.
        instance_id: The Dagster instance, so that a sensor leaves the runs of others alone.
        seq: Number of the beat, from 1.
        interval: Seconds between beats.
        ttl: Seconds without a beat after which the process may be thought lost.
        step_key: The step in progress, if the process runs one.
        progress: What the step reported last, as plain JSON values.
        state: ``exited`` when the process ended without a goodbye; it was killed, or it crashed.
        sealed: False: the sidecar, which writes them, has nothing but the standard library.
    """

    sealed: ClassVar[bool] = False

    process: str
    run_id: str
    root: str
    role: Role
    instance_id: str
    host: str
    pid: int
    seq: int
    interval: float
    ttl: float
    step_key: str | None = None
    progress: dict[str, Any] = pydantic.Field(default_factory=dict)
    state: Literal["running", "exited"] = "running"


class LiveName(NamedTuple):
    """What the listing of a heartbeat tells, without reading it.

    Attributes:
        last_modified: Time of the last beat, by the store's clock.
    """

    run_id: str
    role: str
    process: str
    last_modified: datetime

    @property
    def key(self) -> str:
        """Key of the heartbeat object."""
        return keys.live_key(self.run_id, self.role, self.process)


def carries_heartbeats(store: ObjectStore) -> bool:
    """Return whether a sidecar can write to a store. A store that others see and it cannot is warned of, once."""
    if not store.is_shared:
        return False
    try:
        store.sidecar_config()
    except ConfigurationError as error:
        if store.url not in _mute:
            _mute.add(store.url)
            _log.warning("No heartbeats at %s: %s", store.url, error)
        return False
    except StoreUnavailableError:
        return True  # its credentials cannot be had now; the sidecar tries again, and says so
    return True


def list_beats(store: ObjectStore) -> list[LiveName]:
    """Return all heartbeats of a store from their names. Nothing is read."""
    found = ((keys.decode_live_key(info.key), info.last_modified) for info in store.list(keys.live_prefix()))
    return [LiveName(*name, last_modified) for name, last_modified in found if name is not None]


def read_beat(store: ObjectStore, key: str) -> Beat | None:
    """Return a heartbeat, or None where its process has said goodbye."""
    try:
        raw = store.get(key)
    except ObjectNotFoundError:
        return None
    beat: Beat = Beat.from_bytes(raw, f"{store.url}/{key}")
    return beat


def store_now(store: ObjectStore, name: str) -> datetime:
    """Return the time by the store's clock, from a probe object that is written for it.

    Args:
        store: The store whose clock is asked.
        name: Name of the asker; each has its own probe object.
    """
    key = f"probes/{keys.encode_segment(name)}.json"
    store.put(key, b"{}")
    try:
        return store.head(key).last_modified
    except ObjectNotFoundError:
        # Garbage collection had listed the old one, and deletes only then: it will not see the next one as old.
        store.put(key, b"{}")
        return store.head(key).last_modified
