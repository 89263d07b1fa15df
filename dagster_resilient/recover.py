"""The recovery of one failed run: decide, fence, plan, record, launch.

Every step of it may be the last one of a killed process. So the decision is recorded before it is carried out, a
re-execution has an id that follows from the decision, and the next tick does again what was left undone.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Protocol

import dagster as dg

from dagster_resilient import dagster_compat as compat
from dagster_resilient.briefs import Briefs
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.facts import RunFacts
from dagster_resilient.launchers import Launcher, Relaunch
from dagster_resilient.planning import RunPlan, check_keys, plan_from
from dagster_resilient.recovery import FailureClass, RecoveryPolicy, Rests, attempts_of_other_kind, classify
from dagster_resilient.resources import RECOVERY_OF_TAG, ResilientResource
from dagster_resilient.state.beats import store_now
from dagster_resilient.state.fences import fence_run, read_fence
from dagster_resilient.state.preemption import read_preemption
from dagster_resilient.state.records import Verdict
from dagster_resilient.storage import keys

ATTEMPT_TAG = "resilient/attempt"
REASON_TAG = "resilient/reason"
INPUTS_TAG = "resilient/inputs"
VERDICT_TAG = "resilient/verdict"
TAG_LENGTH = 250
WAITING = "waiting for their backoff"
# Seconds after which a run that is not the newest of its group, or that waits for long, is looked at all the same.
_REST_OF_OLDER, _LONGEST_REST = 60.0, 600.0
_RUN_IDS = uuid.UUID("6f0d3b0e-8c2b-5b0e-9d53-0f2f5d0b7a11")


class Told(Protocol):
    """Is told what was done about runs."""

    def count(self, what: str) -> None:
        """Count one more."""


class Recoverer:
    """Recovers failed runs."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        resource: ResilientResource,
        policy: RecoveryPolicy,
        *,
        briefs: Briefs,
        launcher: Launcher,
        by: str,
        log: logging.Logger,
        told: Told,
        rests: Rests,
    ) -> None:
        """Take what it works with.

        Args:
            instance: The instance of the runs.
            resource: Where their state is kept.
            policy: What failures are worth.
            briefs: Tells what a run is to compute.
            launcher: Launches re-executions.
            by: Who fences, for people.
            log: The tick's log.
            told: Is told what was done.
            rests: Is told which runs need no look for now.
        """
        self._instance, self._resource, self._policy = instance, resource, policy
        self._records = resource.records
        self._briefs, self._launcher, self._by, self._log, self._told = briefs, launcher, by, log, told
        self._rests = rests

    def recover_or_say_why_not(self, run: dg.DagsterRun) -> None:
        """Tell people once, on the run's own page, what keeps it from being recovered; every tick tries again."""
        try:
            self._recover(run)
        except ConfigurationError as error:
            # It will not become right by itself: a partition that was deleted, a run without a code origin.
            reason = f"It cannot be re-executed: {error}"
            verdict = Verdict(run_id=run.run_id, action="gave up", failure_class="recovery", reason=reason)
            if self._settle(run, verdict):
                self._told.count("given up")
        except Exception as error:
            verdict = Verdict(run_id=run.run_id, action="failed", failure_class="recovery", reason=str(error))
            self._rests.fail(run.run_id)
            self._settle(run, verdict)
            raise

    def _recover(self, run: dg.DagsterRun) -> None:
        """Decide about one failed run, and act on it."""
        if compat.dagster_retries(self._instance, run, lambda: self._elapsed(run)):
            return
        group = [other for other in compat.run_group(self._instance, run) if not is_half_launched(other)]
        if any(not other.is_finished for other in group):
            return
        if group[-1].run_id != run.run_id:  # a newer run of the group went on with the work
            self._rests.rest(run.run_id, _REST_OF_OLDER)
            return
        facts = RunFacts(self._instance, self._resource, self._briefs, run, group)
        if self._settled(run, facts):
            return
        cancelled = compat.cancelled_by_user(self._instance, run)
        why = "A user cancelled it." if cancelled else compat.why_backfill_is_over(self._instance, run)
        if why is not None:
            self._settle(run, Verdict(run_id=run.run_id, action="left", failure_class="cancelled", reason=why))
            return
        self._decide(run, facts, group)

    def _decide(self, run: dg.DagsterRun, facts: RunFacts, group: Sequence[dg.DagsterRun]) -> None:
        failure, seen = self._failure(run)
        self._fence_group(run, group)
        inputs = facts.inputs()
        ours = [other for other in group if is_our_own(other)]
        same = [other for other in ours if other.tags.get(INPUTS_TAG, inputs) == inputs]
        free = attempts_of_other_kind(failure, [_class_of(other) for other in same])
        elapsed = self._elapsed(run)
        tried = (failure, len(same), elapsed, run.run_id)
        decision = self._policy.decide(*tried, earlier=len(ours) - len(same), free=free)
        if decision.action == "wait" and ours and facts.assets and facts.progressed:
            decision = self._policy.decide(*tried, free=free, progressed=True)
        if decision.action == "wait":
            self._told.count(WAITING)
            self._rests.rest(run.run_id, min(_LONGEST_REST, decision.delay - elapsed), WAITING)
            return
        reason = f"{decision.reason}: {seen}"
        verdict = Verdict(
            run_id=run.run_id, action="gave up", failure_class=failure, reason=reason, attempt=decision.attempt
        )
        if decision.action == "launch":
            self._relaunch(run, facts, verdict, inputs)
            return
        left = plan_from(facts, run, self._instance).words()
        if self._settle(run, verdict.model_copy(update={"reason": f"{reason}; left undone: {left}"})):
            self._told.count("given up")

    def _failure(self, run: dg.DagsterRun) -> tuple[FailureClass, str]:
        """Return the class of a failure, and what was seen of it in words."""
        fence = read_fence(self._records, run.run_id)
        errors = compat.failed_step_errors(self._instance, run.run_id)
        told = read_preemption(self._records, run.run_id)
        failure = classify(
            fence.failure_class if fence else None,
            [name for error in errors for name in error.classes],
            crashed=any(error.exit_code is not None for error in errors),
            told_to_leave=told is not None,
        )
        return failure, fence.reason if fence and failure in {"lost", "hung"} else _first_words(errors)

    def _fence_group(self, run: dg.DagsterRun, group: Sequence[dg.DagsterRun]) -> None:
        """Fence before anything is read for the plan: an orphan of a failed run may still be writing."""
        reason = f"Run {run.run_id} failed; recovery plans what it left."
        for earlier in group:
            fence_run(self._records, earlier.run_id, reason=reason, failure_class="superseded", by=self._by)
            compat.free_slots(self._instance, earlier.run_id)

    def _relaunch(self, run: dg.DagsterRun, facts: RunFacts, verdict: Verdict, inputs: str) -> None:
        """Record the decision, then launch: a tick that dies in between comes to the same decision and the same id."""
        found = plan_from(facts, run, self._instance)
        facts.adopt_unrecorded()
        if found.is_empty:
            reason = "Everything it had to do is committed."
            if found.unevaluated:
                reason = f"{reason} {found.words()}"
            self._settle(run, verdict.model_copy(update={"action": "adopted", "reason": reason}))
            self._told.count("adopted")
            return
        compat.take_retries_over(self._instance, run)
        compat.reopen_backfill(self._instance, run)
        child = str(uuid.uuid5(_RUN_IDS, f"{run.run_id}:{verdict.attempt}"))
        words = f"{verdict.reason}; {found.words()}"
        new = self._settle(run, verdict.model_copy(update={"action": "relaunched", "reason": words, "child": child}))
        wanted = Relaunch(
            parent=run,
            run_id=child,
            assets=[dg.AssetKey(list(key)) for key in found.missing] if found.by_assets else None,
            checks=check_keys(found, facts.brief),
            tags=self._tags(run, found, verdict) | {INPUTS_TAG: inputs},
            in_doubt=None if new else self._age_of_decision(run),
        )
        if self._launcher.launch(wanted):
            self._told.count("re-executed")
        compat.reopen_backfill(self._instance, run)  # the daemon may have closed it before it could see the new run

    def _age_of_decision(self, run: dg.DagsterRun) -> float:
        """Return how long ago the launch was decided upon, in seconds by the clock of whoever keeps the records."""
        key = _verdict_key(run, "launch")
        listed = [info for info in self._records.list(key.rsplit("/", 1)[0] + "/") if info.key == key]
        now = store_now(self._resource.store, f"sensor-{compat.instance_id(self._instance)}")
        return (now - listed[0].last_modified).total_seconds() if listed else 0.0

    def _tags(self, run: dg.DagsterRun, found: RunPlan, verdict: Verdict) -> dict[str, str]:
        tags = compat.kept_tags(run, self._instance)
        if found.tags is not None:
            tags = {tag: value for tag, value in tags.items() if not compat.is_partition_tag(tag)} | dict(found.tags)
        reason = f"{verdict.failure_class}: {verdict.reason}"[:TAG_LENGTH]
        return tags | {RECOVERY_OF_TAG: run.run_id, ATTEMPT_TAG: str(verdict.attempt), REASON_TAG: reason}

    # ---- records

    def _settled(self, run: dg.DagsterRun, facts: RunFacts) -> bool:
        """Whether nothing more is to be done. A decision to launch is not the end: the tick may have died over it.

        Nor is a giving up, once the code or the data above is another than that which the run was launched with.
        """
        final = self._records.get(_verdict_key(run, "final"), Verdict)
        if final is None:
            return False
        if final.action != "gave up" or INPUTS_TAG not in run.tags:
            self._rests.rest(run.run_id)
            return True
        self._rests.give_up(run.run_id)
        return run.tags[INPUTS_TAG] == facts.inputs()

    def _settle(self, run: dg.DagsterRun, verdict: Verdict) -> bool:
        """Record a decision once, in the store and on the run, where people look for it; return whether it is new."""
        kind = {"relaunched": "launch", "failed": "error"}.get(verdict.action, "final")
        if verdict.action == "gave up":  # before the record: whoever alerts people finds the run by its tag
            compat.add_run_tags(self._instance, run.run_id, {VERDICT_TAG: verdict.action})
        new = self._records.create(_verdict_key(run, kind), verdict)
        if new:
            self._instance.report_engine_event(f"Recovery: {verdict.action}. {verdict.reason}", run)
            self._log.info(f"Run {run.run_id}: {verdict.action}. {verdict.reason}")
        return bool(new)

    def _elapsed(self, run: dg.DagsterRun) -> float:
        record = self._instance.get_run_record_by_id(run.run_id)
        ended = record.end_time if record is not None and record.end_time is not None else time.time()
        return max(0.0, time.time() - ended)


def is_half_launched(run: dg.DagsterRun) -> bool:
    """Whether a tick died between creating this run and submitting it. The next tick goes on with it by its id."""
    return run.status is dg.DagsterRunStatus.NOT_STARTED and is_our_own(run)


def is_our_own(run: dg.DagsterRun) -> bool:
    """Whether recovery launched this run. The UI, and Dagster's retries, copy a parent's tags to their own runs."""
    return run.parent_run_id is not None and run.tags.get(RECOVERY_OF_TAG) == run.parent_run_id


def _class_of(attempt: dg.DagsterRun) -> str:
    """Return the class of the failure that one of our re-executions followed."""
    return attempt.tags.get(REASON_TAG, "").split(":", 1)[0]


def _first_words(errors: Sequence[compat.RecordedError]) -> str:
    """Return what was logged of a failure, shortened to a line."""
    crashed = [error for error in errors if error.exit_code is not None] or list(errors)
    message = next((error.message for error in crashed if error.message), "the run failed without an error in its log")
    return message.split("\n", 1)[0][:TAG_LENGTH]


def _verdict_key(run: dg.DagsterRun, kind: str) -> str:
    return keys.verdict_key(run.root_run_id or run.run_id, run.run_id, kind)
