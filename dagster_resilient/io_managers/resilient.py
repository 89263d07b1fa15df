"""`ResilientIOManager`: codec by type, versioned objects, the manifest last, every byte verified on load.

No postponed annotations here: Dagster reads the fields' types.
"""

import typing
from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.metadata import value_metadata
from dagster_resilient.resources import ResilientResource
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.retry import OUTAGE_PATIENCE, hasty
from dagster_resilient.values import StoredValue, load_value, load_values, store_value


class ResilientIOManager(dg.ConfigurableIOManager):
    """Stores outputs as committed values of their task.

    Attributes:
        resilient: Where values are kept, and whose fences and attempts a commit obeys.
    """

    resilient: dg.ResourceDependency[ResilientResource]

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Commit an output; under a run over a range, one partition after the other.

        Raises:
            UnsupportedValueError: A value that no codec can store exactly. The previous value stands.
            ConfigurationError: The asset is partitioned, and the run targets none of its partitions. Under a range: the
                output is no dict of exactly the run's partitions.
            FencedError: A newer run or attempt has taken over.
        """
        path = _path(context, self.resilient)
        fingerprint = _fingerprint(context) if context.has_asset_key else None
        attempt = self.resilient.attempt()
        partitions = list(context.asset_partition_keys) if context.has_asset_partitions else []
        if len(partitions) <= 1:
            _check_targets(context, partitions)
            only = partitions[0] if partitions else None
            stored = store_value(attempt.durable(path, only, fingerprint), obj)
            context.add_output_metadata(self._shown(stored, partitioned=bool(partitions)))
            return
        _check_range(context, partitions, obj)
        ordered = _in_definition_order(context, partitions)
        whole = [
            self._commit_partition(context, attempt.durable(path, key, fingerprint), key, obj[key]) for key in ordered
        ]
        context.add_output_metadata({"resilient/bytes": sum(one.size for one in whole)})

    def _commit_partition(self, context: dg.OutputContext, task: DurableTask, key: str, value: Any) -> StoredValue:
        stored = store_value(task, value)
        context.log_event(
            dg.AssetMaterialization(
                asset_key=context.asset_key, partition=key, metadata=self._shown(stored, partitioned=True)
            )
        )
        return stored

    def _shown(self, stored: StoredValue, *, partitioned: bool) -> Mapping[str, Any]:
        return value_metadata(stored, partitioned=partitioned, preview_rows=self.resilient.preview_rows)

    def load_input(self, context: dg.InputContext) -> Any:
        """Load a value, or for several partitions a dict in partition order.

        A table comes as the class of tables that the input's annotation names, whatever library stored it.

        Raises:
            ValueNotFoundError: Partitions were never materialized. Names them, before anything is loaded.
            IntegrityError: An object is missing or damaged.
        """
        path = (
            _path(context.upstream_output or context, self.resilient)
            if not context.has_asset_key
            else tuple(context.asset_key.path)
        )
        store = hasty(self.resilient.store, OUTAGE_PATIENCE)
        records = hasty(self.resilient.records, OUTAGE_PATIENCE)
        if not context.has_asset_partitions:
            return load_value(store, path, None, records=records, wanted=_hint(context))
        partitions = [str(key) for key in context.asset_partition_keys]
        if len(partitions) == 1:
            return load_value(store, path, partitions[0], records=records, wanted=_hint(context))
        wanted = _hint_of_values(_hint(context))
        return load_values(store, path, _in_definition_order(context, partitions), records, wanted=wanted)


def _hint(context: dg.InputContext) -> Any:
    return getattr(context.dagster_type, "typing_type", None)


def _hint_of_values(hint: Any) -> Any:
    """Return the `X` of an annotation `dict[str, X]`."""
    arguments = typing.get_args(hint)
    return arguments[1] if isinstance(typing.get_origin(hint), type) and len(arguments) == 2 else None  # noqa: PLR2004


def _path(context: dg.OutputContext | dg.InputContext, resilient: ResilientResource) -> tuple[str, ...]:
    """An asset is addressed by its key; an op's output by its run group, so that a re-execution finds it."""
    if context.has_asset_key:
        return tuple(context.asset_key.path)
    if isinstance(context, dg.InputContext):
        raise ConfigurationError(
            f"Input {context.name!r} has neither an asset key nor an upstream output; this IO manager cannot load it."
        )
    mapping = () if context.mapping_key is None else (context.mapping_key,)
    return ("op output", resilient.attempt().claim.root, context.step_key, context.name, *mapping)


def _fingerprint(context: dg.OutputContext) -> str | None:
    code_version = context.asset_spec.code_version
    return None if code_version is None else f"code:{code_version}"


def _check_targets(context: dg.OutputContext, partitions: list[str]) -> None:
    """A value without a partition would replace the one from before the asset was partitioned."""
    if not partitions and context.has_asset_key and context.asset_spec.partitions_def is not None:
        raise ConfigurationError(
            f"{context.asset_key.to_user_string()}: this run targets no partition of the asset, which is partitioned. "
            'Choose one by its name; Dagster takes the key "" for none.'
        )


def _check_range(context: dg.OutputContext, partitions: list[str], obj: Any) -> None:
    name = context.asset_key.to_user_string()
    if not isinstance(obj, dict):
        raise ConfigurationError(
            f"{name}: this run targets {len(partitions)} partitions, but the output is a {type(obj).__name__}. Return "
            "a dict of partition key to value, or save each in the loop over resilient.task(context).partitions() and "
            "return None with the annotation -> None."
        )
    missing, extra = [key for key in partitions if key not in obj], [key for key in obj if key not in set(partitions)]
    if missing or extra:
        raise ConfigurationError(
            f"{name}: the returned dict lacks the partitions {missing[:10]} and has {extra[:10]}, which are not of "
            "this run. Return exactly the run's partitions."
        )


def _in_definition_order(context: dg.OutputContext | dg.InputContext, keys: Iterable[str]) -> list[str]:
    wanted = {str(key) for key in keys}
    definition = context.asset_partitions_def
    instance = getattr(getattr(context, "step_context", None), "instance", None) or getattr(context, "instance", None)
    ordered = [
        str(key) for key in definition.get_partition_keys(dynamic_partitions_store=instance) if str(key) in wanted
    ]
    return ordered or sorted(wanted)
