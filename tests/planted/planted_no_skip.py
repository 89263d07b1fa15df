"""The example's code location with a planted fault: finished partitions are computed again.

Both places that know of them are blind here, the plan and the step: each alone covers for the other.
"""

from dagster_resilient.facts import RunFacts
from dagster_resilient.state.task import DurableTask

DurableTask.committed_value = lambda _self, _head: None
RunFacts._done = lambda _self, _key, _partitions: set()

from example_project.definitions import defs  # noqa: E402, F401 - the fault comes first; Dagster reads the name
