"""A training over the real task log, with one fault at each operation of its store in turn."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

import numpy as np
import pytest

from dagster_resilient.checkpoint import EverySteps, TrainingSession
from dagster_resilient.errors import StoreUnavailableError
from dagster_resilient.state.fences import claim_attempt
from dagster_resilient.state.owner import this_process
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.manifest import read_manifest
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.testing import FakeClock, Fault, FaultStore

STEPS = 6
# A whole run makes 32 operations; what comes later finds nothing to disturb, and ends well too.
OPERATIONS = 40


class Sum:
    """A model of one number, to which every step adds its own."""

    def __init__(self):
        self.total = np.zeros(1)

    def state_dict(self):
        """Return the state."""
        return {"total": self.total}

    def load_state_dict(self, state):
        """Take a state."""
        self.total = state["total"]


def attempt(store):
    """Return the task as a new try sees it."""
    claim = claim_attempt(ObjectRecords(store), root="root", run_id=uuid.uuid4().hex, series="root")
    owner = this_process(claim, heartbeat=None, interval=10.0, ttl=45.0)
    return DurableTask(store, ("sum",), None, claim, owner, now=lambda: datetime.now(UTC))


def train(task):
    """Train in a clock of its own; return the model."""
    model, clock = Sum(), FakeClock()
    with TrainingSession(task, model, save=EverySteps(2), keep=1, clock=clock, sleep=clock.sleep) as session:
        for step in session.steps(STEPS):
            model.total += step
            clock.advance(2)
    return model


def run(inner, fault, operation):
    """Train under one fault; begin again without it where the first try did not get through."""
    clean = attempt(inner)
    task = DurableTask(FaultStore(inner, {operation: fault}), ("sum",), None, clean.claim, clean.owner, now=clean.now)
    try:
        return train(task)
    except StoreUnavailableError:
        return train(attempt(inner))


@pytest.mark.parametrize("kind", ["fail", "torn", "lose_reply"])
def test_one_fault_at_any_operation_costs_no_step(kind):
    """The sum is exact, the training is done, the last checkpoint is whole, and holds the last step."""
    for operation in range(OPERATIONS):
        inner = open_store(f"memory://{uuid.uuid4().hex}")
        assert run(inner, Fault(kind), operation).total.item() == 15, operation
        head = attempt(inner).head()
        assert (head.training_done, head.owner, [ref.step for ref in head.checkpoints]) == (True, None, [STEPS]), (
            operation
        )
        objects = read_manifest(inner, head.checkpoints[0].manifest).objects.values()
        assert all(inner.head(part.key).size == part.size for part in objects)
        assert train(attempt(inner)).total.item() == 15
