"""The numbered log of a task. Its one primitive is create-if-absent of entry n+1 by a writer that has read entry n."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from dagster_resilient.errors import StoreUnavailableError
from dagster_resilient.state.records import Entry
from dagster_resilient.state.store import RecordStore
from dagster_resilient.storage import keys

KEEP_ENTRIES = 50
KEEP_FOR = timedelta(hours=1)
_LOOKS = 20
_NAME = re.compile(r"(\d{10})\.json")


class NumberedLog:
    """Entries ``<prefix>/<n>.json``, where the highest number is the current state."""

    def __init__(self, records: RecordStore, prefix: str) -> None:
        self._records = records
        self._prefix = f"{prefix}/"

    def key(self, n: int) -> str:
        """Return the key of entry n."""
        return f"{self._prefix}{keys.numbered(n)}.json"

    def get(self, n: int) -> Entry | None:
        """Return entry n, or None where it was never written or has been trimmed."""
        return self._records.get(self.key(n), Entry)

    def numbers(self) -> dict[int, datetime]:
        """Return the numbers that are listed, with their times by the store's clock."""
        found: dict[int, datetime] = {}
        for info in self._records.list(self._prefix):
            match = _NAME.fullmatch(info.key.removeprefix(self._prefix))
            if match:
                found[int(match[1])] = info.last_modified
        return found

    def head(self, *, prove_absence: bool = True) -> Entry | None:
        """Return the newest entry, or None for a task that was never begun.

        The head is found by LIST, never by walking on from a number that is known: between two looks that number may
        have been trimmed, created anew by a zombie, and then lead to a dead end.

        A listing that races with deletes can come back empty or stale. Entry 1 is kept for ever, so "empty" is believed
        only where entry 1 is absent too.

        Raises:
            StoreUnavailableError: The listing contradicted the entries every time.
        """
        for _ in range(_LOOKS):
            newest = max(self.numbers(), default=0)
            if newest == 0 and not prove_absence:
                return None
            entry = self.get(newest or 1)
            if newest == 0 and entry is None:
                return None
            if newest > 0 and entry is not None:
                return entry
        raise self._contradicted()

    def _contradicted(self) -> StoreUnavailableError:
        message = f"The listing of {self._records.url}/{self._prefix} contradicts its entries after {_LOOKS} looks."
        return StoreUnavailableError(message, store=self._records.url, key=self._prefix)

    def append(self, entry: Entry) -> bool:
        """Create an entry; False where its number is taken by another one."""
        return self._records.create(self.key(entry.n), entry)

    def stands(self, entry: Entry) -> bool:
        """Whether an entry that was created is part of the history.

        An entry can be created far behind the head, where the number was free only because it had been trimmed. It
        stands if it is the head, or if the next entry names it as its parent. Where the next entry is gone, the log has
        moved on by more than `KEEP_ENTRIES`: the caller must look in the head for its change.

        Raises:
            StoreUnavailableError: The listing showed every time less than what was written before it.
        """
        for _ in range(_LOOKS):
            newest = max(self.numbers(), default=0)
            if newest == entry.n:
                return True
            if newest > entry.n:
                following = self.get(entry.n + 1)
                return following is not None and following.parent_op == entry.op
            # Raced by deletes, the listing came back empty. Taken for "nothing is behind it", it would make two owners.
        raise self._contradicted()

    def trim(self, head: Entry) -> list[int]:
        """Delete entries that no process can still need; return their numbers.

        Kept are the last `KEEP_ENTRIES`, everything superseded for less than `KEEP_FOR`, the first entry of each
        generation, and entry 1. The generations' first entries are what stops a zombie: its create of the number after
        its own last entry is refused for ever. Ages are differences of the store's own times.
        """
        times = self.numbers()
        if head.n not in times:
            return []
        kept = {1, *head.generation_starts}
        old = [
            n
            for n in sorted(times)
            if n <= head.n - KEEP_ENTRIES and n not in kept and self._superseded_for(times, n, head.n) >= KEEP_FOR
        ]
        self._records.delete([self.key(n) for n in old])
        return old

    @staticmethod
    def _superseded_for(times: dict[int, datetime], n: int, head: int) -> timedelta:
        return times[head] - times.get(n + 1, times[head])

    def history(self) -> list[Entry]:
        """Return all entries that are left, oldest first."""
        return [entry for entry in (self.get(n) for n in sorted(self.numbers())) if entry is not None]
