"""Doubles for the training session: a store that fails on demand, a task in memory, and a small training."""

from __future__ import annotations

import random
import uuid

import numpy as np
import torch

from dagster_resilient.checkpoint import EverySteps, TrainingSession
from dagster_resilient.errors import FencedError
from dagster_resilient.state.notice import Notice
from dagster_resilient.state.records import CheckpointRef
from dagster_resilient.storage.object_store import ObjectStore, open_store

torch.set_num_threads(1)


class Killed(BaseException):
    """Ends a try as a kill would, as far as the session can see."""


class FaultyStore(ObjectStore):
    """A memory store; a call raises what `fails(verb, key)` returns, unless that is None."""

    def __init__(self):
        self.inner = open_store(f"memory://{uuid.uuid4().hex}")
        self.url = self.inner.url
        self.fails = lambda verb, key: None

    def _call(self, verb, key, *rest):
        error = self.fails(verb, key)
        if error is not None:
            raise error
        return getattr(self.inner, verb)(key, *rest)

    def get(self, key):
        """Get."""
        return self._call("get", key)

    def get_ranges(self, key, ranges):
        """Get ranges."""
        return self._call("get_ranges", key, ranges)

    def put(self, key, buffers):
        """Put."""
        return self._call("put", key, buffers)

    def create(self, key, buffers):
        """Create."""
        return self._call("create", key, buffers)

    def head(self, key):
        """Head."""
        return self._call("head", key)

    def list(self, prefix, start_after=None):
        """List."""
        return self._call("list", prefix, start_after)

    def delete(self, keys):
        """Delete, one by one."""
        for key in keys:
            self._call("delete", [key])

    def sidecar_config(self):
        """Nothing: no other process sees a memory store."""
        return {}


class FakeTask:
    """One try of a task whose log is a list, shared by all tries. `calls` and `reports` are what the session did."""

    def __init__(self, store, log):
        self.store, self.log = store, log
        self.calls, self.reports, self.saved, self.expected = [], [], [], []
        self.fence = None

    @property
    def checkpoints(self):
        """As the session reads them."""
        return tuple(self.log)

    def acquire(self):
        """Note the call."""
        self.calls.append("acquire")

    def data_prefix(self):
        """A fresh prefix."""
        return f"data/{uuid.uuid4().hex}"

    def commit_checkpoint(self, step, manifest, keep):
        """Commit as a log entry would."""
        if self.fence:
            raise FencedError(self.fence)
        self.calls.append("commit")
        self.saved.append(step)
        before = tuple(self.log)
        self.log[:] = [*(c for c in before if c.step != step), CheckpointRef(step=step, manifest=manifest)][-keep:]
        return tuple(c for c in before if c not in self.log)

    def complete(self):
        """Note the call."""
        self.calls.append("complete")

    def release(self):
        """Note the call."""
        self.calls.append("release")

    def check_fenced(self):
        """Raise what the heartbeat process would have read."""
        if self.fence:
            raise FencedError(self.fence)

    def report(self, **progress):
        """Note the report."""
        self.reports.append(progress)

    def expect_progress(self, hung_after):
        """Note the limit of the loop that begins."""
        self.expected.append(hung_after)

    def relax_progress(self):
        """Note that no loop runs."""
        self.expected.append("nothing")

    def notice(self):
        """Listen, as for a script."""
        return Notice()

    def preempted(self, signal):
        """Note the call."""
        self.calls.append(f"preempted by {signal}")


class World:
    """A store, a log and a clock that outlive the tries; `last` is the task of the newest try."""

    def __init__(self):
        self.store, self.log, self.now = FaultyStore(), [], 0.0

    def session(self, **options):
        """Return the session of a new try."""
        self.last = FakeTask(self.store, self.log)
        return TrainingSession(self.last, clock=lambda: self.now, sleep=self._sleep, **options)

    def _sleep(self, seconds):
        self.now += seconds

    def train(self, n, each=lambda session, step: None, **options):
        """Run a whole session over `steps(n)`, calling `each` in every step; return the session."""
        with self.session(**options) as session:
            for step in session.steps(n):
                each(session, step)
        return session

    def keys(self):
        """Return the keys of all objects."""
        return {info.key for info in self.store.inner.list("")}


def raising(error, at):
    """Return a step function that raises in one step."""

    def each(_session, step):
        if step == at:
            raise error

    return each


class Toy:
    """A training with dropout, AdamW, a cosine schedule and shuffled data; it notes losses and sample ids by step.

    An epoch has five batches.
    """

    def __init__(self, seed=0, workers=0, generator=False):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global generator is what is restored
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=30)
        inputs = torch.arange(160.0).reshape(40, 4) / 40
        data = torch.utils.data.TensorDataset(torch.arange(40), inputs)
        own = torch.Generator().manual_seed(7) if generator else None
        self.loader = torch.utils.data.DataLoader(data, 8, shuffle=True, num_workers=workers, generator=own)
        self.losses, self.ids = {}, {}

    def update(self, step, batch):
        """One step, in which all three global generators are drawn from."""
        ids, inputs = batch
        noise = random.random() + np.random.rand()  # noqa: NPY002 - as above
        loss = (self.model(inputs) - noise).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses[step], self.ids[step] = loss.item(), ids.tolist()

    def run(self, world, n, kill_at=None, every=100):
        """Train up to step n, or to a kill; return the session."""
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}
        with world.session(**objects, save=EverySteps(every)) as session:
            for step, batch in session.batches(n):
                if step == kill_at:
                    raise Killed
                self.update(step, batch)
        return session
