"""How soon a killed training goes on: ``python -m benchmarks.resume``. With ``--quick`` a smoke test.

A training of 0.1 s a step saves every 5 steps. Two losses are timed, from ``kill -9`` to the first step that a new run
has done, in deployments of real processes with Dagster's own daemon:

- of everything: run worker, step, sidecars, code server and daemon, the last two started again at once. The aim is
  less than 25 s with a TTL of 15 s.
- of the run alone: the code server sees its worker end, and says so; nobody waits for a TTL.

Ours is measured with short intervals of the recovery sensor and of Dagster's queue (4 s and 1 s), and after the loss of
everything with the default ones too (10 s and 5 s). The daemon looks at sensors every 5 s, and then passes over those
whose last tick began a moment less than their interval ago: one of 5 s ticks every 5 or 10 s, one of 4 s every 5 s.

To compare: the same training that saves with `torch.save`, with Dagster's run monitoring, run retries and queue at
their shortest intervals. Its launcher of processes cannot tell whether a worker lives, so a lost run stays as it is:
one is watched for at least 90 s, while the others are measured. A second peer has a launcher that looks for the process
itself; see `resume_launcher`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from benchmarks import report
from benchmarks.resume_places import Deployment, Setting, Step, wait
from benchmarks.rounds import OURS, Row, Run, duration

RESULTS = Path(__file__).parent / "results"
EVERYTHING, RUN = "kill -9 of everything", "kill -9 of the run"
PARTS = ("found", "queued", "launched", "first step")
SHORT, DEFAULT = "short intervals", "default intervals"
WATCHED, PLAIN = "Dagster, launcher sees processes", "Dagster, monitoring and retries"
_AIM, _LIMIT = 25.0, 240.0
_QUEUE = {
    "run_coordinator": {
        "module": "dagster.core.run_coordinator",
        "class": "QueuedRunCoordinator",
        "config": {"dequeue_interval_seconds": 1},
    }
}
_FASTEST = {
    **_QUEUE,
    "run_monitoring": {"enabled": True, "poll_interval_seconds": 1, "max_resume_run_attempts": 0},
    "run_retries": {"enabled": True, "max_retries": 3},
}
_LAUNCHER = {"run_launcher": {"module": "benchmarks.resume_launcher", "class": "WatchedRunLauncher"}}
_SOON = {"DAGSTER_EVENT_LOG_CONSUMER_DAEMON_INTERVAL_SECONDS": "1"}


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: Of each loss and entrant.
        ttl: Of ours, in seconds.
        trained: Steps before the kill.
        watched: Seconds for which the run that nobody finds is watched, at least.
        losses: What is killed.
        settings: Of ours.
        at_once: How many are measured at the same time.
        peers: Whether there is anybody to compare with.
    """

    rounds: int = 5
    ttl: float = 15.0
    trained: int = 22
    watched: float = 90.0
    losses: tuple[str, ...] = (EVERYTHING, RUN)
    settings: tuple[str, ...] = (SHORT, DEFAULT)
    at_once: int = 1
    peers: bool = True


QUICK = Scale(rounds=1, ttl=3.0, trained=7, watched=1.0, losses=(EVERYTHING,), settings=(SHORT,), at_once=3)


@dataclass(frozen=True)
class Recovery:
    """One that was measured.

    Attributes:
        ends: Seconds from the kill to the end of each part.
        redone: Steps that were done again.
    """

    ends: dict[str, float]
    redone: int


