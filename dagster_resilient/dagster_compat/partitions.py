"""Which partitions a run targets, and the tags that make a run target some."""

from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg
from dagster._core.storage import tags as dagster_tags

from dagster_resilient.dagster_compat.definitions import node_of
from dagster_resilient.errors import ConfigurationError

_START, _END = dagster_tags.ASSET_PARTITION_RANGE_START_TAG, dagster_tags.ASSET_PARTITION_RANGE_END_TAG


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
    start = run.tags.get(_START, run.tags.get(dagster_tags.PARTITION_NAME_TAG))
    if partitions_def is None or start is None:
        return [None]
    end = run.tags.get(_END, start)
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


def partition_tags(
    repository_def: dg.RepositoryDefinition,
    wanted: Mapping[dg.AssetKey, Iterable[str | None]],
    instance: dg.DagsterInstance,
) -> dict[str, str]:
    """Return the tags of a run over these partitions of these assets; none where all are unpartitioned.

    One key is named as such. Several become the smallest range that holds them all: a run targets one contiguous range,
    of multi-partition keys a box, and the same one for each of its assets.

    Raises:
        ConfigurationError: No asset's partitions hold all of the keys.

    Private: the tags' names, and `PartitionsDefinition.get_tags_for_partition_key` (it adds a tag per dimension).
    """
    keys = {key for asset_keys in wanted.values() for key in asset_keys if key is not None}
    if not keys:
        return {}
    definitions = [node_of(repository_def, asset_key).partitions_def for asset_key in wanted]
    with dg.partition_loading_context(dynamic_partitions_store=instance):
        for definition in definitions:
            hull = None if definition is None else _hull(definition, keys)
            if definition is not None and hull is not None:
                return _tags_of(definition, *hull)
    names = ", ".join(asset_key.to_user_string() for asset_key in wanted)
    raise ConfigurationError(
        f"No run can hold the partitions {sorted(keys)} of {names}: none of these assets has them all. Launch one run "
        "per partitions definition."
    )


def _tags_of(definition: dg.PartitionsDefinition[Any], start: str, end: str) -> dict[str, str]:
    return dict(definition.get_tags_for_partition_key(start)) if start == end else {_START: start, _END: end}


def _hull(definition: dg.PartitionsDefinition[Any], wanted: set[str]) -> tuple[str, str] | None:
    """Return the first and last of some keys, or None where the definition lacks one.

    Dagster reads a range of multi-partition keys dimension by dimension, so that is how its ends are found.
    """
    if not isinstance(definition, dg.MultiPartitionsDefinition):
        found = [str(key) for key in definition.get_partition_keys() if key in wanted]
        return (found[0], found[-1]) if len(found) == len(wanted) else None
    if any(not definition.has_partition_key(key) for key in wanted):
        return None
    keys = [definition.get_partition_key_from_str(key).keys_by_dimension for key in wanted]
    sides = {d.name: _hull(d.partitions_def, {key[d.name] for key in keys}) for d in definition.partitions_defs}
    start, end = ({name: side[at] for name, side in sides.items() if side is not None} for at in (0, 1))
    return str(dg.MultiPartitionKey(start)), str(dg.MultiPartitionKey(end))


def is_partition_tag(key: str) -> bool:
    """Return whether a tag says which partitions a run targets. Private: the tags' names."""
    names = (_START, _END, dagster_tags.PARTITION_NAME_TAG, dagster_tags.PARTITION_SET_TAG)
    return key in names or key.startswith(dagster_tags.MULTIDIMENSIONAL_PARTITION_PREFIX)
