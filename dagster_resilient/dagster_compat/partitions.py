"""Which partitions a run targets, and the tags that make a run target some."""

from collections.abc import Iterable
from typing import Any

import dagster as dg
from dagster._core.storage import tags as dagster_tags

from dagster_resilient.dagster_compat.definitions import node_of
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.recovery.brief import Partition, PartitionList

_START, _END = dagster_tags.ASSET_PARTITION_RANGE_START_TAG, dagster_tags.ASSET_PARTITION_RANGE_END_TAG
# Between the parts of a multi-partition key, which stand in the order of their dimensions' names.
_DELIMITER = "|"


def partition_keys_of_run(
    repository_def: dg.RepositoryDefinition, run: dg.DagsterRun, asset_key: dg.AssetKey, instance: dg.DagsterInstance
) -> list[str | None]:
    """Return the partition keys that a run targets for an asset, in definition order; [None] where it targets none.

    Raises:
        ConfigurationError: The definition has changed since: it lacks a key that the run names, and for a range nothing
            tells which of its keys lay inside.

    Private: the tags' names, and `PartitionsDefinition.get_partition_keys_in_range`, which the step itself uses.
    """
    partitions_def = node_of(repository_def, asset_key).partitions_def
    bounds = partition_bounds(run)
    if partitions_def is None or bounds is None:
        return [None]
    start, end = bounds
    with dg.partition_loading_context(dynamic_partitions_store=instance):
        gone = [key for key in dict.fromkeys((start, end)) if not partitions_def.has_partition_key(key)]
        left = _left_of_window(partitions_def, start, end) if gone else []
        if gone and not left:
            names = ", ".join(map(repr, gone))
            raise ConfigurationError(f"{asset_key.to_user_string()} has no partition {names} any more.")
        wanted = dg.PartitionKeyRange(left[0], left[-1]) if left else dg.PartitionKeyRange(start, end)
        return [str(key) for key in partitions_def.get_partition_keys_in_range(wanted)]


def shared_partition(
    repository_def: dg.RepositoryDefinition, run: dg.DagsterRun, asset_key: dg.AssetKey, instance: dg.DagsterInstance
) -> str | None:
    """Return the one partition that a run targets, if another asset has a partition of that name.

    Private: the tags' names, and `RepositoryDefinition.asset_graph`.
    """
    partition = run.tags.get(dagster_tags.PARTITION_NAME_TAG)
    if partition is None or not repository_def.asset_graph.has(asset_key):
        return None
    definition = node_of(repository_def, asset_key).partitions_def
    with dg.partition_loading_context(dynamic_partitions_store=instance):
        return partition if definition is not None and definition.has_partition_key(partition) else None


def _left_of_window(definition: dg.PartitionsDefinition[Any], start: str, end: str) -> list[str]:
    """Return the keys of a range of times that still exist: such keys have an order of their own.

    Private: `TimeWindowPartitionsDefinition.start_time_for_partition_key`.
    """
    if start == end or not isinstance(definition, dg.TimeWindowPartitionsDefinition):
        return []
    try:
        first, last = (definition.start_time_for_partition_key(key) for key in (start, end))
    except ValueError:  # keys of another form: the definition was of another kind
        return []
    keys = definition.get_partition_keys()
    return [key for key in keys if first <= definition.start_time_for_partition_key(key) <= last]


def partition_tags(wanted: Iterable[Partition], lists: Iterable[PartitionList]) -> dict[str, str]:
    """Return the tags of a run over some partitions; none where all are unpartitioned.

    One key is named as such. Several become the smallest range that holds them all: a run targets one contiguous range,
    of multi-partition keys a box, and the same one for each of its assets.

    Args:
        wanted: Partition keys; None stands for an unpartitioned asset.
        lists: The partitions that the run to be re-executed targets, of each of its partitions definitions.

    Raises:
        ConfigurationError: No list holds all of the keys.

    Private: the tags' names.
    """
    keys = {key for key in wanted if key is not None}
    if not keys:
        return {}
    for partitions in lists:
        if keys <= set(partitions.all):
            return _tags_of(*_hull(partitions, keys), partitions.dimensions)
    raise ConfigurationError(
        f"No run can hold the partitions {sorted(keys)[:10]}: none of the run's assets has them all. Launch one run "
        "per partitions definition."
    )


def _tags_of(start: str, end: str, dimensions: tuple[str, ...]) -> dict[str, str]:
    if start != end:
        return {_START: start, _END: end}
    sides = zip(dimensions, start.split(_DELIMITER), strict=True) if dimensions else ()
    by_side = {f"{dagster_tags.MULTIDIMENSIONAL_PARTITION_PREFIX}{name}": part for name, part in sides}
    return {dagster_tags.PARTITION_NAME_TAG: start, **by_side}


def _hull(partitions: PartitionList, wanted: set[str]) -> tuple[str, str]:
    """Return the first and last of some keys.

    Dagster reads a range of multi-partition keys dimension by dimension, so that is how its ends are found.
    """
    found = [key for key in partitions.all if key in wanted]
    if not partitions.dimensions:
        return found[0], found[-1]
    orders = [list(dict.fromkeys(side)) for side in zip(*(k.split(_DELIMITER) for k in partitions.all), strict=True)]
    places = [[o.index(part) for o, part in zip(orders, key.split(_DELIMITER), strict=True)] for key in found]
    low, high = ([choose(side) for side in zip(*places, strict=True)] for choose in (min, max))
    start, end = (_DELIMITER.join(o[i] for o, i in zip(orders, place, strict=True)) for place in (low, high))
    return start, end


def partition_bounds(run: dg.DagsterRun) -> tuple[str, str] | None:
    """Return the first and last partition key that a run names, None where it names none. Private: the tags' names."""
    start = run.tags.get(_START, run.tags.get(dagster_tags.PARTITION_NAME_TAG))
    return None if start is None else (start, run.tags.get(_END, start))


def is_partition_tag(key: str) -> bool:
    """Return whether a tag says which partitions a run targets. Private: the tags' names."""
    names = (_START, _END, dagster_tags.PARTITION_NAME_TAG, dagster_tags.PARTITION_SET_TAG)
    return key in names or key.startswith(dagster_tags.MULTIDIMENSIONAL_PARTITION_PREFIX)
