"""What is done and what is missing of a run, read from our commits, the storage itself and Dagster's events."""

import hashlib
from functools import cached_property
from typing import Any

import dagster as dg

from dagster_resilient import dagster_compat as compat
from dagster_resilient.io_managers import ResilientIOManager
from dagster_resilient.recovery import NOT_COMMITTED, AssetFacts
from dagster_resilient.resources import ResilientResource, series_of
from dagster_resilient.state.index import Head, heads
from dagster_resilient.state.records import ValueRef
from dagster_resilient.storage import keys
from dagster_resilient.values import present_values

_PROGRESS = frozenset({"checkpoint", "complete", "value"})


class RunFacts:
    """The facts about one failed run, within its group.

    A partition is done if this series committed it under the current code version and its objects are present. An asset
    that another IO manager stores is done by STEP_SUCCESS; STEP_OUTPUT comes before the value is written and counts for
    nothing. The same holds for an asset that has no output, or need not have one, and that left nothing in our store.

    Attributes:
        progressed: Whether the run itself committed anything. Known once `assets` was read.
    """

    def __init__(
        self,
        context: dg.SensorEvaluationContext,
        resource: ResilientResource,
        run: dg.DagsterRun,
        group: list[dg.DagsterRun],
    ) -> None:
        self._context, self._store, self._run = context, resource.store, run
        self._records = resource.records
        self._instance = context.instance
        self._repository: Any = context.repository_def
        series = series_of(run, context.instance.get_run_by_id)
        self._series = series
        self._group = [other for other in group if series_of(other, context.instance.get_run_by_id) == series]
        self._values: dict[tuple[tuple[str, ...], str | None], ValueRef] = {}
        self._reasons: dict[dg.AssetKey, dict[str | None, str]] = {}
        self.progressed = False

    @cached_property
    def assets(self) -> list[AssetFacts]:
        """The assets that the run targets, in topological order; empty for a job without assets."""
        return [self._facts(key) for key in compat.run_asset_keys(self._repository, self._run)]

    def _facts(self, key: dg.AssetKey) -> AssetFacts:
        partitions = tuple(compat.partition_keys_of_run(self._repository, self._run, key, self._instance))
        return AssetFacts(
            key=tuple(key.path),
            partitions=partitions,
            done=frozenset(self._done(key, partitions)),
            reasons=self._reasons.pop(key, {}),
            upstream=frozenset(tuple(parent.path) for parent in compat.upstream_keys(self._repository, key)),
            together=frozenset(tuple(other.path) for other in compat.assets_of_step(self._repository, key)),
        )

    def _done(self, key: dg.AssetKey, partitions: tuple[str | None, ...]) -> set[str | None]:
        path = tuple(key.path)
        found = heads(self._records, self._store, path, partitions)
        begun = {p: found[keys.partition_segment(p)] for p in partitions if keys.partition_segment(p) in found}
        if any(head.run_id == self._run.run_id and head.kind in _PROGRESS for head in begun.values()):
            self.progressed = True
        committed = {p: value for p, head in begun.items() if (value := self._committed(key, head))}
        mine = present_values(self._store, path, committed)
        self._values |= {(path, p): value for p, value in mine.items()}
        self._reasons[key] = {p: self._why_missing(key, head) for p, head in begun.items() if p not in mine}
        if self._must_have_committed(key):
            return set(mine)
        return {*mine, *(p for p in self._succeeded(key, partitions) if p not in begun)}

    def _must_have_committed(self, key: dg.AssetKey) -> bool:
        """Whether an asset cannot have succeeded without a value in our store."""
        return not compat.output_may_be_absent(self._repository, key) and compat.io_manager_is(
            self._repository, self._run.job_name, key, ResilientIOManager
        )

    def _committed(self, key: dg.AssetKey, head: Head) -> ValueRef | None:
        """Return the value that this series committed under the current code version."""
        if head.value is None or self._series not in head.committed_by:
            return None
        return head.value if head.value.fingerprint == self._fingerprint(key) else None

    def _why_missing(self, key: dg.AssetKey, head: Head) -> str:
        """Return why a partition that was begun is not done."""
        if head.series == self._series and head.newest_step is not None and self._series not in head.committed_by:
            return f"in training, goes on after step {head.newest_step}"
        if head.value is None:
            return NOT_COMMITTED
        if self._series not in head.committed_by:
            return "committed by another run group only"
        if head.value.fingerprint != self._fingerprint(key):
            was, now = (
                (f or "code:none").removeprefix("code:") for f in (head.value.fingerprint, self._fingerprint(key))
            )
            return f"code version was {was}, is {now}"
        return "its objects are gone"

    def _fingerprint(self, key: dg.AssetKey) -> str | None:
        code_version = self._repository.assets_defs_by_key[key].code_versions_by_key.get(key)
        return None if code_version is None else f"code:{code_version}"

    def _succeeded(self, key: dg.AssetKey, partitions: tuple[str | None, ...]) -> set[str | None]:
        """Partitions of the runs of the series in which the asset's step ended with success."""
        done: set[str | None] = set()
        for run in self._group:
            step = compat.step_key_of(self._repository, run.job_name, key)
            if step is not None and step in compat.successful_steps(self._instance, run.run_id):
                done |= set(compat.partition_keys_of_run(self._repository, run, key, self._instance))
        return done & set(partitions)

    def inputs(self) -> str:
        """Return a digest of what the run computes with: the declared code versions, and the newest data above it.

        An attempt that failed for good says nothing of new code or new data. It costs one query for each asset above.
        """
        targets = compat.run_asset_keys(self._repository, self._run)
        above = {parent for key in targets for parent in compat.upstream_keys(self._repository, key)} - set(targets)
        code = [f"{key.to_user_string()}={self._fingerprint(key)}" for key in targets]
        data = [f"{key.to_user_string()}={self._newest(key)}" for key in sorted(above)]
        return hashlib.blake2b("\n".join([*code, *data]).encode(), digest_size=8).hexdigest()

    def _newest(self, key: dg.AssetKey) -> int | None:
        """Return the number of an asset's newest materialization: of the run's partition, where both have the same."""
        partition = compat.shared_partition(self._repository, self._run, key, self._instance)
        wanted = dg.AssetRecordsFilter(key, asset_partitions=None if partition is None else [partition])
        found = self._instance.fetch_materializations(wanted, limit=1).records
        return found[0].storage_id if found else None

    def adopt_unrecorded(self) -> None:
        """Tell Dagster of values that were committed just before their run died, too late for its event."""
        run_ids = [run.run_id for run in self._group]
        for asset in self.assets:
            key = dg.AssetKey(list(asset.key))
            recorded = compat.materialized_partitions(self._instance, run_ids, key)
            for partition in sorted(asset.done - recorded, key=str):
                value = self._values.get((asset.key, partition))
                if value is not None and value.run_id in run_ids:
                    self._adopt(key, partition, value)

    def _adopt(self, key: dg.AssetKey, partition: str | None, value: ValueRef) -> None:
        metadata = {"resilient/adopted_from": value.run_id, "dagster/uri": f"{self._store.url}/{value.location}"}
        self._instance.report_runless_asset_event(dg.AssetMaterialization(key, partition=partition, metadata=metadata))
