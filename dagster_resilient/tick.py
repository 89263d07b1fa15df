"""One tick of the recovery: detect lost and hung runs, and hand those that failed to their recovery.

Level-triggered: every tick looks at the live and the recently failed runs as they are, so a tick that died in the
middle is made up for by the next one.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import dagster as dg
import pydantic

from dagster_resilient import dagster_compat as compat
from dagster_resilient.briefs import Briefs, LiveBriefs
from dagster_resilient.errors import StorageError, StoreUnavailableError
from dagster_resilient.launchers import Launcher, OwnLocation
from dagster_resilient.recover import Recoverer, is_half_launched
from dagster_resilient.recovery import Observation, RecoveryPolicy, Rests, Sighting, hung, observe
from dagster_resilient.resources import ResilientResource
from dagster_resilient.scopes import OwnRuns, Scope
from dagster_resilient.state.beats import LiveName, list_beats, store_now
from dagster_resilient.state.fences import fence_run
from dagster_resilient.state.hangs import HangName, list_hangs, read_hang
from dagster_resilient.storage.retry import hasty

_LIVE = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]
_RUNS_PER_QUERY = 500
_LAUNCHES_PER_TICK = 200
_GIVEN_UP_PER_TICK = 10
_SECONDS_PER_TICK = 45.0


class RecoveryTick:
    """One tick.

    Args:
        context: The sensor's context.
        resource: Where state and heartbeats are kept.
        policy: What failures are worth.
        scope: Which runs are looked after; by default those of the context's code location.
        briefs: Tells what a run computes; by default the context's definitions.
        launcher: Launches re-executions; by default from the context's definitions.
        rests: What earlier ticks of this process found to need no look for now.
    """

    def __init__(
        self,
        context: dg.SensorEvaluationContext,
        resource: ResilientResource,
        policy: RecoveryPolicy,
        *,
        scope: Scope | None = None,
        briefs: Briefs | None = None,
        launcher: Launcher | None = None,
        rests: Rests | None = None,
    ) -> None:
        self._context, self._resource, self._policy = context, resource, policy
        self._instance = context.instance
        self._records = resource.records
        self._deadline = time.monotonic() + _SECONDS_PER_TICK
        self._outcomes: Counter[str] = Counter()
        repository: Any = context.repository_def
        self._scope = scope or OwnRuns(context)
        self._rests = Rests() if rests is None else rests
        self._recoverer = Recoverer(
            context.instance,
            resource,
            policy,
            briefs=briefs or LiveBriefs(repository, context.instance),
            launcher=launcher or OwnLocation(context),
            by=context.sensor_name,
            log=context.log,
            told=self,
            rests=self._rests,
        )

    def count(self, what: str) -> None:
        """Count something that was done, for the tick's words."""
        self._outcomes[what] += 1

    def run(self) -> str:
        """Look, close what is lost, recover what failed; return what was done in words."""
        with compat.kept_connections(self._instance):
            return self._run()

    def _run(self) -> str:
        memory = _read_cursor(self._context.cursor)
        try:
            observation, paused = self._detect(memory)
        except StorageError as error:
            self._context.update_cursor(memory.outage().model_dump_json())
            return f"The store does not answer, so nothing is judged: {error}"
        self._context.update_cursor(observation.model_dump_json())
        self._each(self._failed_runs(), self._recoverer.recover_or_say_why_not)
        done = ", ".join(f"{count} {what}" for what, count in sorted(self._outcomes.items()) if count)
        return "; ".join(part for part in (paused, done) if part) or "Nothing to recover."

    # ---- detection

    def _detect(self, memory: Observation) -> tuple[Observation, str | None]:
        # Without patience: a probe that waits for the end of an outage would not notice that there was one.
        store = hasty(self._resource.store, 0.0)
        if memory.made and not store.is_made():
            raise StoreUnavailableError(f"{store.url} was there, and holds nothing now (unmounted, renamed?).")
        # The clock first: what is listed after it can only be younger than it looks, however slow the store is.
        now = store_now(store, f"sensor-{compat.instance_id(self._instance)}").timestamp()
        all_beats, marks = list_beats(store), list_hangs(store)
        beats = _newest_worker_beats(all_beats)
        live = {run.run_id: run for run in self._runs(dg.RunsFilter(statuses=_LIVE))}
        look = observe(
            memory,
            now,
            [Sighting(run_id, beats.get(run_id)) for run_id in live],
            ttl=self._resource.ttl_seconds,
            interval=self._resource.interval,
            start_allowance=self._policy.start_allowance,
        )
        lost = ((live[run_id], why) for run_id, why in look.lost.items())
        self._each(lost, lambda found: self._close(*found, verdict="lost"))
        if look.paused is None:
            terms = {"ttl": self._resource.ttl_seconds, "interval": self._resource.interval}
            stuck = hung(marks, all_beats, now, look.observation.since, **terms)
            wanted = [(run, stuck[run_id]) for run_id, run in live.items() if run_id in stuck.keys() - look.lost.keys()]
            self._each(wanted, lambda found: self._close_hung(*found, now=now))
        return look.observation.model_copy(update={"made": store.is_made()}), look.paused

    def _close_hung(self, run: dg.DagsterRun, mark: HangName, *, now: float) -> None:
        """Its sidecar reads the fence, and ends the process, also where that hangs in C code."""
        hang = read_hang(hasty(self._resource.store, 0.0), mark.key)
        if hang is not None:
            self._close(run, hang.words(now - mark.last_modified.timestamp()), verdict="hung")

    def _close(self, run: dg.DagsterRun, why: str, *, verdict: Literal["lost", "hung"]) -> None:
        """Fence first: from here on the run commits nothing, whatever its status says. Then close it in Dagster."""
        reason = f"{verdict.capitalize()}: {why}."
        fence_run(self._records, run.run_id, reason=reason, failure_class=verdict, by=self._context.sensor_name)
        current = self._instance.get_run_by_id(run.run_id)
        if current is None or current.is_finished:
            return
        compat.report_run_failed(self._instance, current, f"{reason} Its later writes are refused.")
        compat.free_slots(self._instance, run.run_id)
        self.count(f"{verdict} runs closed")
        self._context.log.warning(f"Run {run.run_id} is {verdict}: {why}.")

    # ---- recovery

    def _failed_runs(self) -> Iterable[dg.DagsterRun]:
        """Yield the failed runs that nobody has re-executed, and that need a look."""
        turn = self._rests.turn(_GIVEN_UP_PER_TICK)
        known: set[str] = set()
        since = datetime.now(UTC) - timedelta(seconds=self._policy.lookback)
        failed = self._runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], updated_after=since))
        while page := list(itertools.islice(failed, _RUNS_PER_QUERY)):
            # Most failed runs of a day have been re-executed long ago: one query tells for many.
            children = compat.children_of(self._instance, [run.run_id for run in page])
            again = {child.parent_run_id for child in children if not is_half_launched(child)}
            left = [run for run in page if run.run_id not in again]
            known |= {run.run_id for run in left}
            yield from (run for run in left if run.run_id in turn or self._is_due(run))
        self._rests.keep(known)

    def _is_due(self, run: dg.DagsterRun) -> bool:
        """Whether a failed run needs a look. Of one that rests people are told why, if they can expect more of it."""
        if self._rests.is_due(run.run_id):
            return True
        if why := self._rests.why(run.run_id):
            self.count(why)
        return False

    # ---- bounds

    def _runs(self, wanted: dg.RunsFilter) -> Iterator[dg.DagsterRun]:
        """Yield the runs that are looked after, newest first, however many there are."""
        cursor: str | None = None
        while True:
            page = list(self._instance.get_runs(wanted, cursor=cursor, limit=_RUNS_PER_QUERY))
            yield from (run for run in page if self._scope.holds(run))
            if len(page) < _RUNS_PER_QUERY:
                return
            cursor = page[-1].run_id

    def _each(self, things: Iterable[Any], act: Callable[[Any], None]) -> None:
        """Act on each, within the tick's time. One bad run is logged and skipped, and never stops the others."""
        for thing in things:
            if time.monotonic() > self._deadline or self._outcomes["re-executed"] >= _LAUNCHES_PER_TICK:
                self._outcomes["left for the next tick"] += 1
                return
            try:
                act(thing)
            except Exception:
                # One bad run must not stop the recovery of the others.
                self._outcomes["skipped on an error"] += 1
                run = thing if isinstance(thing, dg.DagsterRun) else thing[0]  # its config may hold secrets
                self._context.log.exception(f"Recovery of run {run.run_id} failed and is tried again.")


def _newest_worker_beats(beats: Iterable[LiveName]) -> dict[str, float]:
    newest: dict[str, float] = {}
    for beat in beats:
        if beat.role == "worker":
            newest[beat.run_id] = max(newest.get(beat.run_id, 0.0), beat.last_modified.timestamp())
    return newest


def _read_cursor(cursor: str | None) -> Observation:
    """A cursor of another version only costs one more TTL of watching."""
    try:
        return Observation.model_validate_json(cursor) if cursor else Observation()
    except pydantic.ValidationError:
        return Observation()
