"""Importing the package is cheap, and its public names are a promise."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import dagster_resilient

HEAVY = ("dagster", "torch", "pandas", "pyarrow", "numpy", "sqlalchemy")
CORE = ("errors", "storage", "storage.object_store", "storage.manifest", "state", "state.task", "checkpoint", "testing")


@pytest.mark.parametrize("module", ["dagster_resilient", *(f"dagster_resilient.{name}" for name in CORE)])
def test_the_core_imports_no_host_and_no_framework(module: str) -> None:
    """A plain script, or a sidecar, pays for none of them; a lost import fails here, not in production."""
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_a_directory_store_needs_no_obstore() -> None:
    """Only S3 loads it: its threads are what a fork loses."""
    code = (
        "import sys, tempfile; from dagster_resilient import open_store;"
        "open_store(tempfile.mkdtemp()).put('a', b'1'); open_store('memory://x').put('a', b'1');"
        "print('obstore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_the_public_names() -> None:
    """This list changes by intent only, with an entry in the changelog."""
    assert sorted(dagster_resilient.__all__) == [
        "AnySavePolicy",
        "Codec",
        "Encoded",
        "EverySeconds",
        "EverySteps",
        "Part",
        "RecoveryPolicy",
        "ResilientIOManager",
        "ResilientResource",
        "RunGaveUp",
        "Task",
        "build_gave_up_sensor",
        "build_recovery_sensor",
        "collect_garbage",
        "list_tasks",
        "load",
        "open_store",
        "open_task",
        "plan_run",
        "register_codec",
        "resilient_executor",
        "retire_task",
        "task_history",
    ]


@pytest.mark.parametrize("name", sorted(dagster_resilient.__all__))
def test_every_public_name_loads(name: str) -> None:
    """Each name is found where the table says, documented, and offered by `dir`."""
    assert getattr(dagster_resilient, name).__doc__
    assert name in dir(dagster_resilient)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As for any module, with the name in the message."""
    with pytest.raises(AttributeError, match="'nonsense'"):
        importlib.import_module("dagster_resilient").nonsense  # noqa: B018
