"""One try of a run in one process: its claim, its heartbeat, and the tasks as it sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.state.fences import claim_attempt
from dagster_resilient.state.heartbeat import Sidecar, ensure_sidecar, store_now
from dagster_resilient.state.notice import Notice
from dagster_resilient.state.owner import start_ticks, this_process
from dagster_resilient.state.preemption import mark_preempted
from dagster_resilient.state.records import Claim, Owner
from dagster_resilient.state.store import ObjectRecords, RecordStore
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.storage.probe import require_create
from dagster_resilient.storage.retry import OUTAGE_PATIENCE, hasty

DEFAULT_INTERVAL = 10.0
DEFAULT_TTL = 45.0


@dataclass(frozen=True)
class Attempt:
    """One try of a run, in one process: its claim, its owner record and its heartbeat.

    Attributes:
        store: Where data is kept.
        claim: The try's place in its lineage.
        owner: This process.
        sidecar: The heartbeat process, None for a store that no other process could see.
        records: Where state is kept.
        displaces_live: See `DurableTask`.
        worker: Process id and start time of the run worker, None where no run worker started this process.
        cancelled: Tells whether a user wants the end of the run; see `Notice`.
    """

    store: ObjectStore
    claim: Claim
    owner: Owner
    sidecar: Sidecar | None
    records: RecordStore
    displaces_live: bool = True
    worker: tuple[int, int] | None = None
    cancelled: Callable[[], bool] | None = None

    def durable(
        self,
        asset: tuple[str, ...],
        partition_key: str | None,
        fingerprint: str | None = None,
        *,
        patience: float = OUTAGE_PATIENCE,
    ) -> DurableTask:
        """Return the durable state of one asset partition as this try sees it.

        Args:
            asset: Parts of the asset key.
            partition_key: The partition, None for an unpartitioned asset.
            fingerprint: What makes earlier state of the series reusable.
            patience: Seconds that one call to the store may spend in retries.
        """
        return DurableTask(
            store=hasty(self.store, patience),
            asset=asset,
            partition_key=partition_key,
            claim=self.claim,
            owner=self.owner,
            now=partial(store_now, self.store, self.owner.process),
            fingerprint=fingerprint,
            progress=self._progress,
            fenced=self.sidecar.fenced if self.sidecar else lambda: None,
            displaces_live=self.displaces_live,
            records=hasty(self.records, patience),
            notice=self.notice,
            mark_preempted=self.mark_preempted,
            **self._told(),
        )

    def notice(self) -> Notice:
        """Return a listener for being told to leave."""
        return Notice(self.cancelled, alone=self.worker is not None)

    def mark_preempted(self, task: str, signal: str) -> None:
        """Record that the run was told to leave.

        Not that of a script, whom nobody recovers. Nor that of an orphan: its heartbeat process ends it, since the run
        worker has died, and that is what the run died of.
        """
        if self.worker is not None and start_ticks(self.worker[0]) == self.worker[1]:
            mark_preempted(self.records, self.claim.run_id, task=task, signal=signal, host=self.owner.host)

    def _told(self) -> dict[str, Any]:
        """How the heartbeat process is told what to look at. It can read logs in the object store only."""
        if self.sidecar is None:
            return {}
        sidecar = self.sidecar
        told: dict[str, Any] = {"expect": sidecar.expect, "relax": sidecar.relax}
        if isinstance(self.records, ObjectRecords):
            told["watch"] = lambda prefix, generation, task: sidecar.watch(prefix, generation, task=task)
            told["unwatch"] = sidecar.unwatch
        return told

    def _progress(self, fields: dict[str, Any]) -> None:
        if self.sidecar is not None:
            self.sidecar.progress(**fields)


def begin_attempt(
    store: ObjectStore,
    *,
    run_id: str,
    root: str,
    series: str,
    instance_id: str,
    interval: float = DEFAULT_INTERVAL,
    ttl: float = DEFAULT_TTL,
    worker: tuple[int, int] | None = None,
    displaces_live: bool = True,
    records: RecordStore | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Attempt:
    """Begin one try: start the heartbeat without waiting for it, and claim the try's number before any work.

    Args:
        store: Where data, heartbeats and, by default, state are kept.
        run_id: The run.
        root: Root run of its group.
        series: First run of the chain of resuming runs that it continues.
        instance_id: Which host instance the run belongs to; a sensor ignores runs of instances that it does not know.
        interval: Seconds between heartbeats.
        ttl: Seconds without a heartbeat after which this process counts as lost.
        worker: Process id and start time of the run worker, whose death makes this process an orphan.
        displaces_live: See `DurableTask`.
        records: Where state is kept, if not beside the data.
        cancelled: Tells whether a user wants the end of the run. A thread asks it when a signal comes.

    Raises:
        ConfigurationError: The store ignores create-if-absent, on which everything rests, and is to keep the state.
    """
    if records is None:
        require_create(store)
    kept: RecordStore = records or ObjectRecords(store)
    sidecar = ensure_sidecar(
        store, run_id=run_id, root=root, role="step", instance_id=instance_id, interval=interval, ttl=ttl, worker=worker
    )
    claim = claim_attempt(kept, root=root, run_id=run_id, series=series)
    owner = this_process(claim, heartbeat=sidecar.key if sidecar else None, interval=interval, ttl=ttl)
    return Attempt(hasty(store, OUTAGE_PATIENCE), claim, owner, sidecar, kept, displaces_live, worker, cancelled)


def heartbeat_interval(interval: float | None, ttl: float) -> float:
    """Return the seconds between two heartbeats.

    Args:
        interval: As it was set; None: in proportion to the TTL, 10 s for 45 s.
        ttl: Seconds without a heartbeat after which a process counts as lost.

    Raises:
        ConfigurationError: A single missed beat would use up the TTL.
    """
    chosen = ttl * DEFAULT_INTERVAL / DEFAULT_TTL if interval is None else interval
    if chosen <= 0 or ttl < 2 * chosen:
        raise ConfigurationError(
            f"heartbeat_seconds={interval} and ttl_seconds={ttl}: the interval must be positive, and the TTL at least "
            "twice the interval. Leave out heartbeat_seconds for one that suits the TTL."
        )
    return chosen
