"""What a re-execution of a run would compute, what it would reuse, and why: for the recovery, and as a dry run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import dagster as dg

from dagster_resilient import dagster_compat as compat
from dagster_resilient.briefs import Briefs, LiveBriefs, StoredBriefs
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.facts import RunFacts
from dagster_resilient.recovery import NOT_COMMITTED, Plan, plan
from dagster_resilient.recovery.brief import CheckBrief, Key, Partition, RunBrief
from dagster_resilient.resources import ResilientResource


@dataclass(frozen=True)
class PlanRow:
    """One line of a plan.

    Attributes:
        asset: The asset key, its parts joined by ``/``.
        partition: The partition, None for an unpartitioned asset.
        action: ``redo`` or ``reuse``.
        reason: Why, in words.
    """

    asset: str
    partition: str | None
    action: Literal["redo", "reuse"]
    reason: str


@dataclass(frozen=True)
class RunPlan:
    """What a re-execution of a run computes.

    Attributes:
        run_id: The run.
        missing: Partitions of each asset to compute, in topological order and order of definition. An unpartitioned
            asset has the one partition None.
        reused: Partitions of each asset that are not computed again.
        redo_reasons: Why each missing partition is computed.
        reuse_reasons: Why each reused partition is not.
        checks: Asset checks, as (asset, name), that are evaluated although their asset is reused: their step did not
            get to it.
        unevaluated: Asset checks that are left out: they belong to the step of an asset that is reused.
        steps: Steps to run of a job without assets, or of one of which nobody knows the assets; None: all. Empty for a
            plan by assets.
        by_assets: Whether the plan is by assets, and not by steps.
        newer_above: Assets that the run reads, and that have newer data than when it began. What is reused was made
            from the older.
        tags: The tags that make the re-execution target the missing partitions.
    """

    run_id: str
    missing: Mapping[Key, tuple[Partition, ...]]
    reused: Mapping[Key, tuple[Partition, ...]]
    redo_reasons: Mapping[Key, Mapping[Partition, str]]
    reuse_reasons: Mapping[Key, Mapping[Partition, str]]
    checks: tuple[tuple[Key, str], ...] = ()
    unevaluated: tuple[tuple[Key, str], ...] = ()
    steps: tuple[str, ...] | None = ()
    by_assets: bool = True
    newer_above: tuple[str, ...] = ()
    tags: Mapping[str, str] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.missing or self.checks) if self.by_assets else self.steps == ()

    @property
    def partitions_saved(self) -> int:
        """How many partitions, unpartitioned assets among them, are not computed again."""
        return sum(len(partitions) for partitions in self.reused.values())

    def rows(self) -> Iterator[PlanRow]:
        """Yield one row per asset partition, what is redone first."""
        for action, found, reasons in (
            ("redo", self.missing, self.redo_reasons),
            ("reuse", self.reused, self.reuse_reasons),
        ):
            for key, partitions in found.items():
                for partition in partitions:
                    why = reasons.get(key, {}).get(partition, NOT_COMMITTED if action == "redo" else "committed")
                    yield PlanRow("/".join(key), partition, action, why)  # type: ignore[arg-type]  # one of the two

    def words(self) -> str:
        """Return the plan in a few words."""
        if not self.by_assets:
            return f"redo {'every step' if self.steps is None else ', '.join(self.steps) or 'nothing'}"
        text = Plan(self.missing, self.reused, None, self.redo_reasons).words()
        if self.checks:
            text += f"; check {_named(self.checks)}"
        if self.unevaluated:
            text += f"; left out are the checks {_named(self.unevaluated)}: evaluating them would compute their assets"
        if self.newer_above:
            text += f"; newer than at the run's start: {', '.join(self.newer_above)}"
        return text


def _named(checks: tuple[tuple[Key, str], ...]) -> str:
    return ", ".join(f"{'/'.join(key)}:{name}" for key, name in checks)


def plan_run(
    run_id: str,
    instance: dg.DagsterInstance,
    resource: ResilientResource,
    definitions: dg.Definitions | dg.RepositoryDefinition | None = None,
) -> RunPlan:
    """Plan the re-execution of a run, as the recovery would. A dry run: fences, launches and records nothing.

    Args:
        run_id: The run, of any status. What a live run is still at work on counts as missing.
        instance: The instance that knows the run.
        resource: Where its state is kept.
        definitions: The definitions of its code location; what has changed in them since the run began is then taken
            into account. None: what the run worker stored at the run's start is planned with, which needs no user code.

    Raises:
        ConfigurationError: There is no such run; nobody stored what it computes; or the definitions lack what it names.
    """
    run = instance.get_run_by_id(run_id)
    if run is None:
        raise ConfigurationError(f"The instance knows no run {run_id}; give the whole id, as the run's page shows it.")
    repository = definitions.get_repository_def() if isinstance(definitions, dg.Definitions) else definitions
    briefs: Briefs = (
        StoredBriefs(resource.records, instance.get_run_by_id)
        if repository is None
        else LiveBriefs(repository, instance)
    )
    if briefs(run) is None:
        raise ConfigurationError(
            f"What run {run_id} computes is not known: it never began, or not with resilient_executor on the store "
            f"{resource.store.url}. Give `definitions`, or the resource of its code location."
        )
    return plan_from(RunFacts(instance, resource, briefs, run, compat.run_group(instance, run)), run, instance)


def plan_from(facts: RunFacts, run: dg.DagsterRun, instance: dg.DagsterInstance) -> RunPlan:
    """Plan from the facts of a run."""
    if not facts.brief.assets and not facts.brief.checks:
        steps = None if not run.is_finished else compat.steps_left(instance, run)[0]
        words = None if steps is None else tuple(steps)
        return RunPlan(run.run_id, {}, {}, {}, {}, steps=words, by_assets=False)
    found = plan(facts.assets)
    checks, left_out = _checks(facts, found)
    reuse = {key: {p: _why_reused(facts, key, p) for p in partitions} for key, partitions in found.reused.items()}
    return RunPlan(
        run_id=run.run_id,
        missing=found.missing,
        reused={key: partitions for key, partitions in found.reused.items() if partitions},
        redo_reasons=found.reasons,
        reuse_reasons=reuse,
        checks=checks,
        unevaluated=left_out,
        newer_above=_newer_above(facts),
        tags=_partition_tags(facts.brief, found),
    )


def _partition_tags(brief: RunBrief, found: Plan) -> dict[str, str] | None:
    """None where the parent's tags stand: nothing is to be computed, so that only checks run."""
    if not found.missing:
        return None
    wanted = {partition for partitions in found.missing.values() for partition in partitions}
    return compat.partition_tags(wanted, brief.partitions)


