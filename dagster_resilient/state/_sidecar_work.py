"""What the sidecar does with the store: beat, and look for what must end its parent.

Each has a thread of its own, and each beat one more, so that a call that hangs delays no beat. Whatever a store raises
is told once and tried again; nothing here ends a process (see `_sidecar`, which does).
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dagster_resilient.state._sidecar_store import (
    Patience,
    Schedule,
    chance,
    open_store,
    refused,
    secrets_of,
    without,
)

if TYPE_CHECKING:
    from dagster_resilient.state._processes import Watched
    from dagster_resilient.state._sidecar_store import Store

    Act = Callable[["Store", float], None]

# Beats that may hang at the same time. With usual limits and intervals fewer do; a hung mount could hold any number.
AT_ONCE = 8
LAST_WORDS = 10.0  # seconds, at least, to bring out the last beat of a parent that died
LONGEST_LAST_WORDS = 60.0
_BEATING = "writing the heartbeat"
_ENTRY = re.compile(r"(\d{10})\.json")


class Shared:
    """The store, opened at the first call that needs it. Where it cannot be opened, the next call tries again."""

    def __init__(self, config: dict[str, Any] | None) -> None:
        self._config = config
        self._opened: tuple[dict[str, Any] | None, Store] | None = None
        self._secrets = secrets_of(config)
        self._lock = threading.Lock()

    def __call__(self) -> Store:
        """Return the store."""
        with self._lock:
            config = self._config
            if self._opened is None or self._opened[0] is not config:
                self._opened = config, open_store(config)
            return self._opened[1]

    def replace(self, config: dict[str, Any]) -> None:
        """Have later calls go to a store that is opened like this. Takes no lock: the watch must not wait here."""
        self._secrets = self._secrets | secrets_of(config)
        self._config = config

    def shown(self, text: str) -> str:
        """Return a text without any secret that was ever in use here."""
        return without(self._secrets, text)


class Caller:
    """Makes calls with a time limit that follows the store, and turns every failure into one line for the parent."""

    def __init__(
        self,
        opened: Callable[[], Store],
        patience: Patience,
        tell: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
        shown: Callable[[str], str] = str,
    ) -> None:
        self.clock = clock
        self._shown = shown
        self.patience = patience
        self._opened = opened
        self._tell = tell
        self._failing: set[str] = set()

    def attempt(self, what: str, act: Act) -> bool:
        """Act, and return whether that went well. No failure is raised.

        Of failures in a row the first is told; and each refusal, since the parent may get newer credentials later.
        """
        limit, begun = self.patience.seconds, self.clock()
        try:
            act(self._opened(), limit)
        except Exception as error:  # noqa: BLE001 - G7: whatever a store raises, a heartbeat only tries again
            self.patience.learn(limit, self.clock() - begun, ok=False)
            is_refusal = refused(error)
            if is_refusal or what not in self._failing:
                self._failing.add(what)
                reason = self._shown(f"{type(error).__name__}: {str(error).strip()}").split("\n", 1)[0][:300]
                self._tell({"trouble": reason, "doing": what, "refused": is_refusal})
            return False
        self.patience.learn(limit, self.clock() - begun, ok=True)
        self._failing.discard(what)
        return True

    def failing(self, what: str) -> bool:
        """Return whether the last of these calls failed."""
        return what in self._failing


class Beater(threading.Thread):
    """Writes the beats. A beat that hangs is waited for by nobody: the next one goes out beside it.

    A beat that was held up may thus land after a younger one. It shows older progress until the next; its time of
    last modification, which is what counts, is right.
    """

    def __init__(self, config: dict[str, Any], parent: Watched, caller: Caller) -> None:
        super().__init__(daemon=True)
        self.progress: dict[str, Any] = {}
        self.step_key: str | None = config["beat"].get("step_key")
        self.tried = threading.Event()
        self.finished = threading.Event()
        self.last_words = min(max(LAST_WORDS, config["beat"]["ttl"]), LONGEST_LAST_WORDS)
        self._config = config
        self._parent = parent
        self._caller = caller
        self._sequence = 0
        self._calls: list[threading.Thread] = []
        self._last: str | None = None
        self._awake = threading.Event()

    @property
    def failing(self) -> bool:
        """Whether the store took no heartbeat lately."""
        return self._caller.failing(_BEATING)

    def update(self, message: dict[str, Any]) -> None:
        """Merge a line of progress; a new step starts with none. The dict is replaced, since the thread may read it."""
        step_key = message.get("step_key", self.step_key)
        base = self.progress if step_key == self.step_key else {}
        self.progress, self.step_key = {**base, **message.get("progress", {})}, step_key

    def finish(self, last: str) -> None:
        """Ask for the last act: ``delete`` the heartbeat, or write that the parent has ``exited``."""
        self._last = last
        self._awake.set()

    def again(self) -> None:
        """Ask for a beat between two others: the store is opened otherwise now."""
        self._awake.set()

    def run(self) -> None:
        """Beat every interval until the end, then act for the last time."""
        schedule = Schedule(self._config["beat"]["interval"], self._caller.clock(), chance())
        while self._last is None:
            if not self._parent.stopped():
                self.beat()
            self._wait(schedule.advance(self._caller.clock()))
        self._leave(self._caller.clock() + self.last_words)
        self.finished.set()

    def _wait(self, seconds: float) -> None:
        """Wait for the next beat or the end. What `again` asks for goes out meanwhile, and moves no other beat."""
        due = self._caller.clock() + seconds
        while self._last is None and self._awake.wait(max(0.0, due - self._caller.clock())):
            self._awake.clear()
            if self._last is None and not self._parent.stopped():
                self.beat()

    def beat(self) -> None:
        """Send a beat on its way, unless too many hang already."""
        self._calls = [call for call in self._calls if call.is_alive()]
        if len(self._calls) >= AT_ONCE:
            return
        body = self._body("running")
        call = threading.Thread(target=self._put, args=(body,), daemon=True)
        try:
            call.start()
        except RuntimeError:  # the limit of processes is reached: a beat that may hang is better than none
            self._put(body)
        else:
            self._calls.append(call)

    def _body(self, state: str) -> bytes:
        self._sequence += 1
        beat = {**self._config["beat"], "seq": self._sequence, "progress": self.progress, "state": state}
        if self.step_key is not None:
            beat["step_key"] = self.step_key
        return json.dumps(beat).encode()

    def _put(self, body: bytes) -> None:
        self._caller.attempt(_BEATING, lambda store, limit: store.put(self._config["key"], body, limit))
        self.tried.set()

    def _leave(self, deadline: float) -> None:
        """Act for the last time; and once more behind beats that were under way and may have landed after it."""
        under_way = [call for call in self._calls if call.is_alive()]
        self._insist(deadline)
        for call in under_way:
            call.join(max(0.0, deadline - self._caller.clock()))
        if under_way:
            self._insist(deadline)

    def _insist(self, deadline: float) -> None:
        pause = min(self._config["beat"]["interval"], 1.0)
        while not self._caller.attempt("ending the heartbeat", self._last_act) and self._caller.clock() < deadline:
            time.sleep(pause * (1 + chance()) / 2)

    def _last_act(self, store: Store, limit: float) -> None:
        if self._last == "delete":
            store.delete(self._config["key"], limit)
        else:
            store.put(self._config["key"], self._body("exited"), limit)


def _process(owner: dict[str, Any] | None) -> tuple[Any, ...]:
    """Return host, process id and start time of the owner that an entry names."""
    return () if owner is None else (owner.get("host"), owner.get("pid"), owner.get("started"))


class Watch:
    """The log of a task whose lease the parent holds.

    Attributes:
        generation: The parent's.
        found: The newest generation that was read, once that is newer than the parent's.
        due: When to look next.
    """

    def __init__(self, message: dict[str, Any], due: float, parent: Sequence[int], host: str | None) -> None:
        self._parent = (host, *parent)
        self.prefix: str = message["prefix"]
        self.generation: int = message["generation"]
        self.task: str = message["task"]
        self.due = due
        self.found: int | None = None
        self._seen = 0

    def look(self, store: Store, limit: float) -> None:
        """List what is new. Only numbers can be told from names: the entry is read, where it is another one.

        An entry that is listed and gone was trimmed meanwhile, so there is a newer one: the next look finds it.
        """
        after = f"{self._seen:010d}.json" if self._seen else None
        matches = (_ENTRY.fullmatch(name) for name in store.names(self.prefix, after, limit))
        newest = max((int(match[1]) for match in matches if match), default=0)
        if newest <= self._seen:
            return
        try:
            raw = store.get(f"{self.prefix}{newest:010d}.json", limit)
        except FileNotFoundError:
            return
        self._seen = newest
        entry = json.loads(raw)
        generation = int(entry["generation"])
        if generation > self.generation and _process(entry.get("owner")) != self._parent:
            # A new lease of the parent itself, in a notebook after an error, takes nothing over.
            self.found = generation

    def reason(self) -> str:
        """Return what the parent is told."""
        return (
            f"a newer attempt took over {self.task} (generation {self.found}, ours was {self.generation}); "
            "what this one computes is not committed"
        )


class Lookout(threading.Thread):
    """Looks for the fence of the run, and for newer generations in the logs that it is told to watch.

    Each is looked at once per interval at most, the fence first. A store that cannot be asked says nothing.
    """

    def __init__(self, config: dict[str, Any], caller: Caller, after: threading.Event) -> None:
        super().__init__(daemon=True)
        self.fence: str | None = None
        self.awake, self._alarm = os.pipe()
        self._config = config
        self._interval: float = config["beat"]["interval"]
        self._caller = caller
        self._after = after
        self._fence_due = caller.clock()
        self._watches: dict[str, Watch] = {}
        self._taken: list[Watch] = []
        for message in config["watches"]:
            self.watch(message)

    def watch(self, message: dict[str, Any]) -> None:
        """Watch a log from the next interval on: a lease that is held for less costs no request."""
        self._watches[message["prefix"]] = Watch(
            message, self._next(), self._config["parent"] or (), self._config["beat"].get("host")
        )

    def unwatch(self, prefix: str) -> None:
        """Watch a log no more."""
        self._watches.pop(prefix, None)

    def taken(self) -> list[Watch]:
        """Return the watches whose task was found taken over since the last call."""
        taken = []
        while self._taken:  # append and pop alone: another thread appends
            taken.append(self._taken.pop())
        return taken

    def holds(self, watch: Watch) -> bool:
        """Return whether the parent still wants this watch."""
        return self._watches.get(watch.prefix) is watch

    def run(self) -> None:
        """Look until a fence is found. The first beat goes first: it has a deadline, and this has none."""
        self._after.wait(self._interval)
        while self.fence is None:
            time.sleep(self.turn())

    def turn(self) -> float:
        """Look at one thing, if one is due; return the seconds until the next one is."""
        if self._caller.clock() >= self._fence_due:
            self._caller.attempt("looking for a fence", self._look_for_fence)
            self._fence_due = self._next()
        elif (watch := self._most_due()) is not None:
            self._look_at(watch)
        dues = [watch.due for watch in list(self._watches.values())]
        return max(0.0, min([self._fence_due, *dues]) - self._caller.clock())

    def _most_due(self) -> Watch | None:
        watch = min(list(self._watches.values()), key=lambda watch: watch.due, default=None)
        return watch if watch is not None and watch.due <= self._caller.clock() else None

    def _next(self) -> float:
        return self._caller.clock() + self._interval * (1 + chance() / 10)

    def _look_for_fence(self, store: Store, limit: float) -> None:
        """A fence that exists counts, whatever is in it."""
        try:
            raw = store.get(self._config["fence_key"], limit)
        except FileNotFoundError:
            return
        self.fence = fence_reason(raw)
        os.write(self._alarm, b"!")

    def _look_at(self, watch: Watch) -> None:
        known = watch.found
        self._caller.attempt(f"looking at the log of {watch.task}", watch.look)
        watch.due = self._next()
        if watch.found != known:
            self._taken.append(watch)
            os.write(self._alarm, b"!")


def fence_reason(raw: bytes) -> str:
    """Return why a run was fenced; only for people."""
    try:
        return str(json.loads(raw)["reason"])
    except (ValueError, TypeError, KeyError):
        return "the fence gives no reason"
