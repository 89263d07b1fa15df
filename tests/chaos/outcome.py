"""What was computed, stored and told to Dagster of a story: a run, with all that comes of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from cluster import ChaosCluster, wait_for

from dagster_resilient.values import load_value
from example_project.demo.checks import history, recovery_event
from example_project.demo.cluster import DemoError

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE
UNPARTITIONED = "-"
Pair = tuple[str, str]


@dataclass(frozen=True)
class Story:
    """See the module.

    Attributes:
        cluster: Where it happens.
        name: Its name, as its runs are tagged.
        pairs: What it computes: asset and partition.
    """

    cluster: ChaosCluster
    name: str
    pairs: Sequence[Pair]

    def wait(self, what: str, look: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait for something to happen in it."""
        try:
            wait_for(f"{self.name}: {what}", lambda: look() or None, seconds)
        except DemoError as error:
            runs = [f"{run.run_id[:8]} {run.status.value}" for run in self.cluster.group(self.name)]
            raise AssertionError(f"{error} Its runs: {runs}\n{self.cluster.logs()}") from error

    def computed(self) -> set[Pair]:
        """Pairs whose computation has begun."""
        return {line.pair for line in self.cluster.journal(self.name)}

    def is_over(self) -> bool:
        """Whether everything is computed, and the newest run of each of its groups has ended well."""
        newest = {run.root_run_id or run.run_id: run for run in self.cluster.group(self.name)}
        return self.computed() == set(self.pairs) and all(map(self._has_ended_well, newest.values()))

    def _has_ended_well(self, run: dg.DagsterRun) -> bool:
        """A run that was killed after its last commit stays FAILURE; recovery says that nothing is left to do."""
        told = recovery_event(self.cluster.instance, run.run_id) if run.status is FAILURE else None
        return run.status is SUCCESS or (told or "").startswith("Recovery: adopted.")

    def computed_again(self) -> dict[str, list[Pair]]:
        """What each run began, and a later process began again."""
        lines = self.cluster.journal(self.name)
        last = {line.pair: n for n, line in enumerate(lines)}
        again: dict[str, list[Pair]] = {}
        for n, line in enumerate(lines):
            if n != last[line.pair]:
                again.setdefault(line.run_id, []).append(line.pair)
        return again

    def wrong_values(self) -> list[str]:
        """Pairs whose value is not of their last computation, was committed too often, or made of what is replaced."""
        computed: dict[Pair, list[str]] = {}
        for line in self.cluster.journal(self.name):
            computed.setdefault(line.pair, []).append(line.run_id)
        return [f"{pair}: {wrong}" for pair, runs in computed.items() if (wrong := self._wrong(pair, runs))]

    def _wrong(self, pair: Pair, runs: list[str]) -> str | None:
        value = self._load(*pair)
        entries = history(self.cluster.store, *_named(*pair))
        commits = [entry.value.run_id for entry in entries if entry.kind == "value" and entry.value]
        stale = [name for name, run_id in value["read"].items() if self._load(*name.split("/"))["run"] != run_id]
        if value["run"] == runs[-1] == commits[-1] and not Counter(commits) - Counter(runs) and not stale:
            return None
        return f"computed by {runs}, committed by {commits}, loads the one of {value['run']}, made of old {stale}"

    def _load(self, asset: str, partition: str) -> dict[str, Any]:
        name, key = _named(asset, partition)
        value: dict[str, Any] = load_value(self.cluster.store, (name,), key, dict)
        return value

    def unknown_to_dagster(self) -> set[Pair]:
        """Pairs that Dagster does not show as materialized."""
        return set(self.pairs) - {pair for asset in dict(self.pairs) for pair in self._shown(asset)}

    def _shown(self, asset: str) -> set[Pair]:
        instance, key = self.cluster.instance, dg.AssetKey(asset)
        whole = {(asset, UNPARTITIONED)} if instance.get_latest_materialization_event(key) else set()
        return whole | {(asset, partition) for partition in instance.get_materialized_partitions(key)}


def _named(asset: str, partition: str) -> tuple[str, str | None]:
    """Return a pair as the library names it."""
    return asset, None if partition == UNPARTITIONED else partition
