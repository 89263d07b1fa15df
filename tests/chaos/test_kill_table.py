"""Each part of a deployment is killed, alone and together: what Dagster alone leaves lost or doubled, recovers here.

Dagster alone (measured with 1.13.27): a killed worker leaves its step behind, which writes on; after the loss of code
server, worker and step a run is STARTED for ever; a frozen worker that wakes turns FAILURE into SUCCESS. Here every
cell of that table is a run of its own, all in one deployment, each hit while it computes the third of four partitions.
"""

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
import pytest
import shapes
from cluster import ChaosCluster, Client, kill, signal_all, survivors, wait_for
from outcome import FAILURE, SUCCESS, UNPARTITIONED, Story

from example_project.demo.checks import step_errors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HIT = shapes.FEW[2]
# Whose worker outlives its code server; whose worker dies before its step has begun; whose step dies between the two
# writes of the event that follows a commit.
LIVES_ON, LATE, TORN = "server", "late", "torn"


@dataclass
class Cell:
    """One cell of the table.

    Attributes:
        story: What it computes.
        root: Its first run.
        processes: The run worker, and all below it, when it was hit.
        survivors: Those that had not ended 15 s later.
    """

    story: Story
    root: str
    processes: list[psutil.Process] = field(default_factory=list)
    survivors: "Future[list[str]] | None" = None

    @classmethod
    def launch(cls, cluster: ChaosCluster, client: Client, name: str) -> "Cell":
        """Launch its run."""
        pairs = [(f"held_{name}", key) for key in shapes.FEW]
        pairs += [(f"total_{name}", UNPARTITIONED)] if name == shapes.WITH_TOTAL else []
        held = "" if name == TORN else f"held_{name}/{HIT}"
        gate = {shapes.STORY: name, shapes.GATE_AT: held, shapes.GATE_FOR: "root"}
        root = client.launch(f"{name}_job", gate | shapes.a_range(shapes.FEW))
        return cls(Story(cluster, name, pairs), root)

    def hold(self) -> None:
        """Wait until it computes what it is not to finish; or, if late, until its step is about to begin."""
        self.story.wait("its third partition", self._is_late if self.story.name == LATE else self._is_held)
        if self.story.name != TORN:
            self.processes = self.story.cluster.processes(self.root)

    def _is_held(self) -> bool:
        return (f"held_{self.story.name}", HIT) in self.story.computed()

    def _is_late(self) -> bool:
        return (self.story.cluster.folder / "late").exists()

    def has_failed(self) -> bool:
        """Whether its first run has ended, by what Dagster knows."""
        return self.story.cluster.run(self.root).is_finished


@dataclass
class Table:
    """What happens to all cells."""

    cluster: ChaosCluster
    pool: ThreadPoolExecutor
    cells: dict[str, Cell] = field(default_factory=dict)

    def play(self) -> None:
        """Launch all, hold them, hit them, and let them recover."""
        with self.cluster.client() as client:
            self.cells = {name: Cell.launch(self.cluster, client, name) for name in shapes.CELLS}
        for cell in self.cells.values():
            cell.hold()
        frozen = self.cells["frozen"].root
        awake_first = [self.cells["frozen"].processes[0], *self.cluster.steps(frozen)]
        zombies = self.cluster.freeze(frozen)
        self._hit_while_all_is_well()
        self._hit_with_the_server()
        self.cluster.revive()
        self.cluster.open_gate(LIVES_ON)
        for cell in self.cells.values():
            cell.story.wait("its recovery", cell.story.is_over)
        self._wake(awake_first, zombies)

    def _hit_while_all_is_well(self) -> None:
        """The code server lives, sees a worker's death, and tells Dagster."""
        kill(*self.cluster.steps(self.cells["step"].root))
        kill(self.cells["worker"].processes[0])
        self._watch("step", "worker")
        for name in ("step", "worker"):
            self.cells[name].story.wait("its failure", self.cells[name].has_failed)

    def _hit_with_the_server(self) -> None:
        """Nobody is left to tell Dagster anything. The daemon goes too, as on a machine that held everything."""
        workers = [self.cells[name].processes[0] for name in ("server_and_worker", LATE)]
        everything = self.cells["everything"].processes
        kill(*self.cluster.code_server(), *self.cluster.daemon(), *workers, *everything)
        self._watch("server_and_worker", LATE, "everything")

    def _wake(self, first: list[psutil.Process], zombies: list[psutil.Process]) -> None:
        """The heartbeat processes wake last: the step must be refused by the store before anybody can warn it."""
        root = self.cells["frozen"].root
        self.cluster.open_gate("frozen")
        signal_all(first, signal.SIGCONT)
        wait_for("the zombie to be refused", lambda: "FencedError" in step_errors(self.cluster.instance, root) or None)
        signal_all(zombies, signal.SIGCONT)
        self._watch("frozen")

    def _watch(self, *names: str) -> None:
        for name in names:
            self.cells[name].survivors = self.pool.submit(survivors, self.cells[name].processes)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cell]]:
    """The cells, when all is over."""
    folder = tmp_path_factory.mktemp("table")
    with ChaosCluster(folder / "cluster") as cluster, ThreadPoolExecutor(len(shapes.CELLS)) as pool:
        table = Table(cluster, pool)
        table.play()
        yield table.cells


