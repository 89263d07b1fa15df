"""What is missing, by asset and partition, and what a re-execution must therefore select."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagster_resilient.recovery.brief import Key, Partition

NOT_COMMITTED = "not committed"


@dataclass(frozen=True)
class AssetFacts:
    """What is known of one asset that a run targets.

    Attributes:
        key: Parts of the asset key.
        partitions: The partitions that the run targets, in order of definition; ``(None,)`` for an unpartitioned asset.
        done: Those that are committed and present.
        upstream: Keys that it depends on.
        together: Keys that the same step computes and that cannot be selected apart.
        reasons: Why a partition is not done, in a few words, where that is known.
    """

    key: Key
    partitions: tuple[Partition, ...]
    done: frozenset[Partition]
    upstream: frozenset[Key] = frozenset()
    together: frozenset[Key] = frozenset()
    reasons: Mapping[Partition, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What to re-execute.

    Attributes:
        missing: Missing partitions of each asset to select, in topological order; empty where nothing is missing.
        reused: Partitions of each asset that are not computed again.
        hull: First and last missing partition, None where only unpartitioned assets are missing. A run holds one
            contiguous range; what is done inside it is skipped in the step.
        reasons: Why each missing partition is computed again.
    """

    missing: Mapping[Key, tuple[Partition, ...]]
    reused: Mapping[Key, tuple[Partition, ...]]
    hull: tuple[str, str] | None
    reasons: Mapping[Key, Mapping[Partition, str]] = field(default_factory=dict)

    def words(self) -> str:
        """Return the plan in words."""
        redo = ", ".join(
            f"{_counted(key, partitions)} ({_why(partitions, self.reasons.get(key, {}))})"
            for key, partitions in self.missing.items()
        )
        kept = ", ".join(_counted(key, partitions) for key, partitions in self.reused.items() if partitions)
        return f"redo {redo or 'nothing'}; reuse {kept or 'nothing'}"


def plan(assets: Sequence[AssetFacts]) -> Plan:
    """Plan the re-execution of a run.

    Args:
        assets: The targeted assets in topological order. An asset below one that is redone is redone for the same
            partitions: its value came from something that no longer stands.
    """
    missing: dict[Key, set[Partition]] = {}
    reasons: dict[Key, dict[Partition, str]] = {}
    for asset in assets:
        redo = {p: asset.reasons.get(p, NOT_COMMITTED) for p in asset.partitions if p not in asset.done}
        for parent in sorted(asset.upstream & missing.keys()):
            redo = dict.fromkeys(_below(asset, missing[parent]), f"below {'/'.join(parent)}") | redo
        if redo:
            missing[asset.key], reasons[asset.key] = set(redo), redo
    _close_over_steps(assets, missing, reasons)
    ordered = {a.key: tuple(p for p in a.partitions if p in missing[a.key]) for a in assets if a.key in missing}
    reused = {a.key: tuple(p for p in a.partitions if p not in missing.get(a.key, set())) for a in assets}
    return Plan(ordered, reused, _hull(assets, missing), reasons)


def _below(asset: AssetFacts, redone: set[Partition]) -> set[Partition]:
    """Partitions of the same name depend on each other; across different partitions, everything does."""
    return set(asset.partitions) & redone if redone & set(asset.partitions) else set(asset.partitions)


def _close_over_steps(
    assets: Sequence[AssetFacts], missing: dict[Key, set[Partition]], reasons: dict[Key, dict[Partition, str]]
) -> None:
    for asset in assets:
        siblings = asset.together & missing.keys()
        if asset.key not in missing and siblings:
            wanted = set().union(*(missing[key] for key in siblings))
            missing[asset.key] = wanted & set(asset.partitions) or set(asset.partitions)
            why = f"in one step with {'/'.join(min(siblings))}"
            reasons[asset.key] = dict.fromkeys(missing[asset.key], why)


def _hull(assets: Sequence[AssetFacts], missing: Mapping[Key, set[Partition]]) -> tuple[str, str] | None:
    wanted = {p for partitions in missing.values() for p in partitions if p is not None}
    longest = max((a.partitions for a in assets), key=len, default=())
    ordered = [p for p in longest if p in wanted and p is not None] or sorted(wanted)
    return (ordered[0], ordered[-1]) if ordered else None


def _why(partitions: tuple[Partition, ...], reasons: Mapping[Partition, str]) -> str:
    """Return the reasons, with their counts where they differ."""
    counts = Counter(reasons.get(partition, NOT_COMMITTED) for partition in partitions)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{count} {why}" for why, count in counts.items())


def _counted(key: Key, partitions: tuple[Partition, ...]) -> str:
    name = "/".join(key)
    named = [p for p in partitions if p is not None]
    if not named:
        return name
    return f"{name}[{named[0]}]" if len(named) == 1 else f"{name}[{named[0]}..{named[-1]}: {len(named)}]"
