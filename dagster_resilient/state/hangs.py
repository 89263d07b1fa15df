"""Hangs as an observer sees them: one small object under ``hung/`` for each process that beats and does not get on.

Its sidecar puts it there, judging by its own clock, and deletes it when progress resumes or the process ends. So one
LIST, which is nearly always empty, finds them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pydantic

from dagster_resilient.errors import ConfigurationError, ObjectNotFoundError
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Record
from dagster_resilient.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from dagster_resilient.state.heartbeat import Sidecar


class Hang(Record):
    """What a sidecar found when it marked its parent.

    Attributes:
        task: What did not progress.
        seconds: How long, when the mark was made.
        limit: How long it may.
        progress: What was reported last.
        host: The parent's machine.
        pid: The parent's process id.
        step_key: The step that it ran, where that is known.
        sealed: False: the sidecar, which writes it, has nothing but the standard library.
    """

    sealed: ClassVar[bool] = False

    task: str
    seconds: float
    limit: float
    host: str
    pid: int
    progress: dict[str, Any] = pydantic.Field(default_factory=dict)
    step_key: str | None = None

    def words(self, since: float = 0.0) -> str:
        """Return it in words for people, so many seconds after the mark was made."""
        limit = f"{self.seconds + since:,.0f} s (limit {self.limit:,.0f} s)"
        return f"its step {self.task} made no progress for {limit}{self._after()}, in process {self.pid} on {self.host}"

    def _after(self) -> str:
        shown = self.progress
        if "step" in shown and shown.get("task") == self.task:
            return f", after step {shown['step']}"
        if "partitions_done" in shown:
            done = f"{shown['partitions_done']} of {shown.get('partitions_total')}"
            return f", in partition {shown.get('partition')} ({done} were done)"
        return ""


class HangName(NamedTuple):
    """What the listing of a mark tells, without reading it.

    Attributes:
        last_modified: When it was made, by the store's clock.
    """

    run_id: str
    role: str
    process: str
    last_modified: datetime

    @property
    def key(self) -> str:
        """Key of the mark."""
        return keys.hung_key(self.run_id, self.role, self.process)


def list_hangs(store: ObjectStore) -> list[HangName]:
    """Return all marks of a store from their names. Nothing is read."""
    found = ((keys.decode_hung_key(info.key), info.last_modified) for info in store.list(keys.hung_prefix()))
    return [HangName(*name, last_modified) for name, last_modified in found if name is not None]


def read_hang(store: ObjectStore, key: str) -> Hang | None:
    """Return a mark, or None where the process has gone on, or ended."""
    try:
        raw = store.get(key)
    except ObjectNotFoundError:
        return None
    hang: Hang = Hang.from_bytes(raw, f"{store.url}/{key}")
    return hang


def check_hung_after(seconds: float | None) -> None:
    """Refuse a limit that is none."""
    if seconds is None:
        return
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < math.inf:
        raise ConfigurationError(f"hung_after={seconds!r}: give seconds, more than 0, or None.")


@contextmanager
def expecting(sidecar: Sidecar | None, task: str, hung_after: float | None) -> Iterator[None]:
    """Expect progress of a loop whose turns may be of any size: none is judged until three are known.

    Raises:
        ConfigurationError: `hung_after` is no limit.
    """
    check_hung_after(hung_after)
    if sidecar is not None:
        sidecar.expect(task, hung_after, first=None)
    try:
        yield
    finally:
        if sidecar is not None:
            sidecar.relax(task)
