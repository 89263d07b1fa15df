"""`build_recovery_sensor`: detects lost and failed runs, and re-executes what is missing, exactly once.

Level-triggered: every tick looks at the live and the recently failed runs as they are, so a tick that died in the
middle is made up for by the next one. All it decides is in `recovery`; all it does is fence, report, launch, record.

No postponed annotations here: Dagster inspects the evaluation function.
"""

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import dagster as dg
import pydantic

from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import ConfigurationError, StorageError
from dagster_resilient.facts import RunFacts
from dagster_resilient.recovery import Observation, Plan, RecoveryPolicy, Sighting, classify, hung, observe, plan
from dagster_resilient.resources import RECOVERY_OF_TAG, ResilientResource
from dagster_resilient.state.beats import LiveName, list_beats, store_now
from dagster_resilient.state.fences import fence_run, read_fence
from dagster_resilient.state.hangs import HangName, list_hangs, read_hang
from dagster_resilient.state.records import Verdict
from dagster_resilient.storage import keys
from dagster_resilient.storage.retry import hasty

ATTEMPT_TAG = "resilient/attempt"
REASON_TAG = "resilient/reason"
INPUTS_TAG = "resilient/inputs"
EXECUTOR_NAME = "resilient"
_RUN_IDS = uuid.UUID("6f0d3b0e-8c2b-5b0e-9d53-0f2f5d0b7a11")
_LIVE = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]
_TAG_LENGTH = 250
_RUNS_PER_QUERY = 500
_LAUNCHES_PER_TICK = 200
_SECONDS_PER_TICK = 45.0


