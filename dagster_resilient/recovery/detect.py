"""Which runs are lost or hung, judged from heartbeats and marks by the store's clock.

Three rules keep live runs alive. Staleness counts only over time in which our own probes of the store succeeded, and
starts anew after an outage: when a store comes back, every heartbeat is old and every worker is well. A run must miss
beats in two looks that are two heartbeat intervals apart: an outage that began and ended between two of our probes left
no trace but old heartbeats, and a live worker beats again within that time. (The first of the looks may come before the
TTL is over, but not before a beat is late by half an interval: only so does an outage right behind it, which nobody
sees, leave a live worker alone.)
And where many runs go stale together, the judgement waits: that is more often a fault of the store or of this observer
than of the machines.

A hang is found by the process's own sidecar, which marks it in the store. Here the mark must only have stood for a
while, in which we could look and the process beat on: what an outage kept from being deleted is deleted then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pydantic

from dagster_resilient.state.beats import LiveName
from dagster_resilient.state.hangs import HangName

INTERVALS_TO_SUSPECT, INTERVALS_TO_CONVICT = 1.5, 2
# Runs in each part of the memory, which is a sensor's cursor: 100 KB in all at most.
MOST_REMEMBERED = 700
# Seconds between two looks beyond which the observer itself was asleep. A daemon ticks every 5 s at best, a slow tick
# takes up to a minute; a shorter nap is covered by the second look, before which every live worker has beaten again.
LONGEST_GAP = 60.0
MASS_SHARE = 0.3
MASS_COUNT = 3


class Observation(pydantic.BaseModel):
    """What the observer remembers between looks; small enough for a sensor's cursor.

    Attributes:
        since: Store time in seconds at which the unbroken chain of successful probes began, None after a failed probe.
        last: Store time of the last successful probe.
        suspects: Store time of the look that first missed beats of a run, where none has come since.
        silent_since: Store time at which a run was first seen without any heartbeat.
        mass_since: Store time at which many runs were first stale together.
        made: Whether the store was ever seen to be there: it has vanished where it is not there later.
    """

    model_config = pydantic.ConfigDict(frozen=True)
    since: float | None = None
    last: float | None = None
    suspects: dict[str, float] = pydantic.Field(default_factory=dict)
    silent_since: dict[str, float] = pydantic.Field(default_factory=dict)
    mass_since: float | None = None
    made: bool = False

    def outage(self) -> Observation:
        """Return the memory after a probe that failed: whatever was believed stale is judged anew."""
        return Observation(made=self.made)


@dataclass(frozen=True)
class Sighting:
    """A live run as the instance shows it, with the time of its worker's newest heartbeat by the store's clock."""

    run_id: str
    last_beat: float | None


@dataclass(frozen=True)
class Look:
    """The outcome of one look.

    Attributes:
        observation: What to remember.
        lost: Why each lost run counts as lost, in words, by run id.
        paused: Why nothing is judged for now, None where judgement was passed.
    """

    observation: Observation
    lost: Mapping[str, str]
    paused: str | None = None


def observe(
    memory: Observation,
    now: float,
    runs: Sequence[Sighting],
    *,
    ttl: float,
    interval: float,
    start_allowance: float,
) -> Look:
    """Judge the live runs.

    Args:
        memory: What the last look left.
        now: Store time in seconds, from a probe just written.
        runs: The live runs that should have a heartbeat.
        ttl: Seconds without a heartbeat after which a worker counts as lost.
        interval: Seconds between two heartbeats of a worker.
        start_allowance: Seconds that a run may take until its first heartbeat: imports, images, queues.
    """
    longest_gap = max(ttl, LONGEST_GAP)
    unbroken = memory.since is not None and memory.last is not None and 0 <= now - memory.last <= longest_gap
    since = memory.since if unbroken and memory.since is not None else now
    watched = now - since
    silent = {run.run_id: memory.silent_since.get(run.run_id, now) for run in runs if run.last_beat is None}
    long_enough = INTERVALS_TO_CONVICT * interval
    silences = {run.run_id: min(watched, now - _last_sign(run, silent)) for run in runs}
    limits = {run.run_id: start_allowance if run.last_beat is None else ttl for run in runs}
    stale = {run.run_id: _staleness(run, now, silent) for run in runs if silences[run.run_id] > limits[run.run_id]}
    suspects = {
        run.run_id: _suspected_since(memory if unbroken else Observation(), now, _last_sign(run, silent), run.run_id)
        for run in runs
        if silences[run.run_id] > min(limits[run.run_id] / 2, INTERVALS_TO_SUSPECT * interval)
    }
    mass_since = _mass_since(memory, now, stale, runs)
    remember = Observation(
        since=since,
        last=now,
        suspects=_earliest(suspects),
        silent_since=_earliest(silent),
        mass_since=mass_since,
        made=memory.made,
    )
    if mass_since is not None and now - mass_since <= 2 * ttl:
        return Look(
            remember,
            {},
            f"{len(stale)} of {len(runs)} runs stopped beating together; waiting {2 * ttl:.0f} s before judging.",
        )
    return Look(remember, {run_id: why for run_id, why in stale.items() if now - suspects[run_id] >= long_enough})


def _earliest(times: Mapping[str, float]) -> dict[str, float]:
    """Keep the memory small. A run that is not remembered is watched anew: it is judged later, and never sooner."""
    return dict(sorted(times.items(), key=lambda item: item[1])[:MOST_REMEMBERED])


def _last_sign(run: Sighting, silent: Mapping[str, float]) -> float:
    return silent[run.run_id] if run.last_beat is None else run.last_beat


def _suspected_since(memory: Observation, now: float, last_sign: float, run_id: str) -> float:
    """Return since when a run has been suspected. What was suspected before its last beat is forgotten."""
    suspected = memory.suspects.get(run_id)
    return now if suspected is None or suspected <= last_sign else suspected


def _staleness(run: Sighting, now: float, silent: Mapping[str, float]) -> str:
    seconds = now - _last_sign(run, silent)
    never = run.last_beat is None
    return (
        f"its worker never sent a heartbeat in {seconds:.0f} s"
        if never
        else f"its worker sent no heartbeat for {seconds:.0f} s"
    )


def _mass_since(memory: Observation, now: float, stale: Mapping[str, str], runs: Sequence[Sighting]) -> float | None:
    """Fewer than `MASS_COUNT` stale runs are no mass: one machine may have held them all."""
    if len(stale) < MASS_COUNT or len(stale) <= MASS_SHARE * len(runs):
        return None
    return memory.mass_since if memory.mass_since is not None else now


def hung(
    marks: Iterable[HangName],
    beats: Iterable[LiveName],
    now: float,
    since: float | None,
    *,
    ttl: float,
    interval: float,
) -> dict[str, HangName]:
    """Return the mark that convicts each hung run.

    Args:
        marks: The marks in the store.
        beats: The heartbeats in the store. A mark whose process beats no more says nothing: it has ended, or is lost.
        now: Store time in seconds, from a probe just written.
        since: Store time at which the unbroken chain of successful probes began.
        ttl: Seconds without a heartbeat after which a process does not count as beating.
        interval: Seconds between two heartbeats.
    """
    listed = list(marks)
    if not listed or since is None:
        return {}
    alive = {(b.run_id, b.role, b.process) for b in beats if now - b.last_modified.timestamp() <= ttl}
    found: dict[str, HangName] = {}
    for mark in listed:
        stood = min(now - mark.last_modified.timestamp(), now - since)
        if stood > INTERVALS_TO_CONVICT * interval and (mark.run_id, mark.role, mark.process) in alive:
            found.setdefault(mark.run_id, mark)
    return found
