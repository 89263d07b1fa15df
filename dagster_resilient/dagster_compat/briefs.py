"""The brief of a run: what it computes, read off the definitions of its code location."""

from collections.abc import Iterator

import dagster as dg

from dagster_resilient.dagster_compat.definitions import (
    assets_of_step,
    io_manager_is,
    job_of_run,
    job_step_key,
    jobs_asset_keys,
    node_of,
    output_may_be_absent,
    upstream_keys,
)
from dagster_resilient.dagster_compat.partitions import partition_keys_of_run, shared_partition
from dagster_resilient.recovery.brief import AboveBrief, AssetBrief, CheckBrief, PartitionList, RunBrief

# A run that recovery looks at has ended just now: hardly anybody can have materialized the same since.
_NEWEST = 20


def brief_of(
    repository_def: dg.RepositoryDefinition,
    run: dg.DagsterRun,
    instance: dg.DagsterInstance,
    io_manager_class: type[dg.ConfigurableIOManager],
) -> RunBrief:
    """Return what a run computes, as its code stands now.

    Args:
        repository_def: The definitions of the run's code location.
        run: The run.
        instance: For dynamic partitions, and the newest materialization of what the run reads.
        io_manager_class: The class of the IO managers that commit into our store.

    Raises:
        ConfigurationError: The job is gone, or the definition lacks a partition that the run names.

    Private: as the functions of `definitions` and `partitions` that it calls.
    """
    maker = _Brief(repository_def, run, instance, io_manager_class)
    return maker.make()


class _Brief:
    """The lists of partitions are found once per partitions definition: 100,000 keys take a while."""

    def __init__(
        self,
        repository_def: dg.RepositoryDefinition,
        run: dg.DagsterRun,
        instance: dg.DagsterInstance,
        io_manager_class: type[dg.ConfigurableIOManager],
    ) -> None:
        self._repository, self._run, self._instance, self._class = repository_def, run, instance, io_manager_class
        self._job = job_of_run(repository_def, run)
        self._definitions: list[dg.PartitionsDefinition[str]] = []
        self._lists: list[PartitionList] = []

    def make(self) -> RunBrief:
        keys = jobs_asset_keys(self._repository, self._job, self._run)
        return RunBrief(
            run_id=self._run.run_id,
            job_name=self._run.job_name,
            assets=tuple(self._asset(key) for key in keys),
            checks=tuple(self._checks()),
            partitions=tuple(self._lists),
            above=tuple(self._above(keys)),
        )

    def _asset(self, key: dg.AssetKey) -> AssetBrief:
        code_version = self._repository.assets_defs_by_key[key].code_versions_by_key.get(key)
        ours = io_manager_is(self._repository, self._run.job_name, key, self._class)
        return AssetBrief(
            key=tuple(key.path),
            partitions=self._partitions(key),
            upstream=_paths(upstream_keys(self._repository, key)),
            together=_paths(assets_of_step(self._repository, key)),
            fingerprint=None if code_version is None else f"code:{code_version}",
            step_key=job_step_key(self._job, key),
            must_commit=ours and not output_may_be_absent(self._repository, key),
        )

    def _partitions(self, key: dg.AssetKey) -> int | None:
        definition = node_of(self._repository, key).partitions_def
        if definition is None:
            return None
        if definition in self._definitions:
            return self._definitions.index(definition)
        keys = partition_keys_of_run(self._repository, self._run, key, self._instance)
        if keys == [None]:
            return None
        dimensions: tuple[str, ...] = ()
        if isinstance(definition, dg.MultiPartitionsDefinition):
            dimensions = tuple(dimension.name for dimension in definition.partitions_defs)
        self._definitions.append(definition)
        self._lists.append(PartitionList.of([str(key) for key in keys], dimensions))
        return len(self._lists) - 1

    def _checks(self) -> Iterator[CheckBrief]:
        """Checks that the run selected. Private: `AssetLayer.data` of the job cut down to the run's selection."""
        nodes = {node.name for node in self._job.nodes}
        for data in self._job.asset_layer.data:
            for key in sorted(data.assets_def.check_keys, key=str) if data.node_handle.name in nodes else ():
                step = str(self._job.asset_layer.get_op_output_handle(key).node_handle)
                blocking = data.assets_def.get_spec_for_check_key(key).blocking
                yield CheckBrief(asset=tuple(key.asset_key.path), name=key.name, step_key=step, blocking=blocking)

    def _above(self, keys: list[dg.AssetKey]) -> Iterator[AboveBrief]:
        above = {parent for key in keys for parent in upstream_keys(self._repository, key)} - set(keys)
        for key in sorted(above):
            partition = shared_partition(self._repository, self._run, key, self._instance)
            newest = newest_materialization(self._instance, key, partition)
            yield AboveBrief(key=tuple(key.path), partition=partition, newest=newest)


def _paths(keys: set[dg.AssetKey]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(tuple(key.path) for key in keys))


def newest_materialization(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str | None) -> int | None:
    """Return the number of an asset's newest materialization, of one partition if it is given."""
    wanted = dg.AssetRecordsFilter(key, asset_partitions=None if partition is None else [partition])
    found = instance.fetch_materializations(wanted, limit=1).records
    return found[0].storage_id if found else None


def is_materialized_by(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str | None, run_id: str) -> bool:
    """Return whether one of the newest materializations of an asset, of one partition if it is given, is a run's."""
    wanted = dg.AssetRecordsFilter(key, asset_partitions=None if partition is None else [partition])
    return any(record.run_id == run_id for record in instance.fetch_materializations(wanted, limit=_NEWEST).records)