def _why_reused(facts: RunFacts, key: Key, partition: Partition) -> str:
    value = facts.values.get((key, partition))
    return "its step succeeded" if value is None else f"committed by run {value.run_id}"


def _checks(facts: RunFacts, found: Plan) -> tuple[tuple[tuple[Key, str], ...], tuple[tuple[Key, str], ...]]:
    """Return the checks to evaluate beside those of missing assets, and those that only a finished step could."""
    steps = {asset.step_key for asset in facts.brief.assets}
    open_ones: list[CheckBrief] = [check for check in facts.unevaluated_checks() if check.asset not in found.missing]
    alone = tuple((check.asset, check.name) for check in open_ones if check.step_key not in steps)
    return alone, tuple((check.asset, check.name) for check in open_ones if check.step_key in steps)


def _newer_above(facts: RunFacts) -> tuple[str, ...]:
    """Return what was materialized anew since the run began. Known only of a run whose worker stored its brief."""
    begun = facts.stored_brief()
    if begun is None or not begun.above:
        return ()
    now = facts.newest_above()
    return tuple("/".join(above.key) for above in begun.above if now.get(above.key, above.newest) != above.newest)


def check_keys(found: RunPlan, brief: RunBrief) -> list[dg.AssetCheckKey] | None:
    """Return the checks that a re-execution must name; None where Dagster's own rule finds the right ones."""
    if not found.checks:
        return None
    with_assets = [(check.asset, check.name) for check in brief.checks if check.asset in found.missing]
    return [dg.AssetCheckKey(dg.AssetKey(list(key)), name) for key, name in (*with_assets, *found.checks)]
