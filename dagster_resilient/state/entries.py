"""How one entry of a task's log follows from the one before it. Pure: nothing is read or written."""

from __future__ import annotations

import uuid
from typing import Any

from dagster_resilient.state.records import Claim, Entry, Kind, Owner

_ATTEMPTS_KEPT = 256


def next_entry(
    head: Entry | None,
    kind: Kind,
    change: dict[str, Any],
    *,
    claim: Claim,
    asset: tuple[str, ...],
    partition_key: str | None,
) -> Entry:
    """Return the entry behind `head`: its state, with a change, by the try of a claim."""
    fields: dict[str, Any] = {name: getattr(head, name) for name in Entry.model_fields} if head else {}
    attempts = dict(fields.get("attempts", {}))
    newest = max(attempts.pop(claim.root, 0), claim.attempt)
    attempts[claim.root] = newest
    fields |= {
        "n": (head.n if head else 0) + 1,
        "op": uuid.uuid4().hex,
        "parent_op": head.op if head else None,
        "kind": kind,
        "run_id": claim.run_id,
        "asset": asset,
        "partition_key": partition_key,
        "attempts": dict(list(attempts.items())[-_ATTEMPTS_KEPT:]),
    }
    return Entry(**(fields | change))


def acquisition(head: Entry | None, claim: Claim, owner: Owner, fingerprint: str | None) -> dict[str, Any]:
    """Return the change by which a new generation begins. It starts from the checkpoints of its own series only."""
    resumes = head is not None and head.series == claim.series and head.fingerprint == fingerprint
    n, generation = (head.n + 1, head.generation + 1) if head else (1, 1)
    starts = (*(head.generation_starts if head else ()), n)
    change: dict[str, Any] = {"generation": generation, "generation_starts": starts, "owner": owner}
    change |= {"series": claim.series, "fingerprint": fingerprint}
    if not resumes:
        change |= {"checkpoints": (), "training_done": False, "failures": 0}
    elif head is not None and head.owner is not None:
        change |= {"failures": head.failures + 1}
    return change
