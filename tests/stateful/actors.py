"""The processes of the model, each a script of real calls: training owners, lease-less writers, a sensor, trimmers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from oracle import Oracle
from scheduler import Actor, GivenUpError, World

from dagster_resilient.errors import FencedError
from dagster_resilient.state.fences import claim_attempt, fence_run
from dagster_resilient.state.garbage import Collector
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import Claim, Entry, Owner
from dagster_resilient.state.retire import retire
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Manifest, StoredObject, write_manifest

T = TypeVar("T")
KEEP_ALL = 100
ASSET = ("model",)
_CALLER_TRIES = 3


@dataclass(frozen=True)
class Role:
    """A kind of process.

    Attributes:
        run: Its run, and `root`, the lineage. The lineage is also the series: every try continues the one before.
        play: What it does.
        after: It starts only after this actor has claimed its try ("+name") or launched it ("name"). Where that one
            does not take part, it starts at any time.
    """

    run: str
    root: str
    play: Callable[[Cast, Actor], None]
    after: str | None = None


class Cast:
    """The actors of one example, with the oracle that watches them."""

    def __init__(self, roles: dict[str, Role], *, retires: bool = False, data: bool = False) -> None:
        self.world = World()
        self.roles = roles
        self.data, self.keep = data, 1 if data else KEEP_ALL
        roots, runs = {n: r.root for n, r in roles.items()}, {n: r.run for n, r in roles.items()}
        self.oracle = Oracle(self.world, roots, runs, retires=retires, keep=1 if data else None)
        self._launches: set[str] = set()
        for name in roles:
            self._add(name)

    def _add(self, name: str) -> None:
        def may_start() -> bool:
            after = self.roles[name].after
            if after is None or after.lstrip("+") not in self.roles:
                return True
            if after.startswith("+"):
                return self.world.actors[after[1:]].claimed is not None
            return name in self._launches

        Actor(self.world, name, lambda actor: self.roles[name].play(self, actor), may_start)

    def launch(self, by: str, fenced_run: str) -> None:
        """Let all start that wait for this sensor: the successors of a fenced run."""
        for name, role in self.roles.items():
            if role.after == by:
                self._launches.add(name)
                self.oracle.launched.setdefault(fenced_run, set()).add(role.run)

    # ---- the calls of a script, each reported to the oracle

    def task(self, actor: Actor) -> DurableTask:
        """Claim a try, as each process does first, and return its task."""
        role = self.roles[actor.name]
        claim = self._call(actor, lambda: _claim(actor, role))
        actor.claimed = self.world.time
        return _task(self.world, actor, claim)

    def acquire(self, actor: Actor, task: DurableTask) -> None:
        """Take the lease; everybody believes that the other owner is dead."""
        self.oracle.acquired(actor, self._call(actor, task.acquire))

    def save(self, actor: Actor, task: DurableTask, step: int) -> None:
        """Commit a checkpoint, again where the store does not answer."""
        stored = self._written(actor, task, step)

        def holds() -> bool:
            head = self.oracle.head
            return head is not None and stored in {c.manifest for c in head.checkpoints}

        self._call(actor, lambda: task.commit_checkpoint(step, stored, self.keep), holds)
        self.oracle.saved(actor, stored.key)

    def publish(self, actor: Actor, task: DurableTask, number: int) -> None:
        """Commit a value."""
        stored = self._written(actor, task, number)

        def holds() -> bool:
            head = self.oracle.head
            return head is not None and head.value is not None and head.value.manifest == stored

        entry = self._call(actor, lambda: task.commit_value(stored), holds)
        self.oracle.published(actor, stored.key, entry)

    def complete(self, actor: Actor, task: DurableTask) -> None:
        """Say that the training is done."""
        self._call(actor, task.complete, lambda: actor.name in self.oracle.done_by)
        self.oracle.completed(actor, task.claim.series)

    def release(self, actor: Actor, task: DurableTask) -> None:
        """Give the lease back."""
        self._call(actor, task.release)

    def read(self, actor: Actor) -> Entry | None:
        """Read the head, as a loader or a planner does."""
        at_least = self.oracle.head.n if self.oracle.head else 0
        entry = self._call(actor, _log(actor).head)
        self.oracle.saw(actor, entry, at_least)
        return entry

    def _call(self, actor: Actor, call: Callable[[], T], holds: Callable[[], bool] = lambda: False) -> T:
        for left in reversed(range(_CALLER_TRIES)):
            actor.begin_call()
            try:
                return call()
            except GivenUpError:
                if not left:
                    raise
            except FencedError:
                self.oracle.refused(actor, holds())
                raise
        raise AssertionError

    def fence(self, actor: Actor, run: str) -> None:
        """Fence a run, as a sensor does that found it lost."""
        records = ObjectRecords(actor.store)
        self._call(actor, lambda: fence_run(records, run, reason="lost.", failure_class="lost", by=actor.name))

    def _written(self, actor: Actor, task: DurableTask, number: int) -> StoredObject:
        """Return the name of a manifest; where objects are played too, write it first, as every writer does."""
        if not self.data:
            return StoredObject(key=f"{actor.name}.{number}", size=1, blake3="00")
        return write_manifest(actor.store, task.data_prefix(), Manifest(codec=f"{actor.name}.{number}", objects={}))

    def collect(self, actor: Actor) -> None:
        """Collect garbage with no grace at all: the proofs alone must protect what is alive."""

        def run() -> None:
            Collector(actor.store, grace=timedelta(0), dry_run=False, now=lambda: self.world.now, workers=1).run()

        self._call(actor, run)

    def retire(self, actor: Actor) -> None:
        """Give the task up, whoever holds it."""
        records = ObjectRecords(actor.store)
        self._call(actor, lambda: retire(records, ASSET, None, by=actor.name, force=True))

    def trim(self, actor: Actor) -> None:
        """Delete what no process can need any more."""
        log = _log(actor)
        head = self.read(actor)
        if head is not None:
            self._call(actor, lambda: log.trim(head))


def _log(actor: Actor) -> NumberedLog:
    return NumberedLog(ObjectRecords(actor.store), keys.task_prefix(ASSET, None, "log"))


def _claim(actor: Actor, role: Role) -> Claim:
    records = ObjectRecords(actor.store)
    return claim_attempt(records, root=role.root, run_id=role.run, series=role.root)


def _task(world: World, actor: Actor, claim: Claim) -> DurableTask:
    owner = Owner(
        process=f"{actor.name}-{claim.attempt}",
        run_id=claim.run_id,
        root=claim.root,
        attempt=claim.attempt,
        host="nowhere",
        boot="none",
        pid=1,
        started=1,
    )
    return DurableTask(
        actor.store, ASSET, None, claim, owner, now=lambda: world.now, sleep=_no_sleep, boottime=lambda: world.boot
    )


def _no_sleep(seconds: float) -> None:
    raise AssertionError(f"Nobody waits in this model, but somebody wants to sleep {seconds} s.")


# ---- scripts


def trainer(saves: int, *, end: str = "complete", publishes: bool = True) -> Callable[[Cast, Actor], None]:
    """A training step: acquires, saves, ends its lease, and hands over its value."""

    def play(cast: Cast, actor: Actor) -> None:
        task = cast.task(actor)
        cast.acquire(actor, task)
        resumed_from = max((c.step for c in task.checkpoints), default=0)
        for step in range(resumed_from + 1, resumed_from + saves + 1):
            cast.save(actor, task, step)
        if end == "complete":
            cast.complete(actor, task)
        elif end == "release":
            cast.release(actor, task)
        if publishes:
            cast.publish(actor, task, 0)

    return play


def publisher(values: int = 1) -> Callable[[Cast, Actor], None]:
    """A plain step: hands over one value, or the values of several materializations in a row."""

    def play(cast: Cast, actor: Actor) -> None:
        task = cast.task(actor)
        for number in range(values):
            cast.publish(actor, task, number)

    return play


def sensor(run: str) -> Callable[[Cast, Actor], None]:
    """Fences a run, then looks at what it left, then launches the successors."""

    def play(cast: Cast, actor: Actor) -> None:
        cast.fence(actor, run)
        cast.read(actor)
        cast.launch(actor.name, run)

    return play


def trimmer(times: int) -> Callable[[Cast, Actor], None]:
    """Trims the log; where nobody lets it proceed in the middle, it is a zombie that deletes much later."""

    def play(cast: Cast, actor: Actor) -> None:
        for _ in range(times):
            cast.trim(actor)

    return play


def reader(times: int) -> Callable[[Cast, Actor], None]:
    """Reads the head."""

    def play(cast: Cast, actor: Actor) -> None:
        for _ in range(times):
            cast.read(actor)

    return play


def collector(times: int) -> Callable[[Cast, Actor], None]:
    """Collects garbage; stopped in the middle, it is a zombie that deletes much later what it once judged."""

    def play(cast: Cast, actor: Actor) -> None:
        for _ in range(times):
            cast.collect(actor)

    return play


def retirer() -> Callable[[Cast, Actor], None]:
    """Retires the task."""

    def play(cast: Cast, actor: Actor) -> None:
        cast.retire(actor)

    return play
