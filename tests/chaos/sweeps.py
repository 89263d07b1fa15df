"""Kills a story's runs at random moments."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from cluster import ORPHAN_SECONDS, kill, survivors, tree
from outcome import Story

KINDS = ("step", "worker", "step and worker", "all")
# A step that was about to begin when its worker died has its time from then on.
START_SECONDS = 30.0


@dataclass
class Sweep:
    """One story and its kills.

    Attributes:
        story: What is killed.
        kills: How often.
        rng: Chooses moments and victims.
        warm_up: So many pairs are computed, and so many runs begun, before the first kill.
        held_back: The last so many pairs wait at the gate until the last kill: no kill comes too late.
        told: What was killed, for the message of a failure.
        orphans: Processes that outlived their run worker for too long.
    """

    story: Story
    kills: int
    rng: random.Random
    warm_up: tuple[int, int] = (0, 1)
    held_back: int = 1
    told: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)

    def play(self) -> "Sweep":
        """Kill as often as wanted, then let the story end."""
        pairs, runs = self.warm_up
        cluster, name = self.story.cluster, self.story.name
        self._wait("its beginning", lambda: self._done() >= pairs and len(cluster.group(name)) >= runs)
        for left in range(self.kills, 0, -1):
            self._wait_until_somewhere(left)
            self._strike_one_of(self.rng.choice(KINDS))
        cluster.open_gate(name)
        self._wait("its end", self.story.is_over)
        return self

    def _wait_until_somewhere(self, left: int) -> None:
        """Wait for a random moment within the share of the rest that falls to one of so many kills."""
        done = self._done()
        target = done + self.rng.randint(0, max(0, len(self.story.pairs) - self.held_back - done) // left)
        self._wait(f"{target} pairs", lambda: self._done() >= target)
        time.sleep(self.rng.random() / 10)  # part of the random moment, not a wait for something

    def _wait(self, what: str, look: Callable[[], bool]) -> None:
        self.story.wait(f"{what}, after {self.told}", look)

    def _done(self) -> int:
        return len(self.story.computed())

    def _strike_one_of(self, kind: str) -> None:
        self._wait(f"a {kind} to kill", lambda: self._strike(kind))

    def _strike(self, kind: str) -> bool:
        """Kill, if there is somebody to kill."""
        cluster = self.story.cluster
        live = [run for run in cluster.group(self.story.name) if not run.is_finished]
        run_id = self.rng.choice(live).run_id if live else ""
        worker, steps = cluster.worker(run_id), cluster.steps(run_id)
        if worker is None or (not steps and kind == "step"):
            return False
        below = tree(worker.pid)
        kill(*self._victims(kind, worker, steps))
        self.told.append(f"{kind} of {run_id[:8]} at {self._done()}")
        cluster.revive()
        if kind != "step":
            self.orphans += survivors(below, START_SECONDS + ORPHAN_SECONDS)
        return True

    def _victims(self, kind: str, worker: psutil.Process, steps: list[psutil.Process]) -> list[psutil.Process]:
        if kind == "all":
            return [*self.story.cluster.code_server(), *tree(worker.pid)]
        return {"step": steps, "worker": [worker], "step and worker": [worker, *steps]}[kind]

    def check(self) -> None:
        """Assert what is promised of every story."""
        story = self.story
        again = story.computed_again()
        found = {
            "not computed": set(story.pairs) ^ story.computed(),
            "computed again": {run_id: pairs for run_id, pairs in again.items() if len(pairs) > 1},
            "too often": max(0, sum(map(len, again.values())) - self.kills),
            "wrong": story.wrong_values(),
            "unknown to Dagster": story.unknown_to_dagster(),
            "orphans": self.orphans,
        }
        wrong = {what: which for what, which in found.items() if which}
        assert not wrong, f"{story.name}, after {self.told}: {wrong}"
