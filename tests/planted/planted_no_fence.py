"""The example's code location with a planted fault: a commit asks neither for fences nor for newer tries."""

from dagster_resilient.state.task import DurableTask

DurableTask._admit = lambda _self, _head: None
DurableTask.check_fenced = lambda _self: None

from example_project.definitions import defs  # noqa: E402, F401 - the fault comes first; Dagster reads the name
