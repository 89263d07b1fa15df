"""What a run is to compute, by asset and partition: all that a plan must know of the user's code.

The run worker stores it at its start, so that a plan can be made where that code cannot be imported.
"""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from functools import cached_property

import pydantic

from dagster_resilient.storage.manifest import Record

Key = tuple[str, ...]
Partition = str | None

# Up to so many partition keys are stored in clear, for people; 100,000 would make every brief a megabyte.
_IN_CLEAR = 100


class Part(pydantic.BaseModel):
    """A piece of a record."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class PartitionList(Part):
    """Partition keys in order of definition.

    Attributes:
        keys: In clear; empty where they are packed.
        packed: JSON, compressed by zlib, in base 64; empty where they stand in clear.
        dimensions: Names of the dimensions of multi-partition keys, in the order of the parts of a key; else empty.
    """

    keys: tuple[str, ...] = ()
    packed: str = ""
    dimensions: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: list[str], dimensions: tuple[str, ...] = ()) -> PartitionList:
        """Return the list of some keys, packed where they are many."""
        if len(keys) <= _IN_CLEAR:
            return cls(keys=tuple(keys), dimensions=dimensions)
        packed = base64.b64encode(zlib.compress(json.dumps(keys).encode(), 6)).decode()
        return cls(packed=packed, dimensions=dimensions)

    @cached_property
    def all(self) -> tuple[str, ...]:
        """The keys."""
        return tuple(json.loads(zlib.decompress(base64.b64decode(self.packed)))) if self.packed else self.keys


class AssetBrief(Part):
    """One asset that a run computes.

    Attributes:
        key: Parts of the asset key.
        partitions: Which of the brief's lists holds the targeted partitions; None where the run targets none of it.
        upstream: Keys that it depends on.
        together: Keys that the same step computes and that cannot be selected apart; itself among them.
        fingerprint: What makes earlier state reusable, None where no code version is declared.
        step_key: Dagster's key of the step.
        must_commit: Whether it cannot have succeeded without a value in our store: another IO manager, or an asset
            without output, is done by STEP_SUCCESS.
    """

    key: Key
    partitions: int | None = None
    upstream: tuple[Key, ...] = ()
    together: tuple[Key, ...] = ()
    fingerprint: str | None = None
    step_key: str | None = None
    must_commit: bool = False


class CheckBrief(Part):
    """One asset check that a run evaluates.

    Attributes:
        asset: Parts of the key of the asset that it checks.
        name: Its name.
        step_key: Dagster's key of the step that evaluates it; the asset's own, or one that is only for checks.
        blocking: Whether nothing below the asset may be computed before it has passed.
    """

    asset: Key
    name: str
    step_key: str
    blocking: bool = False


class AboveBrief(Part):
    """An asset that the run reads and does not compute.

    Attributes:
        key: Parts of the asset key.
        partition: The partition of the same name as the run's, where it has one.
        newest: Dagster's number of its newest materialization when the run began; None: never materialized.
    """

    key: Key
    partition: str | None = None
    newest: int | None = None


class RunBrief(Record):
    """What a run is to compute.

    Attributes:
        run_id: The run.
        job_name: Its job.
        assets: In topological order; empty for a job of plain ops.
        checks: The asset checks.
        partitions: The lists of partition keys to which the assets refer.
        above: What it reads.
    """

    run_id: str
    job_name: str
    assets: tuple[AssetBrief, ...] = ()
    checks: tuple[CheckBrief, ...] = ()
    partitions: tuple[PartitionList, ...] = ()
    above: tuple[AboveBrief, ...] = ()
    op: str = pydantic.Field(default_factory=lambda: uuid.uuid4().hex)

    def partitions_of(self, asset: AssetBrief) -> tuple[Partition, ...]:
        """Return the targeted partitions of an asset, in order of definition; ``(None,)`` where it has none."""
        return (None,) if asset.partitions is None else self.partitions[asset.partitions].all

    def gates_of(self, asset: AssetBrief) -> tuple[str, ...]:
        """Return the names of the blocking checks that the asset's own step evaluates."""
        return tuple(
            check.name
            for check in self.checks
            if check.blocking and check.asset == asset.key and check.step_key == asset.step_key
        )

    def dimensions_of(self, asset: AssetBrief) -> tuple[str, ...]:
        """Return the names of the dimensions of an asset's partitions; empty for plain keys."""
        return () if asset.partitions is None else self.partitions[asset.partitions].dimensions
