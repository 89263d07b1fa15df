"""What is done and what is missing of a run, read from our commits, the storage itself and Dagster's events."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import dagster as dg

from dagster_resilient import dagster_compat as compat
from dagster_resilient.briefs import Briefs
from dagster_resilient.recovery import NOT_COMMITTED, AssetFacts
from dagster_resilient.recovery.brief import AssetBrief, CheckBrief, Partition, RunBrief
from dagster_resilient.resources import ResilientResource, series_of
from dagster_resilient.state.index import Head, heads
from dagster_resilient.state.records import ValueRef
from dagster_resilient.storage import keys
from dagster_resilient.values import present_values

_PROGRESS = frozenset({"checkpoint", "complete", "value"})


class RunFacts:
    """The facts about one failed run, within its group. Each is looked up when it is first asked for.

    A partition is done if this series committed it under the current code version and its objects are present. An asset
    that another IO manager stores is done by STEP_SUCCESS; STEP_OUTPUT comes before the value is written and counts for
    nothing. The same holds for an asset that has no output, or need not have one, and that left nothing in our store.

    Attributes:
        progressed: Whether the run itself committed anything. Known once `assets` was read.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        resource: ResilientResource,
        briefs: Briefs,
        run: dg.DagsterRun,
        group: Sequence[dg.DagsterRun],
    ) -> None:
        self._instance, self._store, self._records = instance, resource.store, resource.records
        self._briefs, self._run, self._whole_group = briefs, run, group
        self._values: dict[tuple[tuple[str, ...], str | None], ValueRef] = {}
        self._reasons: dict[tuple[str, ...], dict[str | None, str]] = {}
        self.progressed = False

    @cached_property
    def brief(self) -> RunBrief:
        """What the run is to compute; of no assets, where nobody knows."""
        return self._briefs(self._run) or RunBrief(run_id=self._run.run_id, job_name=self._run.job_name)

    @cached_property
    def series(self) -> str:
        """The first run of the chain of resuming runs that the run continues."""
        return series_of(self._run, self._instance.get_run_by_id)

    @cached_property
    def _group(self) -> list[dg.DagsterRun]:
        return [run for run in self._whole_group if series_of(run, self._instance.get_run_by_id) == self.series]

    @cached_property
    def assets(self) -> list[AssetFacts]:
        """The assets that the run targets, in topological order; empty for a job without assets."""
        return [self._facts(asset) for asset in self.brief.assets]

    @property
    def values(self) -> dict[tuple[tuple[str, ...], str | None], ValueRef]:
        """What the series committed and is present, by asset and partition. Known once `assets` was read."""
        return self._values

    def _facts(self, asset: AssetBrief) -> AssetFacts:
        partitions = self.brief.partitions_of(asset)
        return AssetFacts(
            key=asset.key,
            partitions=partitions,
            done=frozenset(self._done(asset, partitions)),
            reasons=self._reasons.pop(asset.key, {}),
            upstream=frozenset(asset.upstream),
            together=frozenset(asset.together),
        )

    def _done(self, asset: AssetBrief, partitions: tuple[Partition, ...]) -> set[Partition]:
        found = heads(self._records, self._store, asset.key, partitions)
        begun = {p: found[keys.partition_segment(p)] for p in partitions if keys.partition_segment(p) in found}
        if any(head.run_id == self._run.run_id and head.kind in _PROGRESS for head in begun.values()):
            self.progressed = True
        committed = {p: value for p, head in begun.items() if (value := self._committed(asset, head))}
        mine = present_values(self._store, asset.key, committed)
        self._values |= {(asset.key, p): value for p, value in mine.items()}
        self._reasons[asset.key] = {p: self._why_missing(asset, head) for p, head in begun.items() if p not in mine}
        if gates := self.brief.gates_of(asset):
            return self._passed(asset, set(mine), gates)
        if asset.must_commit:
            return set(mine)
        succeeded = self._succeeded(asset, partitions)
        if len(mine) == len(partitions) > 1 and not succeeded:
            # A loop over partitions: it skips what is done, and what stands behind it in the step has not run.
            self._reasons[asset.key] = {partitions[-1]: "committed, but its step did not end"}
            return set(partitions[:-1])
        return {*mine, *(p for p in succeeded if p not in begun)}

    def _passed(self, asset: AssetBrief, committed: set[Partition], gates: tuple[str, ...]) -> set[Partition]:
        """Return the committed partitions whose step ended: only so has its blocking check passed.

        Without it, what is below would be computed from a value that the check refused, or never saw.
        """
        passed = committed & self._succeeded(asset, self.brief.partitions_of(asset))
        why = f"committed, but its step did not pass the blocking check {', '.join(gates)}"
        self._reasons[asset.key] |= dict.fromkeys(committed - passed, why)
        return passed

    def _committed(self, asset: AssetBrief, head: Head) -> ValueRef | None:
        """Return the value that this series committed under the current code version."""
        if head.value is None or self.series not in head.committed_by:
            return None
        return head.value if head.value.fingerprint == asset.fingerprint else None

    def _why_missing(self, asset: AssetBrief, head: Head) -> str:
        """Return why a partition that was begun is not done."""
        if head.series == self.series and head.newest_step is not None and self.series not in head.committed_by:
            return f"in training, goes on after step {head.newest_step}"
        if head.value is None:
            return NOT_COMMITTED
        if self.series not in head.committed_by:
            return "committed by another run group only"
        if head.value.fingerprint != asset.fingerprint:
            was, now = ((f or "code:none").removeprefix("code:") for f in (head.value.fingerprint, asset.fingerprint))
            return f"code version was {was}, is {now}"
        return "its objects are gone"

    def _succeeded(self, asset: AssetBrief, partitions: tuple[Partition, ...]) -> set[Partition]:
        """Partitions of the runs of the series in which the asset's step ended with success."""
        done: set[Partition] = set()
        for run in self._group:
            brief = self._briefs(run)
            same = next((other for other in brief.assets if other.key == asset.key), None) if brief else None
            if brief is not None and same is not None and same.step_key in self._successful_steps(run):
                done |= set(brief.partitions_of(same))
        return done & set(partitions)

    def _successful_steps(self, run: dg.DagsterRun) -> set[str]:
        if run.run_id not in self._steps:
            self._steps[run.run_id] = compat.successful_steps(self._instance, run.run_id)
        return self._steps[run.run_id]

    @cached_property
    def _steps(self) -> dict[str, set[str]]:
        return {}

    def stored_brief(self) -> RunBrief | None:
        """Return what the run's worker stored at its start, None where it did not get so far."""
        return self._records.get(keys.brief_key(self._run.run_id), RunBrief)

    def unevaluated_checks(self) -> tuple[CheckBrief, ...]:
        """Return the asset checks whose step has not succeeded in the series."""
        if not self.brief.checks:
            return ()
        done = set().union(*(self._successful_steps(run) for run in self._group))
        return tuple(check for check in self.brief.checks if check.step_key not in done)

    def inputs(self) -> str:
        """Return a digest of what the run computes with: the declared code versions, and the newest data above it.

        An attempt that failed for good says nothing of new code or new data. It costs one query for each asset above.
        """
        code = [f"{'/'.join(asset.key)}={asset.fingerprint}" for asset in self.brief.assets]
        data = [f"{'/'.join(key)}={newest}" for key, newest in self.newest_above().items()]
        return hashlib.blake2b("\n".join([*code, *data]).encode(), digest_size=8).hexdigest()

    def newest_above(self) -> dict[tuple[str, ...], int | None]:
        """Return the number of the newest materialization of each asset that the run reads and does not compute."""
        return {
            above.key: compat.newest_materialization(self._instance, dg.AssetKey(list(above.key)), above.partition)
            for above in self.brief.above
        }

    def adopt_unrecorded(self) -> None:
        """Tell Dagster of values that were committed just before their run died, too late for its event."""
        runs = {run.run_id: run for run in self._group}
        for asset, brief in zip(self.assets, self.brief.assets, strict=True):
            key = dg.AssetKey(list(asset.key))
            committed = {p: value for p in asset.partitions if (value := self._values.get((asset.key, p)))}
            recorded = compat.materialized_partitions(self._instance, runs, key) - self._torn(key, committed)
            for partition in sorted(committed.keys() - recorded, key=str):
                value = committed[partition]
                if value.run_id in runs:
                    made = self._adopted(key, partition, value)
                    compat.report_materialized(self._instance, runs[value.run_id], brief.step_key, made)

    def _torn(self, key: dg.AssetKey, committed: Mapping[Partition, ValueRef]) -> set[Partition]:
        """Return the partitions whose event stands in the run's log, and not in that of all assets.

        On SQLite Dagster writes it in two places. Only the last event of a run can lack the second.
        """
        last = {value.run_id: partition for partition, value in committed.items()}
        return {
            partition
            for run_id, partition in last.items()
            if not compat.is_materialized_by(self._instance, key, partition, run_id)
        }

    def _adopted(self, key: dg.AssetKey, partition: str | None, value: ValueRef) -> dg.AssetMaterialization:
        metadata = {"resilient/adopted_from": value.run_id, "dagster/uri": f"{self._store.url}/{value.location}"}
        return dg.AssetMaterialization(key, partition=partition, metadata=metadata)