@pytest.fixture
def cell(cells: dict[str, Cell], request: pytest.FixtureRequest) -> Cell:
    """One of them."""
    return cells[request.param]


RECOVERED = [name for name in shapes.CELLS if name != LIVES_ON]
IN_FLIGHT = [name for name in RECOVERED if name not in {LATE, TORN}]


@pytest.mark.parametrize("cell", RECOVERED, indirect=True)
def test_a_re_execution_succeeds(cell: Cell) -> None:
    """There is one, of the run that was hit, and that one stays FAILURE, also after its frozen worker has woken."""
    first, second = cell.story.cluster.group(cell.story.name)
    assert (first.run_id, first.status) == (cell.root, FAILURE)
    assert (second.parent_run_id, second.root_run_id, second.status) == (cell.root, cell.root, SUCCESS)


@pytest.mark.parametrize("cell", IN_FLIGHT, indirect=True)
def test_only_what_was_in_flight_is_computed_again(cell: Cell) -> None:
    """Two partitions were committed and are reused; the third was in flight."""
    assert cell.story.computed() == set(cell.story.pairs)
    assert cell.story.computed_again() == {cell.root: [(f"held_{cell.story.name}", HIT)]}


@pytest.mark.parametrize("cell", [*IN_FLIGHT, LATE], indirect=True)
def test_no_process_of_the_lost_run_lives_on(cell: Cell) -> None:
    """Neither an orphan whose worker is dead, nor a zombie that wakes, is there 15 s later."""
    assert cell.survivors is not None
    assert cell.survivors.result() == []


@pytest.mark.parametrize("cell", shapes.CELLS, indirect=True)
def test_the_values_are_those_of_who_computed_them_last(cell: Cell) -> None:
    """A zombie's write is neither loaded nor in the history."""
    if cell.survivors is not None:
        cell.survivors.result()
    assert cell.story.wrong_values() == []


@pytest.mark.parametrize("cell", shapes.CELLS, indirect=True)
def test_dagster_shows_all_as_materialized(cell: Cell) -> None:
    """Also what was committed just before the death, too late for its event."""
    assert cell.story.unknown_to_dagster() == set()


@pytest.mark.parametrize("cell", [LIVES_ON], indirect=True)
def test_a_run_outlives_its_code_server(cell: Cell) -> None:
    """Its worker beats on, so it is not taken for lost, and nothing is computed again."""
    (only,) = cell.story.cluster.group(cell.story.name)
    assert only.status is SUCCESS
    assert cell.story.computed_again() == {}


@pytest.mark.parametrize("cell", [LATE], indirect=True)
def test_a_step_that_began_as_an_orphan_costs_one_partition(cell: Cell) -> None:
    """Its worker died while it was starting; what it commits before it is ended is reused."""
    assert sum(map(len, cell.story.computed_again().values())) <= 1


@pytest.mark.parametrize("cell", [TORN], indirect=True)
def test_what_was_committed_before_its_event_is_not_computed_again(cell: Cell) -> None:
    """The commit counts, not Dagster's log."""
    assert cell.story.computed_again() == {}
