"""Runs over ranges of partitions are killed at random moments, and compute every partition once.

All stories happen at the same time in one deployment, so that the kills of one disturb the others: the code server that
one of them loses is also that of the others.
"""

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import shapes
from cluster import ChaosCluster, Client
from dagster._core.execution.backfill import BulkActionStatus
from outcome import Story
from sweeps import Sweep

SOAK = os.environ.get("RESILIENT_SOAK") == "1"
SEED = os.environ["RESILIENT_SEED"]
SIZE, KILLS = (200, 10) if SOAK else (20, 3)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if SOAK else 900)]
THIRD = 2 * SIZE // 3 - SIZE // 3
GOING_ON = {BulkActionStatus.REQUESTED, BulkActionStatus.FAILING}


@dataclass(frozen=True)
class Shape:
    """What a story computes.

    Attributes:
        assets: In order.
        keys: Their partitions.
        holes: Whether its first run computes the middle third of the first asset, and dies.
        short: Whether it is also one of the short form.
        backfill: Whether Dagster's backfill makes its runs.
        kills: How often it is killed.
    """

    assets: tuple[str, ...]
    keys: Sequence[str]
    holes: bool = False
    short: bool = False
    backfill: bool = False
    kills: int = KILLS

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All that is to be computed."""
        return [(asset, key) for asset in self.assets for key in self.keys]

    @property
    def gate(self) -> str:
        """Where the last computations wait."""
        return f"{self.assets[-1]}/{'n00[0-2]' if self.assets == ('each',) else self.keys[-1]}"


NUMBERS, BOX = shapes.numbers(SIZE), shapes.box(SIZE)
SHAPES = {
    "line": Shape(("line",), NUMBERS, short=True),
    "chain": Shape(("first", "second", "third"), NUMBERS),
    "holes": Shape(("holed",), NUMBERS, holes=True),
    "box": Shape(("boxed",), BOX),
    "all": Shape(("upper", "middle", "lower"), BOX, holes=True, short=True),
    "bulk": Shape(("bulk",), NUMBERS, short=True, backfill=True, kills=KILLS if SOAK else 1),
    "each": Shape(("each",), shapes.many(SIZE), short=True, backfill=True, kills=KILLS if SOAK else 1),
}
PLAYED = [name for name, shape in SHAPES.items() if shape.short or SOAK]


@dataclass
class Stories:
    """What happens, while it happens; and the backfills by name."""

    cluster: ChaosCluster
    sweeps: dict[str, "Future[Sweep]"] = field(default_factory=dict)
    backfills: dict[str, str] = field(default_factory=dict)

    def begin(self, name: str, client: Client, pool: ThreadPoolExecutor) -> None:
        """Launch a story, and begin to kill it."""
        shape = SHAPES[name]
        tags = {shapes.STORY: name, shapes.GATE_AT: shape.gate, shapes.GATE_FOR: "all"}
        if shape.backfill:
            self.backfills[name] = client.backfill(shape.assets[0], shape.keys, tags)
        else:
            client.launch(f"{name}_job", tags | shapes.a_range(shape.keys))
        sweep = Sweep(
            Story(self.cluster, name, shape.pairs),
            shape.kills,
            random.Random(f"{SEED} {name}"),
            warm_up=(THIRD, 2) if shape.holes else (0, 1),
            held_back=3 if name == "each" else 1,
        )
        self.sweeps[name] = pool.submit(sweep.play)

    def backfill_status(self, name: str) -> BulkActionStatus:
        """How Dagster's own backfill stands."""
        found = self.cluster.instance.get_backfill(self.backfills[name])
        assert found is not None
        return found.status


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """All of them, begun."""
    folder = tmp_path_factory.mktemp("ranges")
    with ChaosCluster(folder / "cluster", size=SIZE) as cluster, ThreadPoolExecutor(len(PLAYED)) as pool:
        begun = Stories(cluster)
        with cluster.client() as client:
            for name in PLAYED:
                begun.begin(name, client, pool)
        yield begun


@pytest.mark.parametrize("name", PLAYED)
def test_every_partition_is_computed_once(stories: Stories, name: str) -> None:
    """Apart from one in flight for each kill; its value is that of its last computation, and Dagster knows of it."""
    stories.sweeps[name].result().check()


@pytest.mark.parametrize("name", [name for name in PLAYED if SHAPES[name].backfill])
def test_the_backfill_ends_well(stories: Stories, name: str) -> None:
    """Dagster's own backfill waits for the re-executions, and makes no run of its own for what they do."""
    story = stories.sweeps[name].result().story
    story.wait("the end of its backfill", lambda: stories.backfill_status(name) not in GOING_ON)
    assert stories.backfill_status(name) is BulkActionStatus.COMPLETED_SUCCESS
    roots = [run for run in story.cluster.group(name) if run.parent_run_id is None]
    assert len(roots) == (len(story.pairs) if name == "each" else 1)
