"""The code location of the chaos tests.

Each computation is one line of a journal, written before it begins, so that computing twice leaves two lines however
the process ends. A computation can wait at a gate, a file that the test makes: so a run cannot end before the test has
killed it as often as it wants to. No postponed annotations here: Dagster inspects the assets.
"""

import os
import signal
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.event_log import SqliteEventLogStorage
from shapes import CELLS, FEW, GATE_AT, GATE_FOR, RIGHT, STORY, WITH_TOTAL, left, many, numbers

from dagster_resilient import (
    RecoveryPolicy,
    ResilientIOManager,
    ResilientResource,
    build_recovery_sensor,
    resilient_executor,
)
from dagster_resilient.task import Part, Task

FOLDER = Path(os.environ["CHAOS_FOLDER"])
SIZE = int(os.environ["CHAOS_SIZE"])
SECONDS = 0.02
LONGEST_WAIT = 600.0

few, long, costly = (dg.StaticPartitionsDefinition(keys) for keys in (FEW, numbers(SIZE), many(SIZE)))
square = dg.MultiPartitionsDefinition(
    {"left": dg.StaticPartitionsDefinition(left(SIZE)), "right": dg.StaticPartitionsDefinition(RIGHT)}
)
Values = dict[str, Any]
single = dg.BackfillPolicy.single_run()


def compute(context: dg.AssetExecutionContext, asset: str, partition: str, read: Values) -> Values:
    """Write the line, wait at the gate if there is one here, and take a little time.

    Returns:
        The run, and the runs that had computed what was read, by asset and partition.
    """
    story = context.run.tags[STORY]
    line = f"{asset} {partition} {os.getpid()} {context.run.run_id}\n"
    journal = os.open(FOLDER / f"journal-{story}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, line.encode())
    os.close(journal)
    if story == "torn" and partition == FEW[2]:
        _die_in_the_middle_of_the_next_event()
    if _has_gate(context, f"{asset}/{partition}"):
        deadline = time.monotonic() + LONGEST_WAIT
        while not (FOLDER / f"gate-{story}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    time.sleep(SECONDS)
    return {"run": context.run.run_id, "read": {name: value["run"] for name, value in read.items()}}


def _die_in_the_middle_of_the_next_event() -> None:
    """Dagster's SQLite log keeps an asset's event in two files: that of the run, and then that of all assets."""

    def die(_: SqliteEventLogStorage) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(SqliteEventLogStorage, "index_transaction", die)  # noqa: B010 - of another type than the method


def _has_gate(context: dg.AssetExecutionContext, name: str) -> bool:
    if context.run.parent_run_id is not None and context.run.tags.get(GATE_FOR) == "root":
        return False
    return fnmatchcase(name, context.run.tags.get(GATE_AT, ""))


def an_asset(
    name: str, partitions: Any, above: str | None = None, *, holes: bool = False, policy: Any = single
) -> dg.AssetsDefinition:
    """Return an asset that computes its partitions one by one.

    Args:
        name: Its name.
        partitions: Its partitions.
        above: The asset of which it reads the same partition.
        holes: Whether the first run of a group computes the middle third, and dies.
        policy: How a backfill splits it into runs.
    """

    @dg.asset(
        name=name, partitions_def=partitions, deps=[above] if above else [], code_version="1", backfill_policy=policy
    )
    def asset(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
        task = resilient.task(context)
        if holes and context.run.parent_run_id is None:
            _only_the_middle(context, name, task)
        for part in task.partitions():
            _compute_part(context, name, part, above)

    return asset


def _compute_part(context: dg.AssetExecutionContext, name: str, part: Part, above: str | None) -> None:
    read = {f"{above}/{part.key}": part.load(above, dict)} if above else {}
    part.save(compute(context, name, part.key, read))


def _only_the_middle(context: dg.AssetExecutionContext, name: str, task: Task) -> None:
    keys = task.partition_keys
    for key in keys[len(keys) // 3 : 2 * len(keys) // 3]:
        _compute_part(context, name, Part(key, task), None)
    os.kill(os.getpid(), signal.SIGKILL)


def a_total(name: str, above: str) -> dg.AssetsDefinition:
    """Return an asset that reads the few partitions of another; the IO manager stores it."""

    @dg.asset(name=name, deps=[above], code_version="1")
    def asset(context: dg.AssetExecutionContext, resilient: ResilientResource) -> Values:
        return compute(context, name, "-", {f"{above}/{key}": resilient.load(above, dict, key) for key in FEW})

    return asset


# Each story has assets of its own: the work of one must not count as done for another.
JOBS = {
    **{cell: [an_asset(f"held_{cell}", few)] for cell in CELLS},
    "line": [an_asset("line", long)],
    "chain": [an_asset("first", long), an_asset("second", long, "first"), an_asset("third", long, "second")],
    "holes": [an_asset("holed", long, holes=True)],
    "box": [an_asset("boxed", square)],
    "all": [
        an_asset("upper", square, holes=True),
        an_asset("middle", square, "upper"),
        an_asset("lower", square, "middle"),
    ],
}
JOBS[WITH_TOTAL].append(a_total(f"total_{WITH_TOTAL}", f"held_{WITH_TOTAL}"))
BACKFILLS = [an_asset("bulk", long), an_asset("each", costly, policy=None)]


class LateResource(ResilientResource):
    """Begins no step of the story `late` before the run worker is dead: as a step whose imports take long."""

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Wait, where that is wanted, and begin. There is one more of it in the IO manager."""
        run, worker = context.run, os.getppid()
        is_late = run is not None and run.tags.get(STORY) == "late" and run.parent_run_id is None
        if is_late and not (FOLDER / "late").exists():
            (FOLDER / "late").write_text(str(worker))
            deadline = time.monotonic() + LONGEST_WAIT
            while os.getppid() == worker and time.monotonic() < deadline:
                time.sleep(0.05)
        super().setup_for_execution(context)


own = LateResource(url=dg.EnvVar("RESILIENT_URL"), heartbeat_seconds=0.5, ttl_seconds=3)
defs = dg.Definitions(
    assets=[*(asset for assets in JOBS.values() for asset in assets), *BACKFILLS],
    executor=resilient_executor,
    jobs=[dg.define_asset_job(f"{job}_job", selection=[asset.key for asset in assets]) for job, assets in JOBS.items()],
    # As many attempts as there are kills, and some for runs that a code server could not launch since it was dead.
    sensors=[
        build_recovery_sensor(
            RecoveryPolicy(
                max_attempts=dict.fromkeys(("lost", "hung", "crashed", "infrastructure", "user_error"), 60),
                first_wait=1.0,
                longest_wait=2.0,
                start_allowance=45.0,
            ),
            minimum_interval_seconds=1,
        )
    ],
    resources={"resilient": own, "io_manager": ResilientIOManager(resilient=own)},
)
