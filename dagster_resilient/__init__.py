"""Dagster runs that survive their machines: durable task state, checkpoints and partitions in object storage.

The public names. They load on first use: importing this package imports neither dagster nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_resilient.alerts import RunGaveUp as RunGaveUp
    from dagster_resilient.alerts import build_gave_up_sensor as build_gave_up_sensor
    from dagster_resilient.checkpoint import AnySavePolicy as AnySavePolicy
    from dagster_resilient.checkpoint import EverySeconds as EverySeconds
    from dagster_resilient.checkpoint import EverySteps as EverySteps
    from dagster_resilient.codecs import Codec as Codec
    from dagster_resilient.codecs import Encoded as Encoded
    from dagster_resilient.codecs import register_codec as register_codec
    from dagster_resilient.executor import resilient_executor as resilient_executor
    from dagster_resilient.io_managers import ResilientIOManager as ResilientIOManager
    from dagster_resilient.planning import plan_run as plan_run
    from dagster_resilient.recovery import RecoveryPolicy as RecoveryPolicy
    from dagster_resilient.resources import ResilientResource as ResilientResource
    from dagster_resilient.sensors import build_recovery_sensor as build_recovery_sensor
    from dagster_resilient.state.garbage import collect_garbage as collect_garbage
    from dagster_resilient.state.history import list_tasks as list_tasks
    from dagster_resilient.state.history import task_history as task_history
    from dagster_resilient.state.retire import retire_task as retire_task
    from dagster_resilient.storage.object_store import open_store as open_store
    from dagster_resilient.task import Part as Part
    from dagster_resilient.task import Task as Task
    from dagster_resilient.task import load as load
    from dagster_resilient.task import open_task as open_task

_HOMES = {
    "AnySavePolicy": "checkpoint",
    "Codec": "codecs",
    "Encoded": "codecs",
    "EverySeconds": "checkpoint",
    "EverySteps": "checkpoint",
    "Part": "task",
    "RecoveryPolicy": "recovery",
    "ResilientIOManager": "io_managers",
    "ResilientResource": "resources",
    "RunGaveUp": "alerts",
    "Task": "task",
    "build_gave_up_sensor": "alerts",
    "build_recovery_sensor": "sensors",
    "collect_garbage": "state.garbage",
    "list_tasks": "state.history",
    "load": "task",
    "open_store": "storage.object_store",
    "open_task": "task",
    "plan_run": "planning",
    "register_codec": "codecs",
    "resilient_executor": "executor",
    "retire_task": "state.retire",
    "task_history": "state.history",
}

__all__ = [  # noqa: PLE0604 - names only, computed from the table above
    *sorted(_HOMES)
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
