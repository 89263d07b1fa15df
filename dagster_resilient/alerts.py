"""`build_gave_up_sensor`: one alert for each failure that recovery does not repair, and none for those that it does.

Dagster's own failure sensors fire for every failed run, thus for every attempt. What people want to be woken for is the
end of the attempts.

No postponed annotations here: Dagster inspects the evaluation function.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import dagster as dg
import pydantic

from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import ConfigurationError, StorageError
from dagster_resilient.recover import VERDICT_TAG
from dagster_resilient.recovery.brief import RunBrief
from dagster_resilient.resources import ResilientResource
from dagster_resilient.state.records import Verdict
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Record

_RUNS_PER_QUERY = 500
_MOST_REMEMBERED = 1000
_SECONDS_PER_TICK = 45.0


@dataclass(frozen=True)
class RunGaveUp:
    """A run that recovery has given up.

    Attributes:
        run: The run, the last one of its group.
        assets: The assets that it was to compute, their parts joined by ``/``; empty for a job without assets.
        failure_class: What its failure was taken for, such as ``lost`` or ``user_error``; ``recovery`` where it cannot
            be re-executed at all.
        reason: Why, in words, with what is left undone.
        attempts: How often recovery had re-executed it.
    """

    run: dg.DagsterRun
    assets: tuple[str, ...]
    failure_class: str
    reason: str
    attempts: int


def build_gave_up_sensor(
    on_gave_up: Callable[[RunGaveUp], None],
    *,
    name: str = "resilient_gave_up",
    resource_key: str = "resilient",
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    code_locations: Collection[str] | None = None,
    lookback: float = 7 * 86_400.0,
) -> dg.SensorDefinition:
    """Build the sensor that tells people of the runs that recovery has given up, once for each.

    It also tells of a run once more where its process dies between the call of `on_gave_up` and the record of it.

    Args:
        on_gave_up: Sends the alert. Where it raises, it is called again at the next tick, until `lookback` is over.
        name: Name of the sensor. Two sensors of different names each tell of every run.
        resource_key: Key of the `ResilientResource`.
        minimum_interval_seconds: Seconds between ticks.
        default_status: Whether it runs without being switched on.
        code_locations: Whose runs it tells of; None: those of every code location on this store.
        lookback: Seconds; of older failures nobody is told any more.

    Raises:
        ConfigurationError: `lookback` is negative.
    """
    if lookback < 0:
        raise ConfigurationError(f"build_gave_up_sensor: lookback={lookback} must not be negative.")

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        required_resource_keys={resource_key},
        description="Tells of each run that recovery has given up, once.",
    )
    def gave_up(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        resource: ResilientResource = getattr(context.resources, resource_key)
        found = _given_up(context.instance, lookback, code_locations)
        return dg.SkipReason(_Alerts(context, resource, name, on_gave_up).tell(found))

    return gave_up


class _Alerted(Record):
    """Somebody was told of a run."""

    run_id: str
    by: str


class _Memory(pydantic.BaseModel):
    """The sensor's cursor: runs that the store need not be asked about again."""

    told: list[str] = pydantic.Field(default_factory=list)


def _given_up(
    instance: dg.DagsterInstance, lookback: float, code_locations: Collection[str] | None
) -> Iterator[dg.DagsterRun]:
    """Yield the runs that recovery has marked, newest first."""
    since = datetime.now(UTC) - timedelta(seconds=lookback)
    wanted = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], tags={VERDICT_TAG: "gave up"}, updated_after=since)
    cursor: str | None = None
    while True:
        page = list(instance.get_runs(wanted, cursor=cursor, limit=_RUNS_PER_QUERY))
        yield from (run for run in page if code_locations is None or _location(run) in code_locations)
        if len(page) < _RUNS_PER_QUERY:
            return
        cursor = page[-1].run_id


def _location(run: dg.DagsterRun) -> str | None:
    return None if run.remote_job_origin is None else compat.location_of(run)[0]


class _Alerts:
    """One tick."""

    def __init__(
        self,
        context: dg.SensorEvaluationContext,
        resource: ResilientResource,
        name: str,
        on_gave_up: Callable[[RunGaveUp], None],
    ) -> None:
        self._context, self._records, self._name, self._on_gave_up = context, resource.records, name, on_gave_up
        self._deadline = time.monotonic() + _SECONDS_PER_TICK
        self._known = _read_cursor(context.cursor)
        self._done: list[str] = []

    def tell(self, runs: Iterable[dg.DagsterRun]) -> str:
        """Tell of each run of which nobody was told; return what was done in words."""
        told = failed = 0
        for run in runs:
            if time.monotonic() > self._deadline:
                break
            try:
                told += self._tell(run)
            except StorageError as error:
                return f"The store does not answer, so nobody is told: {error}"
            except Exception:
                # One alert that cannot be sent must not keep back the others; the next tick sends it.
                failed += 1
                self._context.log.exception(f"Nobody could be told that run {run.run_id} was given up.")
        self._context.update_cursor(_Memory(told=self._done[:_MOST_REMEMBERED]).model_dump_json())
        return f"{told} told, {failed} could not be told" if told or failed else "Nothing to tell."

    def _tell(self, run: dg.DagsterRun) -> bool:
        """The record comes after the call: an alert that comes twice is better than one that never came."""
        key = keys.alert_key(self._name, run.run_id)
        if run.run_id in self._known or self._records.get(key, _Alerted) is not None:
            self._done.append(run.run_id)
            return False
        verdict = self._records.get(keys.verdict_key(run.root_run_id or run.run_id, run.run_id, "final"), Verdict)
        if verdict is None or verdict.action != "gave up":
            return False  # the tag was copied from the parent, or the run belongs to another store
        self._on_gave_up(
            RunGaveUp(run, self._assets(run), verdict.failure_class, verdict.reason, attempts=verdict.attempt)
        )
        self._records.create(key, _Alerted(run_id=run.run_id, by=self._name))
        self._done.append(run.run_id)
        return True

    def _assets(self, run: dg.DagsterRun) -> tuple[str, ...]:
        """Return what the run was to compute: as it was launched, or as its worker noted it down."""
        if run.asset_selection is not None:
            return tuple(sorted("/".join(key.path) for key in run.asset_selection))
        brief = self._records.get(keys.brief_key(run.run_id), RunBrief)
        return () if brief is None else tuple("/".join(asset.key) for asset in brief.assets)


def _read_cursor(cursor: str | None) -> frozenset[str]:
    """A cursor of another version only costs a look at the records."""
    try:
        return frozenset(_Memory.model_validate_json(cursor).told) if cursor else frozenset()
    except pydantic.ValidationError:
        return frozenset()
