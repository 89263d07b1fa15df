"""The code location of the tests beside Dagster's own daemons; it is copied into each test's folder."""

import datetime as dt
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_resilient import (
    EverySteps,
    RecoveryPolicy,
    ResilientIOManager,
    ResilientResource,
    build_recovery_sensor,
    resilient_executor,
)
from dagster_resilient.alerts import RunGaveUp, build_gave_up_sensor

RUNNING = dg.DefaultSensorStatus.RUNNING
HERE = Path(__file__).parent
LETTERS = dg.StaticPartitionsDefinition(list("abcd"))
resilient = ResilientResource(url=str(HERE / "store"), heartbeat_seconds=0.4, ttl_seconds=3.0)


def compute(asset: str, partition: str | None = None) -> int:
    """Note the computation; fail where the test says so."""
    flag = HERE / f"fail-{asset}-{partition}"
    if flag.exists() and (left := flag.read_text()):
        flag.write_text(left[1:])
        raise ValueError(f"{asset} is told to fail")
    note("computed", f"{asset}[{partition}]" if partition else asset)
    return 1


def note(name: str, line: str) -> None:
    """Note something down for the test."""
    with (HERE / name).open("a") as notes:
        notes.write(f"{line}\n")


def an_asset(name: str, *above: str, partitions: Any = LETTERS, policy: Any = None) -> Any:
    """Return an asset that computes one number for each of its partitions."""

    @dg.asset(name=name, deps=list(above), partitions_def=partitions, backfill_policy=policy, code_version="1")
    def asset(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
        if partitions is None:
            context.log.info(str(compute(name)))
            return
        for part in resilient.task(context).partitions():
            part.save(compute(name, part.key))

    return asset


@dg.asset(code_version="1")
def value() -> int:
    """An unpartitioned value."""
    return compute("value")


@dg.asset(deps=[value], code_version="1")
def below() -> int:
    """A value below it."""
    return compute("below")


@dg.asset(code_version="1", pool="gpu")
def pooled() -> int:
    """A value whose step takes a slot of a pool."""
    return compute("pooled")


@dg.asset(code_version="1", retry_policy=dg.RetryPolicy(max_retries=1))
def trained(context: dg.AssetExecutionContext, resilient: ResilientResource) -> int:
    """A training that fails at every try, until it is done, one step further each time."""
    with resilient.task(context).training(save=EverySteps(1)) as session:
        note("tried", f"{context.retry_number}:{session.resumed_from}")
        for step in session.steps(4):
            if step and step - 1 == (session.resumed_from or 0):
                raise ValueError(f"fails at step {step}")
    return 1


@dg.asset(
    code_version="1",
    automation_condition=dg.AutomationCondition.missing() & ~dg.AutomationCondition.in_progress(),
    freshness_policy=dg.FreshnessPolicy.time_window(fail_window=dt.timedelta(hours=1)),
)
def automated() -> int:
    """A value that declarative automation asks for, as soon as the test lets it."""
    return compute("automated")


@dg.sensor(job_name="values", minimum_interval_seconds=1, default_status=RUNNING)
def asking() -> Any:
    """Asks for the same run at each tick, as soon as the test lets it."""
    return dg.RunRequest(run_key="only") if (HERE / "ask").exists() else dg.SkipReason("not yet")


@dg.schedule(job_name="eaches", cron_schedule="0 0 * * *", default_status=dg.DefaultScheduleStatus.RUNNING)
def daily(context: dg.ScheduleEvaluationContext) -> Any:
    """Asks for one partition a day, as soon as the test lets it."""
    if not (HERE / "daily").exists():
        return dg.SkipReason("not yet")
    return dg.RunRequest(partition_key="b", tags={"day": context.scheduled_execution_time.date().isoformat()})


@dg.run_failure_sensor(minimum_interval_seconds=1, default_status=RUNNING)
def every_failure(context: dg.RunFailureSensorContext) -> None:
    """Dagster's own alert."""
    note("failures", context.dagster_run.run_id)


def tell(gone: RunGaveUp) -> None:
    """Our alert."""
    if (HERE / "pager-is-down").exists():
        raise ConnectionError("the pager is down")
    note("given-up", f"{gone.run.run_id}|{gone.failure_class}|{gone.attempts}|{','.join(gone.assets)}")


@dg.op(config_schema={"partition": str})
def an_op(context: dg.OpExecutionContext, resilient: ResilientResource) -> None:
    """An op of a job without assets."""
    compute("an_op", context.op_config["partition"])


@dg.static_partitioned_config(list("ab"))
def by_letter(partition_key: str) -> Any:
    """The configuration of the op job for a partition."""
    return {"ops": {"an_op": {"config": {"partition": partition_key}}}}


@dg.job(config=by_letter)
def op_job() -> None:
    """A partitioned job without assets."""
    an_op()


def definitions(executor: dg.ExecutorDefinition) -> dg.Definitions:
    """Return the definitions; the test's own process, as run worker, takes an executor without processes."""
    policy = RecoveryPolicy(first_wait=0.0, start_allowance=0.0)
    return dg.Definitions(
        assets=[
            value,
            below,
            pooled,
            trained,
            automated,
            an_asset("each"),
            an_asset("each_below", "each"),
            an_asset("ranged", policy=dg.BackfillPolicy.single_run()),
            an_asset("ranged_below", "ranged", policy=dg.BackfillPolicy.single_run()),
            an_asset("pairs", policy=dg.BackfillPolicy.multi_run(2)),
        ],
        jobs=[
            dg.define_asset_job("values", [value, below]),
            dg.define_asset_job("eaches", ["each", "each_below"], partitions_def=LETTERS),
            dg.define_asset_job("pooled_job", [pooled]),
            dg.define_asset_job("unwatched", [value], executor_def=dg.in_process_executor),
            dg.define_asset_job("trained_job", [trained]),
            op_job,
        ],
        sensors=[
            build_recovery_sensor(policy, minimum_interval_seconds=1),
            build_gave_up_sensor(tell, minimum_interval_seconds=1),
            dg.AutomationConditionSensorDefinition("automation", target="*", default_status=RUNNING),
            asking,
            every_failure,
        ],
        schedules=[daily],
        executor=executor,
        resources={"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)},
    )


defs = definitions(resilient_executor)