def build_recovery_sensor(
    policy: RecoveryPolicy | None = None,
    *,
    name: str = "resilient_recovery",
    resource_key: str = "resilient",
    minimum_interval_seconds: int = 10,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """Build the sensor that recovers the runs of a code location.

    It looks after runs of jobs whose executor is `resilient_executor`: only these have a worker whose heartbeat tells
    whether it lives.

    Args:
        policy: How many attempts each class of failure gets, and how they are spaced.
        name: Name of the sensor.
        resource_key: Key of the `ResilientResource`.
        minimum_interval_seconds: Seconds between ticks.
        default_status: Whether it runs without being switched on.
    """
    chosen = policy or RecoveryPolicy()

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        required_resource_keys={resource_key},
        description="Fences lost runs, and re-executes from the last committed partition and checkpoint.",
    )
    def recovery(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        resource: ResilientResource = getattr(context.resources, resource_key)
        return dg.SkipReason(RecoveryTick(context, resource, chosen).run())

    return recovery


class RecoveryTick:
    """One tick."""

    def __init__(
        self, context: dg.SensorEvaluationContext, resource: ResilientResource, policy: RecoveryPolicy
    ) -> None:
        self._context, self._resource, self._policy = context, resource, policy
        self._instance = context.instance
        self._repository: Any = context.repository_def
        self._records = resource.records
        self._deadline = time.monotonic() + _SECONDS_PER_TICK
        self._outcomes: Counter[str] = Counter()

    def run(self) -> str:
        """Look, close what is lost, recover what failed; return what was done in words."""
        memory = _read_cursor(self._context.cursor)
        try:
            observation, paused = self._detect(memory)
        except StorageError as error:
            self._context.update_cursor(memory.outage().model_dump_json())
            return f"The store does not answer, so nothing is judged: {error}"
        self._context.update_cursor(observation.model_dump_json())
        self._each(self._failed_runs(), self._recover_or_say_why_not)
        done = ", ".join(f"{count} {what}" for what, count in sorted(self._outcomes.items()) if count)
        return "; ".join(part for part in (paused, done) if part) or "Nothing to recover."

    # ---- detection

    def _detect(self, memory: Observation) -> tuple[Observation, str | None]:
        # Without patience: a probe that waits for the end of an outage would not notice that there was one.
        store = hasty(self._resource.store, 0.0)
        all_beats, marks = list_beats(store), list_hangs(store)
        beats = _newest_worker_beats(all_beats)
        now = store_now(store, f"sensor-{compat.instance_id(self._instance)}").timestamp()
        live = {run.run_id: run for run in self._runs(dg.RunsFilter(statuses=_LIVE))}
        look = observe(
            memory,
            now,
            [Sighting(run_id, beats.get(run_id)) for run_id in live],
            ttl=self._resource.ttl_seconds,
            interval=self._resource.heartbeat_seconds,
            start_allowance=self._policy.start_allowance,
        )
        lost = ((live[run_id], why) for run_id, why in look.lost.items())
        self._each(lost, lambda found: self._close(*found, verdict="lost"))
        if look.paused is None:
            terms = {"ttl": self._resource.ttl_seconds, "interval": self._resource.heartbeat_seconds}
            stuck = hung(marks, all_beats, now, look.observation.since, **terms)
            wanted = [(run, stuck[run_id]) for run_id, run in live.items() if run_id in stuck.keys() - look.lost.keys()]
            self._each(wanted, lambda found: self._close_hung(*found, now=now))
        return look.observation, look.paused

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
        self._outcomes[f"{verdict} runs closed"] += 1
        self._context.log.warning(f"Run {run.run_id} is {verdict}: {why}.")

    # ---- recovery

    def _failed_runs(self) -> Iterable[dg.DagsterRun]:
        since = datetime.now(UTC) - timedelta(seconds=self._policy.lookback)
        failed = self._runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], updated_after=since))
        while page := list(itertools.islice(failed, _RUNS_PER_QUERY)):
            # Most failed runs of a day have been re-executed long ago: one query tells for many.
            children = compat.children_of(self._instance, [run.run_id for run in page])
            again = {child.parent_run_id for child in children if not _is_half_launched(child)}
            yield from (run for run in page if run.run_id not in again)

    def _recover_or_say_why_not(self, run: dg.DagsterRun) -> None:
        """Tell people once, on the run's own page, what keeps it from being recovered; every tick tries again."""
        try:
            self._recover(run)
        except ConfigurationError as error:
            # It will not become right by itself: a partition that was deleted, a run without a code origin.
            reason = f"It cannot be re-executed: {error}"
            verdict = Verdict(run_id=run.run_id, action="gave up", failure_class="recovery", reason=reason)
            self._outcomes["given up"] += int(self._settle(run, verdict))
        except Exception as error:
            verdict = Verdict(run_id=run.run_id, action="failed", failure_class="recovery", reason=str(error))
            self._settle(run, verdict)
            raise

    def _recover(self, run: dg.DagsterRun) -> None:
        """Decide about one failed run, and act on it."""
        group = [other for other in compat.run_group(self._instance, run) if not _is_half_launched(other)]
        if group[-1].run_id != run.run_id or any(not other.is_finished for other in group):
            return  # a newer run of the group goes on with the work, or already did
        facts = RunFacts(self._context, self._resource, run, group)
        if _dagster_retries(run) or self._settled(run, facts):
            return
        if compat.cancelled_by_user(self._instance, run):
            self._settle(
                run, Verdict(run_id=run.run_id, action="left", failure_class="cancelled", reason="A user cancelled it.")
            )
            return
        fence = read_fence(self._records, run.run_id)
        errors = compat.failed_step_errors(self._instance, run.run_id)
        failure = classify(fence.failure_class if fence else None, [name for e in errors for name in e.classes])
        seen = fence.reason if fence and failure in {"lost", "hung"} else _first_words(errors)
        self._fence_group(run, group)
        inputs = facts.inputs()
        ours = [other.tags.get(INPUTS_TAG, inputs) for other in group if RECOVERY_OF_TAG in other.tags]
        attempts = ours.count(inputs)
        tried = (failure, attempts, self._elapsed(run), run.run_id)
        decision = self._policy.decide(*tried, earlier=len(ours) - attempts)
        if decision.action == "wait" and facts.assets and facts.progressed:
            decision = self._policy.decide(*tried, progressed=True)
        if decision.action == "wait":
            self._outcomes["waiting for their backoff"] += 1
            return
        verdict = Verdict(
            run_id=run.run_id,
            action="gave up",
            failure_class=failure,
            reason=f"{decision.reason}: {seen}",
            attempt=decision.attempt,
        )
        if decision.action == "give_up":
            left = plan(facts.assets).words()
            verdict = verdict.model_copy(update={"reason": f"{verdict.reason}; left undone: {left}"})
            self._outcomes["given up"] += int(self._settle(run, verdict))
            return
        self._relaunch(run, facts, verdict, inputs)

    def _fence_group(self, run: dg.DagsterRun, group: list[dg.DagsterRun]) -> None:
        """Fence before anything is read for the plan: an orphan of a failed run may still be writing."""
        reason = f"Run {run.run_id} failed; recovery plans what it left."
        for earlier in group:
            fence_run(
                self._records, earlier.run_id, reason=reason, failure_class="superseded", by=self._context.sensor_name
            )

    def _relaunch(self, run: dg.DagsterRun, facts: RunFacts, verdict: Verdict, inputs: str) -> None:
        """Record the decision, then launch: a tick that dies in between comes to the same decision and the same id."""
        missing = plan(facts.assets)
        facts.adopt_unrecorded()
        if facts.assets and not missing.missing:
            self._settle(
                run, verdict.model_copy(update={"action": "adopted", "reason": "Everything it had to do is committed."})
            )
            self._outcomes["adopted"] += 1
            return
        child = str(uuid.uuid5(_RUN_IDS, f"{run.run_id}:{verdict.attempt}"))
        words = f"{verdict.reason}; {missing.words()}"
        tags = self._tags(run, missing, verdict) | {INPUTS_TAG: inputs}
        self._settle(run, verdict.model_copy(update={"action": "relaunched", "reason": words, "child": child}))
        _, new = compat.launch_reexecution(
            self._context,
            run,
            run_id=child,
            asset_keys=[dg.AssetKey(list(key)) for key in missing.missing] or None,
            tags=tags,
        )
        self._outcomes["re-executed"] += int(new)

    def _tags(self, run: dg.DagsterRun, missing: Plan, verdict: Verdict) -> dict[str, str]:
        tags = compat.kept_tags(run, self._instance)
        if missing.missing:
            wanted = {dg.AssetKey(list(key)): partitions for key, partitions in missing.missing.items()}
            tags = {tag: value for tag, value in tags.items() if not compat.is_partition_tag(tag)}
            tags |= compat.partition_tags(self._repository, wanted, self._instance)
        reason = f"{verdict.failure_class}: {verdict.reason}"[:_TAG_LENGTH]
        return tags | {RECOVERY_OF_TAG: run.run_id, ATTEMPT_TAG: str(verdict.attempt), REASON_TAG: reason}

    # ---- records

    def _settled(self, run: dg.DagsterRun, facts: RunFacts) -> bool:
        """Whether nothing more is to be done. A decision to launch is not the end: the tick may have died over it.

        Nor is a giving up, once the code or the data above is another than that which the run was launched with.
        """
        final = self._records.get(_verdict_key(run, "final"), Verdict)
        if final is None or final.action != "gave up" or INPUTS_TAG not in run.tags:
            return final is not None
        return run.tags[INPUTS_TAG] == facts.inputs()

    def _settle(self, run: dg.DagsterRun, verdict: Verdict) -> bool:
        """Record a decision once, in the store and on the run, where people look for it; return whether it is new."""
        kind = {"relaunched": "launch", "failed": "error"}.get(verdict.action, "final")
        new = self._records.create(_verdict_key(run, kind), verdict)
        if new:
            self._instance.report_engine_event(f"Recovery: {verdict.action}. {verdict.reason}", run)
            self._context.log.info(f"Run {run.run_id}: {verdict.action}. {verdict.reason}")
        return bool(new)

    def _elapsed(self, run: dg.DagsterRun) -> float:
        record = self._instance.get_run_record_by_id(run.run_id)
        ended = record.end_time if record is not None and record.end_time is not None else time.time()
        return max(0.0, time.time() - ended)

    # ---- bounds

    def _runs(self, wanted: dg.RunsFilter) -> Iterator[dg.DagsterRun]:
        """Yield the runs of this code location that keep a heartbeat, newest first, however many there are."""
        cursor: str | None = None
        while True:
            page = list(self._instance.get_runs(wanted, cursor=cursor, limit=_RUNS_PER_QUERY))
            yield from (run for run in page if self._is_ours(run))
            if len(page) < _RUNS_PER_QUERY:
                return
            cursor = page[-1].run_id

    def _is_ours(self, run: dg.DagsterRun) -> bool:
        """`belongs_to` comes first: it knows the job."""
        return (
            compat.belongs_to(self._context, run)
            and compat.job_executor_name(self._repository, run.job_name) == EXECUTOR_NAME
        )

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
                self._context.log.exception(f"Recovery failed and is tried again at the next tick: {thing}")


