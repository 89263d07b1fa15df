"""Being told to leave: SIGTERM, heard between two steps instead of in the middle of one.

While somebody listens, a signal is remembered, and whoever listens ends at the next boundary of its work with
`PreemptedError`. Three others must not suffer from that:

- A handler that stood before is called at once. What it raises, as Dagster's does, is held back until the boundary,
  and raised there.
- A user who cancels a run sends the same signals as a machine that goes away. Only the host knows which it was, and
  asking may take a while, so a thread asks; where it was a user, the handler from before has its way at once.
- A forked child inherits the handler and has no boundary. It behaves as if nobody listened.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from dagster_resilient.errors import PreemptedError

log = logging.getLogger(__name__)

# One Ctrl-C under Dagster is two: the terminal's, and the run worker's, which passes it on. One more is impatience.
_PATIENT_INTERRUPTS = 2


class _Hook:
    """A signal's handler as it was installed once. When its time is over it only passes on.

    Whoever put a handler over it may keep and call it for ever: a hook that was used again could call itself.
    """

    def __init__(self, ear: _Ear, previous: Any) -> None:
        self._ear, self.previous = ear, previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._ear.hears(number, self):
            self._ear.hear(number, frame, self.previous)
        else:
            self.pass_on(number, frame)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what would have been done without us.

        Whoever put a handler over this hook and calls it does so while a newer hook listens too: then nothing.
        """
        if callable(self.previous):
            self.previous(number, frame)
        elif self.previous == signal.SIG_DFL and self._ear.hook(number) in {None, self}:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class _Ear:
    """What this process has been told while anybody listens. There is one: signals are the process's."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: list[Notice] = []
        self._hooks: dict[int, _Hook] = {}
        self._pid = 0
        self._said_why_not = False
        self._forget()

    def _forget(self) -> None:
        self._occasion = object()
        self.told: int | None = None
        self.held: BaseException | None = None
        self.answered = False
        self._let_through = False
        self._interrupts = 0

    # ---- listening

    def add(self, listener: Notice) -> None:
        with self._lock:
            if self._pid != os.getpid():  # the copy of a forked child
                self._listeners, self._hooks, self._pid = [], {}, os.getpid()
                self._forget()
            self._listeners.append(listener)
            self._install({signal.SIGTERM} | ({signal.SIGINT} if listener.alone and listener.cancelled else set()))

    def remove(self, listener: Notice) -> None:
        with self._lock:
            if listener not in self._listeners:
                return
            self._listeners.remove(listener)
            if self._listeners:
                return
            restored = self._restore()
            unanswered = self.told if restored and not self.answered else None
            self._forget()
        if unanswered is not None:
            signal.raise_signal(unanswered)

    def _install(self, numbers: set[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._say_why_not("only the main thread can handle signals")
            return
        for number in sorted(numbers - self._hooks.keys()):
            previous = signal.getsignal(number)
            if previous is None or previous == signal.SIG_IGN:
                self._say_why_not(f"{number.name} is ignored, or is handled outside of Python")
                continue
            self._hooks[number] = hook = _Hook(self, previous)
            signal.signal(number, hook)

    def _restore(self) -> bool:
        """Give the signals back; False where somebody else has put a handler over ours, which then only passes on."""
        hooks, self._hooks = self._hooks, {}
        if threading.current_thread() is not threading.main_thread():
            return False
        ours = [number for number, hook in hooks.items() if signal.getsignal(number) is hook]
        for number in ours:
            signal.signal(number, hooks[number].previous)
        return len(ours) == len(hooks) > 0

    def _say_why_not(self, why: str) -> None:
        if not self._said_why_not:
            self._said_why_not = True
            log.debug("Being told to leave is not noticed here: %s.", why)

    # ---- hearing, within a signal's handler: no logging and no lock, which the interrupted code may hold

    def hook(self, number: int) -> _Hook | None:
        return self._hooks.get(number)

    def hears(self, number: int, hook: _Hook) -> bool:
        return os.getpid() == self._pid and self._hooks.get(number) is hook and not self._let_through

    def hear(self, number: int, frame: FrameType | None, previous: Any) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > _PATIENT_INTERRUPTS:
            self._let_through = self.answered = True
            self._hooks[number].pass_on(number, frame)
            return
        if self.told is None:
            self.told = number
            if callable(previous):
                try:
                    previous(number, frame)
                except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised later, or is the cause
                    self.held = error
        if any(listener.cancelled for listener in self._listeners):
            # Not threading.Thread: its start waits for locks that the interrupted code may hold.
            _thread.start_new_thread(self._ask, (number, self._occasion))

    def _ask(self, number: int, occasion: object) -> None:
        """Ask the hosts whether a user wants the end. If so, let the signal through: nothing is waited for."""
        for listener in list(self._listeners):
            if listener.cancelled is None:
                continue
            try:
                cancelled = listener.cancelled()
            except Exception as error:  # noqa: BLE001 - any host, any error: then it ends at the boundary
                log.warning("Whether a user cancelled the run could not be told: %s", error)
                continue
            if cancelled:
                self._let_it_through(number, occasion)
                return

    def _let_it_through(self, number: int, occasion: object) -> None:
        """Send the signal again, once, and only while the same work listens: a late answer must meet nobody else."""
        main = threading.main_thread().ident
        with self._lock:
            if self._occasion is occasion and not self._let_through and main is not None:
                self._let_through = self.answered = True
                signal.pthread_kill(main, number)


_ear = _Ear()


class Notice:
    """One listener: a training session, or a loop over partitions.

    Args:
        cancelled: Tells whether a user wants the end of what this process does. None: there is nobody to ask.
        alone: Whether the process was started for this work, by one that awaits its end. Then `PreemptedError` ends it,
            whatever the handler from before raised. If there is somebody to ask, SIGINT is heard too: by it Dagster
            passes on both that its run worker was told to leave and a user's cancel. Where a person sits before the
            process, SIGINT stays what it is.
    """

    def __init__(self, cancelled: Callable[[], bool] | None = None, *, alone: bool = False) -> None:
        self.cancelled, self.alone = cancelled, alone

    def begin(self) -> None:
        """Listen from now on."""
        _ear.add(self)

    @property
    def told(self) -> str | None:
        """Name of the signal by which this process was told to leave, None where it was not. Costs nothing."""
        number = _ear.told
        return None if number is None else signal.Signals(number).name

    def leave(self, message: str, cause: BaseException | None = None) -> NoReturn:
        """End, as was told.

        Args:
            message: What was saved, and what happens next.
            cause: An error that came in between.

        Raises:
            PreemptedError: Always, unless the handler from before raised something, as SystemExit, by which the process
                is to end: then that, caused by this.
        """
        _ear.answered = True
        if _ear.held is not None and not self.alone:
            raise _ear.held from PreemptedError(message)
        raise PreemptedError(message) from cause

    def end(self, *, answered: bool = False) -> None:
        """Listen no more. A second call does nothing.

        The last listener gives the signals back. Where none has left for what it was told, the signal is sent again: it
        was only put off.

        Args:
            answered: Whether the end is answer enough.
        """
        _ear.answered = _ear.answered or answered
        _ear.remove(self)


@contextmanager
def listening(notice: Notice) -> Iterator[Notice]:
    """Listen within a block."""
    notice.begin()
    try:
        yield notice
    finally:
        notice.end()
