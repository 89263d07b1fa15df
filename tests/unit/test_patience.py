"""Who waits how long for a store that is down."""

import pytest

from dagster_resilient.storage.object_store import open_store
from dagster_resilient.storage.retry import DEFAULT_PATIENCE, OUTAGE_PATIENCE, RetryingStore, hasty
from dagster_resilient.task import Task, open_task


@pytest.fixture
def task() -> Task:
    """A task in this process's memory."""
    return open_task("memory://patience", "task", "a")


def patience(store: RetryingStore) -> float:
    """Seconds that one call may spend in retries."""
    return store._patience


def test_values_and_inputs_wait_out_an_outage_of_minutes(task):
    """A partition loop survives three minutes without the store: it waits, rather than failing hours of work."""
    assert patience(task.durable("a").store) == patience(task.store) == OUTAGE_PATIENCE > 180


def test_a_training_waits_less(task):
    """It can go on without the store and save later."""
    assert patience(task.trained("a").store) == DEFAULT_PATIENCE < OUTAGE_PATIENCE


def test_a_store_without_retries_stays_as_it_is():
    """Patience is the wrapper's; what has none is returned unchanged."""
    inner = open_store("memory://patience")._inner
    assert hasty(inner, 1.0) is inner
