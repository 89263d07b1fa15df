"""The contract suite once more, on S3 behind a network where every second request meets a fault, and they take turns.

In `make soak` the suite runs under each fault alone, too, which then meets every third request.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from proxy import S3Proxy
from s3_calls import BIG, FAULTS

from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.testing import ObjectStoreContract

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("quick")]

QUICK_FAULTS = [name for name in FAULTS if name not in {"never_answer", "stall_body"}]  # those wait for a timeout
MODES: dict[str, list[str]] = {"in turn": QUICK_FAULTS}
if os.environ.get("RESILIENT_SOAK") == "1":
    MODES |= {name: [name] for name in QUICK_FAULTS}


class TestS3ThroughFaults(ObjectStoreContract):
    """Every promise of a store holds while up to half of its requests fail."""

    @pytest.fixture(params=MODES)
    def opener(
        self, request: pytest.FixtureRequest, s3_proxy: S3Proxy, through: Callable[..., Any], s3_url: str
    ) -> Callable[[], ObjectStore]:
        """Each call opens the same place behind the proxy, whose faults have begun."""
        faults = MODES[request.param]
        every = max(2 * len(faults), 3)
        s3_proxy.plan(*(FAULTS[name](n=None, first=2 * n + 1, every=every) for n, name in enumerate(faults)))
        return lambda: through(s3_url)

    def test_objects_are_no_leftovers(self, store: ObjectStore) -> None:
        """An upload whose first answer was lost is known to nobody: it is shown, and can go without harm to objects."""
        store.put("big", BIG)
        for leftover in store.leftovers():
            store.discard(leftover)
        assert list(store.leftovers()) == []
        assert store.get("big") == BIG
