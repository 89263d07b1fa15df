"""Runs that are well and look ill are left alone: none is killed, none is launched again.

All happen at the same time under one recovery sensor. Beside them one run is lost twice, which shows that the sensor
was looking. The short form has heartbeats of 1 s and a TTL of 5 s, the soak the usual 10 s and 45 s.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from signal import SIGCONT

import calm_terms as terms
import pytest
import servers
from calm_cluster import CalmCluster
from calm_terms import TIMES
from cluster import Client, kill, signal_all
from outcome import FAILURE, SUCCESS, Story
from proxy import S3Proxy
from proxy_rules import latency

from dagster_resilient.state.fences import read_fence
from dagster_resilient.state.store import ObjectRecords
from example_project.demo.checks import recovery_event

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(3000 if terms.SOAK else 900)]
JOBS = {terms.BUSY: "busy_job", terms.SLOW: "slow_job", terms.WAITING: "waiting_job"}
PAIRS = {
    terms.BUSY: [(terms.SEATED, terms.BUSY)],
    terms.SLOW: [("slowly", terms.SLOW)],
    terms.WAITING: [(terms.STANDING, terms.WAITING), (terms.SEATED, terms.WAITING)],
}
# Every request by which the sensor looks for heartbeats, and those of the slow run's task.
SLOW_KEYS = ("/live/", "/hung/", "/probes/", "/tasks/slowly/")


@dataclass
class Calm:
    """What happens.

    Attributes:
        cluster: Where.
        server: Its store.
        client: Launches.
        roots: The first run of each story.
    """

    cluster: CalmCluster
    server: servers.SeaweedServer
    client: Client
    roots: dict[str, str] = field(default_factory=dict)

    def story(self, name: str) -> Story:
        """One of them."""
        return Story(self.cluster, name, PAIRS.get(name, [("calm", name)]))

    def wait(self, name: str, what: str, look: Callable[[], bool]) -> None:
        """Wait for something to happen in a story."""
        self.story(name).wait(what, look, TIMES.patience)

    def play(self) -> None:
        """Let all look ill at once; then take the store away, and let all commit."""
        with ThreadPoolExecutor(2) as pool:
            self._launch_all()
            acts = [pool.submit(self._lose_twice), pool.submit(self._pause)]
            self._look_on(acts)
        with self.server.outage():
            for name in terms.CALM:
                self.cluster.open_gate(name)
            time.sleep(TIMES.outage)  # the outage itself, not a wait for something
        for name in terms.CALM:
            self.wait(name, "its end", self.story(name).is_over)

    def _launch_all(self) -> None:
        """The first worker to see the file takes long to import: that of the first run."""
        (self.cluster.folder / terms.IMPORT).touch()
        self._launch(terms.IMPORTING)
        self.wait(terms.IMPORTING, "its import", lambda: not (self.cluster.folder / terms.IMPORT).exists())
        for name in (terms.DOOMED, terms.BUSY, terms.PAUSED, terms.SLOW, *terms.LANES):
            self._launch(name)
        self._wait_for_computation(terms.BUSY)  # it has the slot
        self._launch(terms.WAITING)

    def _launch(self, name: str) -> None:
        tags = {terms.STORY: name, "dagster/partition": name}
        self.roots[name] = self.client.launch(JOBS.get(name, "calm_job"), tags)

    def _wait_for_computation(self, name: str, number: int = 1) -> None:
        self.wait(name, f"its computation {number}", lambda: len(self.cluster.journal(name)) >= number)

    def _wait_for_holder(self, who: str) -> None:
        held = self.cluster.folder / terms.HELD.format(who)
        self.wait(terms.BUSY, f"its {who}", held.exists)

    def _look_on(self, acts: "list[Future[None]]") -> None:
        """Until everybody has looked ill for as long as they are to."""
        self._wait_for_computation(terms.WAITING)  # behind it stands the step that wants the slot
        time.sleep(TIMES.waited)  # its wait itself, not a wait for something
        for act in acts:
            act.result()
        for who in ("step", "worker"):
            self._wait_for_holder(who)
        for name in (terms.IMPORTING, terms.SLOW, *terms.LANES):
            self._wait_for_computation(name)

    def _pause(self) -> None:
        """Stop the whole process tree again and again, for less than the TTL each time."""
        self._wait_for_computation(terms.PAUSED)
        for _ in range(TIMES.pauses):
            stopped = self.cluster.freeze(self.roots[terms.PAUSED])
            time.sleep(TIMES.paused)  # the pause itself
            signal_all(stopped, SIGCONT)
            time.sleep(2 * TIMES.interval)  # two beats

    def _lose_twice(self) -> None:
        """Stop everything of a run as `_pause` does, but for good; then kill -9 all of its re-execution."""
        self._wait_for_computation(terms.DOOMED)
        stopped = self.cluster.freeze(self.roots[terms.DOOMED])
        self._wait_for_computation(terms.DOOMED, 2)
        kill(*stopped)
        kill(*self.cluster.processes(self.cluster.group(terms.DOOMED)[-1].run_id))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, s3_server: servers.SeaweedServer) -> Iterator[Calm]:
    """All of them, when they are over."""
    folder, place = tmp_path_factory.mktemp("calm") / "cluster", f"s3://{servers.BUCKET}/{uuid.uuid4().hex}"
    with S3Proxy(s3_server.endpoint) as proxy:
        proxy.plan(*(latency(TIMES.latency, key=key) for key in SLOW_KEYS))
        told = {"place": place, "options": s3_server.options, "slow_endpoint": proxy.endpoint}
        with CalmCluster(folder, **told) as cluster, cluster.client() as client:
            played = Calm(cluster, s3_server, client)
            played.play()
            yield played


@pytest.mark.parametrize("name", terms.CALM)
def test_it_is_left_alone(calm: Calm, name: str) -> None:
    """It succeeds as the only run of its group, each computation began once, and nobody has judged it."""
    (run,) = calm.cluster.group(name)
    assert (run.run_id, run.status) == (calm.roots[name], SUCCESS)
    assert sorted(line.pair for line in calm.cluster.journal(name)) == sorted(calm.story(name).pairs)
    assert read_fence(ObjectRecords(calm.cluster.store), run.run_id) is None
    assert recovery_event(calm.cluster.instance, run.run_id) is None
    assert calm.story(name).wrong_values() == []


def test_the_sensor_was_looking(calm: Calm) -> None:
    """The run beside them that stopped for good is launched again, and so is that one, which was killed."""
    calm.wait(terms.DOOMED, "its end", calm.story(terms.DOOMED).is_over)
    lost, killed, last = calm.cluster.group(terms.DOOMED)
    assert [lost.status, killed.status, last.status] == [FAILURE, FAILURE, SUCCESS]
    assert (killed.parent_run_id, last.parent_run_id) == (lost.run_id, killed.run_id)
    fence = read_fence(ObjectRecords(calm.cluster.store), lost.run_id)
    assert fence is not None
    assert fence.failure_class == "lost"


def test_the_sensor_did_not_stumble(calm: Calm) -> None:
    """Neither the slow store nor the outage makes a tick fail."""
    (state,) = calm.cluster.instance.all_instigator_state()
    ticks = calm.cluster.instance.get_ticks(state.instigator_origin_id, state.selector_id)
    failed = [tick.error for tick in ticks if tick.is_failure]
    assert ticks
    assert failed == []