def _newest_worker_beats(beats: Iterable[LiveName]) -> dict[str, float]:
    newest: dict[str, float] = {}
    for beat in beats:
        if beat.role == "worker":
            newest[beat.run_id] = max(newest.get(beat.run_id, 0.0), beat.last_modified.timestamp())
    return newest


def _first_words(errors: Sequence[compat.RecordedError]) -> str:
    """Return what was logged of a failure, shortened to a line."""
    crashed = [error for error in errors if error.exit_code is not None] or list(errors)
    message = next((error.message for error in crashed if error.message), "the run failed without an error in its log")
    return message.split("\n", 1)[0][:_TAG_LENGTH]


def _is_half_launched(run: dg.DagsterRun) -> bool:
    """Whether a tick died between creating this run and submitting it. The next tick goes on with it by its id."""
    return run.status is dg.DagsterRunStatus.NOT_STARTED and RECOVERY_OF_TAG in run.tags


def _dagster_retries(run: dg.DagsterRun) -> bool:
    """Whether Dagster's own run retries act on this failure: one owner of retries."""
    return run.tags.get("dagster/will_retry") == "true" or "dagster/auto_retry_run_id" in run.tags


def _verdict_key(run: dg.DagsterRun, kind: str) -> str:
    root = keys.encode_segment(run.root_run_id or run.run_id)
    return f"decisions/{root}/{keys.encode_segment(run.run_id)}.{kind}.json"


def _read_cursor(cursor: str | None) -> Observation:
    """A cursor of another version only costs one more TTL of watching."""
    try:
        return Observation.model_validate_json(cursor) if cursor else Observation()
    except pydantic.ValidationError:
        return Observation()
