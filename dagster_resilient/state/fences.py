"""Fences and claims: which runs may not commit any more, and in which order the tries of a lineage began.

Both are created once and never deleted.
"""

from __future__ import annotations

import re
import uuid

from dagster_resilient.errors import StoreUnavailableError
from dagster_resilient.state.records import Claim, Fence
from dagster_resilient.state.store import RecordStore
from dagster_resilient.storage import keys

_CLAIM_TRIES = 1000


def fence_run(records: RecordStore, run_id: str, *, reason: str, failure_class: str, by: str) -> bool:
    """Forbid a run to commit anything more. False where it was fenced before; the first reason stands."""
    return records.create(
        keys.fence_key(run_id), Fence(run_id=run_id, reason=reason, failure_class=failure_class, by=by)
    )


def read_fence(records: RecordStore, run_id: str) -> Fence | None:
    """Return the fence of a run, or None where it may commit."""
    return records.get(keys.fence_key(run_id), Fence)


def claim_attempt(
    records: RecordStore, *, root: str, run_id: str, series: str, previous_attempt_count: int = 0
) -> Claim:
    """Claim the next number among the tries of a lineage.

    Made when the process starts, before any work: an orphan that computes for longer still has the lower number.

    Raises:
        StoreUnavailableError: So many processes claim at once that none of the tries won a number.
    """
    prefix = keys.claim_prefix(root)
    op = uuid.uuid4().hex
    attempt = _highest(records, prefix)
    for _ in range(_CLAIM_TRIES):
        attempt += 1
        claim = Claim(
            root=root,
            attempt=attempt,
            run_id=run_id,
            series=series,
            previous_attempt_count=previous_attempt_count,
            op=op,
        )
        if records.create(f"{prefix}{keys.numbered(attempt)}.json", claim):
            return claim
    raise StoreUnavailableError(
        f"No free number under {records.url}/{prefix} in {_CLAIM_TRIES} tries.", store=records.url
    )


def _highest(records: RecordStore, prefix: str) -> int:
    names = (info.key.removeprefix(prefix) for info in records.list(prefix))
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"(\d{10})\.json", name))), default=0)
