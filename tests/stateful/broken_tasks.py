"""Tasks with one rule broken each, for the planted bugs."""

from __future__ import annotations

from typing import Any

from dagster_resilient.errors import FencedError, StorageError
from dagster_resilient.state import task as task_module
from dagster_resilient.state.fences import read_fence
from dagster_resilient.state.records import Entry
from dagster_resilient.state.task import DurableTask


class FenceFirst(DurableTask):
    """Reads the fence, then the head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        head = self.log.head

        def read(**_: Any) -> Entry | None:
            self.seen = read_fence(self.records, self.claim.run_id)
            return head()

        self.log.head = read  # type: ignore[method-assign]

    def _admit(self, head: Entry | None) -> None:
        self._refuse_superseded(head)
        if self.seen is not None:
            raise FencedError("fenced")


class NoAttempts(FenceFirst):
    """Neither reads in the right order nor compares attempts."""

    def _refuse_superseded(self, head: Entry | None) -> None:
        pass


class Late(DurableTask):
    """Takes the time of the reply for the time of the request."""

    def _hold(self, entry: Entry, sent_at: float) -> None:
        super()._hold(entry, self.boottime())


class Stubborn(DurableTask):
    """Writes behind whatever came in between."""

    def _rebased(self, head: Entry | None, mine: Entry) -> Entry:
        return head if head is not None and self._is_my_lease(head, mine) else super()._rebased(head, mine)


class Adopting(DurableTask):
    """Builds upon the head that carries its commit on, whoever wrote it."""

    def _commit(self, kind: Any, change: Any, holds: Any) -> Entry:
        after = super()._commit(kind, change, holds)
        if self._is_my_lease(after, self._lease()):
            self._hold(after, self.boottime())
        return after


class Trusting(DurableTask):
    """Looks behind a commit for the age of its parent only, whatever became of its earlier creates."""

    def _append(self, entry: Entry) -> bool:
        fresh = self.boottime() - self._read_at < task_module._FRESH_SECONDS
        return self.log.append(entry) and (fresh or self.log.stands(entry))


class TrustingRefusals(Trusting):
    """Looks behind a commit after a create that nobody answered, not after one that was refused."""

    def _append(self, entry: Entry) -> bool:
        try:
            return super()._append(entry)
        except StorageError:
            self._read_at = float("-inf")
            raise
