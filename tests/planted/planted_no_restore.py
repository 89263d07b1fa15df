"""The example's code location with a planted fault: a training never restores a checkpoint."""

from dagster_resilient.checkpoint import session

session.newest_checkpoint = lambda _task: None

from example_project.definitions import defs  # noqa: E402, F401 - the fault comes first; Dagster reads the name