@dataclass
class Entrant:
    """One way to be recovered.

    Attributes:
        peer: Whose way it is.
        setting: Which setting of it, where several are measured.
        place: Where it happens.
        losses: What it recovers from.
        found: What was measured, by loss.
    """

    peer: str
    setting: str
    place: Deployment
    losses: tuple[str, ...]
    found: dict[str, list[Recovery]] = field(default_factory=dict)

    def median(self, loss: str) -> float:
        """The median of the seconds to the first step."""
        return statistics.median(one.ends[PARTS[-1]] for one in self.found[loss])

    def parts(self, loss: str) -> str:
        """The medians of the parts, each counted from the end of the one before."""
        ends = [[0.0, *(one.ends[part] for part in PARTS)] for one in self.found[loss]]
        shares = [statistics.median(each[n + 1] - each[n] for each in ends) for n in range(len(PARTS))]
        return " + ".join(f"{share:.1f}" for share in shares) + " s"

    def redone(self, loss: str) -> str:
        """The median of the steps done again, and the most."""
        steps = [one.redone for one in self.found[loss]]
        return f"{statistics.median(steps):g}, at most {max(steps)}"


def entrants(scale: Scale, folder: Path) -> list[Entrant]:
    """Describe them all; none is started yet."""
    told = {"RESUME_TTL_SECONDS": f"{scale.ttl:g}"}
    ours = {SHORT: Setting("ours", _QUEUE, told | {"RESUME_SENSOR_SECONDS": "4"}), DEFAULT: Setting("ours", {}, told)}
    losses = {SHORT: (EVERYTHING, RUN), DEFAULT: (EVERYTHING,)}
    everyone = [
        Entrant(OURS, name, Deployment(folder / name.split()[0], ours[name]), losses[name]) for name in scale.settings
    ]
    if scale.peers:
        watched = Setting("by hand", _FASTEST | _LAUNCHER, told | _SOON)
        everyone.append(Entrant(WATCHED, "", Deployment(folder / "watched", watched), (EVERYTHING,)))
        plain = Setting("by hand", _FASTEST, told | _SOON)
        everyone.append(Entrant(PLAIN, "", Deployment(folder / "plain", plain), (RUN,)))
    return everyone


def measure(scale: Scale, folder: Path, run: Run) -> list[Row]:
    """Measure all in turns; return the rows of the table."""
    everyone = entrants(scale, folder)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(scale.at_once) as pool:
        for one in everyone:
            stack.push(one.place)
        list(pool.map(lambda one: one.place.start(), everyone))
        plain = next((one.place for one in everyone if one.peer == PLAIN), None)
        unseen = None if plain is None else pool.submit(Unseen, plain, scale.trained)
        for number in range(scale.rounds):
            first, note = number % len(everyone), functools.partial(run.note, round=number)
            for loss in scale.losses:
                _round([*everyone[first:], *everyone[:first]], loss, scale, pool, note)
        outcome = "" if unseen is None else unseen.result().outcome(scale.watched)
        run.note(loss=EVERYTHING, peer=PLAIN, outcome=outcome)
    return [row for loss in scale.losses for row in rows(everyone, loss, scale.ttl, outcome)]


def _round(order: Sequence[Entrant], loss: str, scale: Scale, pool: Executor, note: functools.partial[None]) -> None:
    """Measure all that recover from a loss, one after the other where the pool has one thread."""
    here = [one for one in order if loss in one.losses]
    measured = pool.map(lambda one: recovery(one.place, loss, scale.trained), here)
    for one, result in zip(here, measured, strict=True):
        one.found.setdefault(loss, []).append(result)
        ends = {part: round(seconds, 3) for part, seconds in result.ends.items()}
        note(loss=loss, peer=one.peer, setting=one.setting, redone=result.redone, **ends)


def killed(place: Deployment, loss: str, trained: int) -> tuple[str, float]:
    """Launch a training and kill it when it has saved; return its run, and when it was killed."""
    root = place.launch()
    wait(f"{trained} steps of training", lambda: len(place.steps(root)) >= trained or None)
    return root, place.kill_everything() if loss == EVERYTHING else place.kill_run()


def first_step(place: Deployment, root: str) -> Step | None:
    """Return the first step that a re-execution has done."""
    return next((step for step in place.steps(root) if step.run_id != root), None)


