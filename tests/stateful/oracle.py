"""What must hold after every store operation, judged from outside: from the objects, and from what actors were told.

The oracle knows what the code under test cannot know: who wrote which object, when each try began, and all that was
ever the head of the log. It uses none of the code's own rules.
"""

from __future__ import annotations

import re

from scheduler import Actor, Request, Violation, World

from dagster_resilient.state.records import Entry, ValueRef
from dagster_resilient.storage.manifest import StoredObject

_DATA = re.compile(r"tasks/[^/]+/data/.+")
_LOG = re.compile(r"tasks/.*/log/[^/]+/(\d{10})\.json")


class Oracle:
    """Follows the head of the one log in a world, and holds every acknowledgement against it.

    Attributes:
        head: The entry with the highest number, whoever may have seen it.
        launched: Runs that were launched after the fence of an earlier run, by that run.
        done_by: Actors whose "complete" is in the head.
    """

    def __init__(
        self, world: World, roots: dict[str, str], runs: dict[str, str], *, retires: bool, keep: int | None = None
    ) -> None:
        """Watch a world.

        Args:
            world: The world.
            roots: Lineages of the actors.
            runs: Runs of the actors.
            retires: Whether the log may vanish as a whole.
            keep: How many checkpoints a commit retains, where their objects are played too; None: all, and no objects.
        """
        self.head: Entry | None = None
        self.launched: dict[str, set[str]] = {}
        self.done_by: set[str] = set()
        self._world, self._roots, self._runs, self._retires = world, roots, runs, retires
        self._keep = keep
        self._given_up = False  # the head's owner was given up by a tombstone
        self._numbers: set[int] = set()
        self._writer: dict[str, str] = {}  # op -> name of the actor
        self._heads: set[str] = set()  # ops that were the head once
        self._entered: list[str] = []  # actors by their entries in the history
        self._succeeded: set[str] = set()  # fenced runs whose successor has an entry
        self._acked: dict[str, str] = {}  # checkpoint manifests that must stay, and whose they are
        self._excused: set[str] = set()  # checkpoint manifests that another series rightly dropped
        self._values: set[str] = set()  # value manifests that were visible once
        self._owners: dict[int, str] = {}  # generation -> op
        self._entries: dict[int, str] = {}  # number -> op, as acknowledged
        self._done: set[str] = set()  # series that were told "complete"
        world.effect = self.follow

    # ---- the log

    def follow(self, request: Request) -> None:
        """Look at what an operation did. Called after each effect, also of requests that arrive late."""
        if request.verb == "DELETE" and _DATA.fullmatch(request.key):
            self._check_there()
        match = _LOG.fullmatch(request.key)
        if match is None or request.verb in {"GET", "LIST"}:
            return
        if request.verb == "DELETE":
            self._numbers.discard(int(match[1]))
        else:
            self._numbers.add(int(match[1]))
            written = self._entry(int(match[1]), request.key)
            if self._world.objects[request.key][0] == request.body:
                self._writer[written.op] = request.actor.name
        self._look(request.key.rsplit("/", 1)[0])

    def _entry(self, n: int, key: str) -> Entry:
        entry: Entry = Entry.from_bytes(self._world.objects[key][0], key)
        assert entry.n == n
        return entry

    def _look(self, folder: str) -> None:
        before, newest = self.head, max(self._numbers, default=0)
        if newest == 0:
            self._retired()
            return
        now = self._entry(newest, f"{folder}/{newest:010d}.json")
        if before is not None and now.op == before.op:
            return
        self.head = now
        if before is not None:
            self._check_forward(before, now)
        self._check_writer(self._writer[now.op])
        self._check_kept(before, now)
        self._heads.add(now.op)
        self._check_there()

    def _check_there(self) -> None:
        """What the head refers to exists, now and for as long as it is the head."""
        if self._keep is None or self.head is None:
            return
        value = self.head.value
        named = [c.manifest.key for c in self.head.checkpoints] + ([_name(value)] if value else [])
        for key in named:
            if key not in self._world.objects:
                self._broken("dangling", f"the head {self.head.n} refers to {key}, which does not exist")

    def _retired(self) -> None:
        """All that the task held was given up on purpose, or by mistake. What comes after must still be kept."""
        if not self._retires:
            self._broken("vanished", "the log of the task is empty")
        self.head = None
        self._excused |= self._acked.keys()
        self._entries.clear()
        self._owners.clear()
        self._done.clear()

    def _check_forward(self, before: Entry, now: Entry) -> None:
        if now.n < before.n or now.generation < before.generation:
            was, is_ = f"{before.n}, generation {before.generation}", f"{now.n}, generation {now.generation}"
            self._broken("went back", f"the head was {was} and is {is_}")

    def _check_writer(self, name: str) -> None:
        """A lower try never follows a higher one; a fenced run never follows its successor."""
        run = self._runs[name]
        if run in self._succeeded:
            self._broken("fenced run", f"an entry of {name}, whose run {run} is fenced, follows its successor's entry")
        for other in self._entered:
            if self._roots[other] == self._roots[name] and self._is_older(name, other):
                self._broken("older try", f"an entry of {name} follows one of {other}, a newer try of the same lineage")
        self._entered.append(name)
        self._succeeded |= {fenced for fenced, successors in self.launched.items() if run in successors}

    def _is_older(self, name: str, other: str) -> bool:
        older, newer = self._world.actors[name], self._world.actors[other]
        return older.claimed is not None and newer.began is not None and older.claimed <= newer.began and name != other

    def _check_kept(self, before: Entry | None, now: Entry) -> None:
        """Only an owner that starts afresh drops checkpoints; only a newer value replaces a value."""
        kept = {c.manifest.key for c in now.checkpoints}
        gone = ({c.manifest.key for c in before.checkpoints} if before else set()) - kept
        if now.kind == "acquire" and before is not None and now.series != before.series:
            self._excused |= gone
            self.done_by.clear()
            self._done.discard(before.series or "")
        if self._given_up and now.kind in {"checkpoint", "complete", "release"}:
            self._broken("given up", f"{self._writer[now.op]} goes on behind a tombstone without a new lease")
        self._given_up = now.kind == "retire" or (self._given_up and now.kind != "acquire")
        if now.kind == "retire":
            self._excused |= gone
            self.done_by.clear()
            self._done.clear()
        if now.kind == "checkpoint" and self._keep is not None and len(now.checkpoints) == self._keep:
            self._excused |= gone
        for key in self._acked.keys() - kept - self._excused:
            self._broken("lost", f"checkpoint {key}, acknowledged to {self._acked[key]}, is not in the head {now.n}")
        if before is not None and before.value != now.value and now.kind not in {"value", "retire"}:
            self._broken("lost", f"the visible value {_name(before.value)} is gone from the head {now.n}, a {now.kind}")
        if now.series in self._done and not now.training_done:
            self._broken("lost", f"the completion of series {now.series} is gone from the head {now.n}")
        if now.kind == "complete":
            self.done_by.add(self._writer[now.op])
        if now.value is not None:
            self._values.add(_name(now.value))

    # ---- what actors were told

    def acquired(self, actor: Actor, entry: Entry) -> None:
        """An actor was told that it owns a generation."""
        if self._owners.setdefault(entry.generation, entry.op) != entry.op:
            other = self._writer[self._owners[entry.generation]]
            self._broken("two owners", f"{actor.name} and {other} were both told that they own {entry.generation}")
        self._wrote(actor, entry)

    def saved(self, actor: Actor, manifest: str) -> None:
        """An actor was told that its checkpoint is committed."""
        if manifest in self._excused:
            return
        if self.head is None or manifest not in {c.manifest.key for c in self.head.checkpoints}:
            self._broken("lost", f"checkpoint {manifest}, just acknowledged to {actor.name}, is not in the head")
        self._acked[manifest] = actor.name

    def published(self, actor: Actor, manifest: str, entry: Entry) -> None:
        """An actor was told that its value is committed."""
        if manifest not in self._values:
            self._broken("lost", f"value {manifest}, just acknowledged to {actor.name}, was never in the head")
        self._wrote(actor, entry)

    def completed(self, actor: Actor, series: str) -> None:
        """An actor was told that the training of its series is done."""
        if self.head is not None and self.head.series == series:
            if not self.head.training_done:
                self._broken("lost", f"{actor.name} was told that the training is done, the head does not say so")
            self._done.add(series)

    def _wrote(self, actor: Actor, entry: Entry) -> None:
        if self._entries.setdefault(entry.n, entry.op) != entry.op:
            other = self._writer.get(self._entries[entry.n])
            self._broken("one number twice", f"{actor.name} and {other} were both told that they wrote entry {entry.n}")

    def refused(self, actor: Actor, holds: bool) -> None:
        """An actor was told "fenced". `holds`: whether the head has what it wanted to commit."""
        if holds:
            self._broken("false fence", f"{actor.name} was told FencedError for what the head holds")

    def saw(self, actor: Actor, entry: Entry | None, at_least: int) -> None:
        """An actor read the head, which was entry `at_least` when it began to read."""
        if (entry.n if entry else 0) < at_least or (entry is not None and entry.op not in self._heads):
            self._broken("stale read", f"{actor.name} read {entry.n if entry else None}, the head was {at_least}")

    def _broken(self, rule: str, what: str) -> None:
        raise Violation(rule, "\n  ".join([what, *self._world.trace]))


def _name(value: ValueRef | None) -> str:
    if value is None:
        return "(none)"
    assert isinstance(value.manifest, StoredObject)
    return value.manifest.key