def recovery(place: Deployment, loss: str, trained: int) -> Recovery:
    """Lose a training, and wait until it goes on.

    Raises:
        RuntimeError: It did not go on in time.
    """
    try:
        root, at = killed(place, loss, trained)
        first = wait("the first step after the loss", lambda: first_step(place, root), _LIMIT)
        place.enough(root)
    except TimeoutError as error:
        raise RuntimeError(f"{error}\n{place.log()}") from error
    found = place.when(root, dg.DagsterEventType.RUN_FAILURE)
    queued = place.when(first.run_id, dg.DagsterEventType.RUN_ENQUEUED)
    launched = place.when(first.run_id, dg.DagsterEventType.RUN_STARTING)
    ends = zip(PARTS, (found, queued, launched, first.at), strict=True)
    lost = max(step.number for step in place.steps(root) if step.run_id == root)
    return Recovery({part: end - at for part, end in ends}, lost - first.number + 1)


class Unseen:
    """A run that was killed with everything, and of which nobody is expected to learn."""

    def __init__(self, place: Deployment, trained: int) -> None:
        self._place = place
        self._root, self._at = killed(place, EVERYTHING, trained)

    def outcome(self, watched: float) -> str:
        """Return what has become of it, after so many seconds at least."""
        seconds = max(0.5, self._at + watched - time.time())
        with contextlib.suppress(TimeoutError):
            return duration(wait("its first step", lambda: first_step(self._place, self._root), seconds).at - self._at)
        return f"not within {time.time() - self._at:.0f} s"


def rows(everyone: Sequence[Entrant], loss: str, ttl: float, unseen: str) -> list[Row]:
    """Compare each setting of ours with the aim, and with the peers that recover from the loss."""
    section, found = f"{loss}, TTL {ttl:g} s", list[Row]()
    here = [one for one in everyone if one.found.get(loss)]
    peers = [one for one in here if one.peer != OURS]
    for one in (one for one in here if one.peer == OURS):
        median = one.median(loss)
        shown = (section, one.setting, duration(median))
        if loss == EVERYTHING:
            found += [Row(*shown, "the aim", duration(_AIM), median / _AIM), Row(*shown, PLAIN, unseen)]
        found += [Row(*shown, peer.peer, duration(peer.median(loss)), median / peer.median(loss)) for peer in peers]
        best = min(peers, key=lambda peer: peer.median(loss), default=None)
        for case, words in ((" + ".join(PARTS), Entrant.parts), ("steps done again", Entrant.redone)):
            theirs = ("", "") if best is None else (best.peer, words(best, loss))
            found.append(Row(section, f"{one.setting}: {case}", words(one, loss), *theirs))
    return found


def main() -> None:
    """Measure, keep the raw rounds, and print the table."""
    options = _options()
    results = options.results or (None if options.quick else RESULTS)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
    files = {suffix: None if results is None else results / f"resume{suffix}" for suffix in (".jsonl", ".txt")}
    for name in ("dagster_resilient", "dagster"):
        logging.getLogger(name).setLevel(logging.ERROR)
    scale = QUICK if options.quick else Scale(rounds=options.rounds)
    scale = dataclasses.replace(scale, peers=not options.alone)
    with tempfile.TemporaryDirectory() as folder, Run(files[".jsonl"], settle=False) as run:
        about = report.machine(Path(folder))
        run.note(machine=about, quick=options.quick, rounds=scale.rounds)
        report.show(measure(scale, Path(folder), run), about, files[".txt"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description="Measure a recovery.")
    parser.add_argument("--quick", action="store_true", help="a smoke test; its figures mean nothing")
    parser.add_argument("--rounds", type=int, default=Scale.rounds, help="of each loss; default: 5")
    parser.add_argument("--alone", action="store_true", help="without those that it is compared with")
    parser.add_argument(
        "--results",
        type=Path,
        help="where to keep raw rounds and table; default: benchmarks/results, none with --quick",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
