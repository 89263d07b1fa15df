"""The training session: restore, count steps, save, finish."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

from dagster_resilient.checkpoint.data import DataPosition
from dagster_resilient.checkpoint.policies import EverySteps, SavePolicy
from dagster_resilient.checkpoint.restore import Restored, newest_checkpoint
from dagster_resilient.checkpoint.rng import capture_rng, restore_rng
from dagster_resilient.checkpoint.save import Saver, encode_checkpoint
from dagster_resilient.checkpoint.state import Stateful, capture_objects, restore_objects
from dagster_resilient.checkpoint.task import TrainingTask
from dagster_resilient.errors import ConfigurationError, ResilientError, StorageError
from dagster_resilient.state.hangs import check_hung_after

log = logging.getLogger(__name__)

DEFAULT_SAVE = EverySteps(100)


class TrainingSession:
    """A training that goes on where the last durable checkpoint stands.

    ::

        with task.training(model=model, optimizer=optimizer, loader=loader) as session:
            for step, batch in session.batches(2_000):
                session.report(loss=update(model, optimizer, batch))

    Entering takes the task's lease and restores the newest valid checkpoint. Step n counts as done when the loop asks
    for step n+1; only then may it be saved. Leaving the block normally, also by `break`, counts the step in progress as
    done, saves the final state and completes the training. An exception saves nothing and gives the lease back.

    SIGTERM is heard between two steps: what is done is saved, whatever the policy says, and `PreemptedError` ends the
    block; so does leaving it before the goal of the loop. A handler that was installed before is called first. Only the
    main thread can listen.

    Saved and restored: the states of the objects given, Python's, numpy's, torch's and CUDA's global random states, the
    position in the loader, the step, and `user`.

    Attributes:
        step: Steps done.
        resumed_from: Step of the checkpoint that was restored, None where training began at the beginning.
        user: Your own state: a dict of plain Python values, arrays and tensors.
    """

    def __init__(
        self,
        task: TrainingTask,
        model: Stateful | None = None,
        optimizer: Stateful | None = None,
        *,
        scheduler: Stateful | None = None,
        loader: Any = None,
        state: Mapping[str, Stateful] | None = None,
        save: SavePolicy = DEFAULT_SAVE,
        keep: int = 3,
        max_unsaved_seconds: float = 900.0,
        hung_after: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Describe the session. Nothing is read, written or locked before it is entered.

        Args:
            task: The task that is trained.
            model: A module, or whatever has `state_dict` and `load_state_dict`.
            optimizer: The same.
            scheduler: The same.
            loader: What `batches` goes through, once per epoch; see `data`.
            state: More objects with `state_dict` and `load_state_dict`, by name: a scaler, an average of weights.
            save: When to save.
            keep: How many checkpoints to retain.
            max_unsaved_seconds: How long training goes on while the store cannot take checkpoints.
            hung_after: Seconds without progress within a loop after which the training counts as hung, and recovery
                ends it. None: ten times the longest of the last steps, and at least 3,600.
            clock: A clock that never jumps.
            sleep: How to wait for the store at the end.
        """
        self._objects = _objects(model, optimizer, scheduler, state)
        _check_options(save, keep, max_unsaved_seconds)
        check_hung_after(hung_after)
        self._hung_after = hung_after
        self._task = task
        self._notice = task.notice()
        self._policy = save
        self._data = None if loader is None else DataPosition(loader)
        self._saver = Saver(task, keep=keep, max_unsaved_seconds=max_unsaved_seconds, clock=clock, sleep=sleep)
        self.step = 0
        self.resumed_from: int | None = None
        self.user: dict[str, Any] = {}
        self._state = "new"
        self._goal: int | None = None
        self._stopped_short_of: int | None = None
        self._in_progress = False
        self._save_requested = False
        self._rng_to_restore: dict[str, Any] | None = None

    # ---- entering and leaving

    def __enter__(self) -> Self:
        if self._state != "new":
            raise ConfigurationError("A training session can be entered once; make a new one.")
        self._task.acquire()
        self._state = "entered"
        try:
            self._resume()
            # What cannot be stored is refused now, before hours of compute depend on it.
            encode_checkpoint(self._tree())
            self._notice.begin()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(error)
        except BaseException:
            self._leave()
            raise
        finally:
            self._notice.end(answered=True)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._finish()
            self._close()
            return
        told = self._notice.told
        if told is not None and isinstance(error, Exception) and not isinstance(error, ResilientError):
            # What else breaks when a machine goes away, such as a loader whose workers were told too.
            self._end_as_told(told, error)
        self._leave()

    def _resume(self) -> None:
        found = newest_checkpoint(self._task)
        if found is not None:
            self._restore(found)
            log.info("Training resumes after step %d from %s.", self.step, found.ref.manifest.key)
        self._saver.begin(found.ref if found else None)
        self._task.report(step=self.step, resumed_from=self.step)

    def _restore(self, found: Restored) -> None:
        where = f"The checkpoint of step {found.ref.step}"
        session = found.tree["session"]
        if (session["data"] is None) != (self._data is None):
            held, given = ("no", "a") if session["data"] is None else ("a", "no")
            raise ConfigurationError(f"{where} holds {held} position in a loader, but this session has {given} loader.")
        saved = {name: saved for name, saved in found.tree.items() if name != "session"}
        restore_objects(self._objects, saved, where)
        if self._data is not None:
            self._data.restore(session["data"])
        self.step = self.resumed_from = found.ref.step
        self.user, self._stopped_short_of = session["user"], session["stopped_short_of"]
        self._rng_to_restore = session["rng"]
        restore_rng(session["rng"])

    def _finish(self) -> None:
        if self._in_progress:
            self._count_step()
        if self._goal is None or self.step < self._goal:
            # A loop that was left since the process must go, by a handler of the script's own, was not left for good.
            self._leave_if_told()
        if self._goal is not None and self.step < self._goal:
            self._stopped_short_of = self._goal
        self._saver.save_last(self.step, self._tree())
        self._saver.persist(self._task.complete)
        if self._notice.told is not None:
            self._end_as_told(self._notice.told)

    def _leave(self) -> None:
        """Give the lease back. A failure to do so must not hide why we leave; the lease then ends by its time."""
        self._close()
        try:
            self._task.release()
        except ResilientError as error:
            log.warning("The lease could not be given back: %s", error)

    def _close(self) -> None:
        self._state = "left"
        self._task.relax_progress()  # again, where a loop that was left by `break` is still referred to
        if self._data is not None:
            self._data.close()

    # ---- the loop

    def steps(self, n: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left: from `step` up to, not including, n.

        Raises:
            FencedError: A newer attempt has taken over.
            StoreUnavailableError: Nothing could be saved for `max_unsaved_seconds`.
            PreemptedError: The process was told to leave. What is done is saved.
        """
        self._check_goal(n)
        return (step for step, _ in self._loop(n, None))

    def batches(self, n: int) -> Iterator[tuple[int, Any]]:
        """Yield the number of each step that is left and the batch for it, epoch after epoch; see `steps`."""
        self._check_goal(n)
        if self._data is None:
            raise ConfigurationError("batches(n) needs a loader; give the session one, or use steps(n).")
        return self._loop(n, self._data)

    def _check_goal(self, n: int) -> None:
        if self._state != "entered":
            raise ConfigurationError("The training session is not open; loop inside its with block.")
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ConfigurationError(f"The number of steps is {n!r}; give a whole number.")

    def _loop(self, n: int, data: DataPosition | None) -> Iterator[tuple[int, Any]]:
        self._task.expect_progress(self._hung_after)
        try:
            self._begin_loop(n, data)
            while self.step < n and not self._is_finished(n):
                self._leave_if_told()
                batch = data.next() if data is not None else None
                self._in_progress = True
                yield self.step, batch
                self._count_step()
                self._task.check_fenced()
                self._save_if_due()
        finally:
            self._task.relax_progress()

    def _begin_loop(self, n: int, data: DataPosition | None) -> None:
        if self._in_progress:
            self._count_step()
        self._goal = n
        if self.step >= n or self._is_finished(n):
            return
        if data is not None:
            data.resume()
        if self._rng_to_restore is not None:
            # Again, for whatever drew numbers between the entering and the loop: it has drawn them before the save too.
            restore_rng(self._rng_to_restore)
            self._rng_to_restore = None

    def _is_finished(self, n: int) -> bool:
        """Whether an earlier session was left by `break` on the way to n, or to more: it wanted no further step."""
        return self._stopped_short_of is not None and n <= self._stopped_short_of

    def _count_step(self) -> None:
        self._in_progress = False
        self.step += 1
        self._task.report(step=self.step, steps_total=self._goal)

    def report(self, **metrics: Any) -> None:
        """Show metrics of the step in progress with the next heartbeat. Never raises, never waits for the store."""
        shown = {name: _plain(value) for name, value in metrics.items()}
        self._task.report(**(shown | {"step": self.step, "steps_total": self._goal}))

    # ---- saving

    def save(self) -> None:
        """Save now, or, within a step, as soon as the step is done: half a step cannot be resumed exactly.

        Raises:
            StorageError: Outside a step: the store refuses or does not answer.
            PreemptedError: Outside a step: the process was told to leave. It is saved.
        """
        if self._state != "entered":
            raise ConfigurationError("The training session is not open; save inside its with block.")
        if self._in_progress:
            self._save_requested = True
        else:
            self._saver.save(self.step, self._tree())
            self._leave_if_told()

    def _save_if_due(self) -> None:
        due = self._save_requested or self._policy.due(self.step, self._saver.seconds_since_save)
        if self._saver.overdue or (due and not self._saver.put_off):
            self._save_requested = False
            self._saver.save_in_loop(self.step, self._tree())

    def _leave_if_told(self) -> None:
        """Between two steps: save and end, where the process was told to leave. More signals change nothing now."""
        if self._notice.told is None:
            return
        try:
            self._saver.save_to_leave(self.step, self._tree())
        except StorageError as error:
            self._end_as_told(self._notice.told, error)
        self._end_as_told(self._notice.told)

    def _end_as_told(self, told: str, cause: Exception | None = None) -> NoReturn:
        saved = self._saver.latest_step
        words = "nothing is saved" if saved is None else f"it is saved up to step {saved}"
        self._task.preempted(told)
        self._notice.leave(f"The training was told to leave by {told} after step {self.step}: {words}.", cause)

    def _tree(self) -> dict[str, Any]:
        session = {
            "step": self.step,
            "stopped_short_of": self._stopped_short_of,
            "data": self._data.capture() if self._data is not None else None,
            "rng": self._rng_to_restore or capture_rng(),
            "user": self.user,
        }
        return {"session": session, **capture_objects(self._objects)}


def _objects(model: Any, optimizer: Any, scheduler: Any, state: Mapping[str, Any] | None) -> dict[str, Stateful]:
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    objects = {name: stateful for name, stateful in named.items() if stateful is not None}
    for name, stateful in (state or {}).items():
        if name in {*named, "session"}:
            raise ConfigurationError(f"state={{{name!r}: ...}}: this name is taken; give the object another one.")
        objects[name] = stateful
    for name, stateful in objects.items():
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise ConfigurationError(
                f"{name} is a {type(stateful).__name__}, which has no state_dict and load_state_dict; "
                "plain values belong into session.user."
            )
    return objects


def _check_options(save: SavePolicy, keep: int, max_unsaved_seconds: float) -> None:
    if not isinstance(save, SavePolicy):
        raise ConfigurationError(f"save={save!r} is no SavePolicy; give EverySteps(n) or EverySeconds(t).")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigurationError(f"keep={keep!r}: at least one checkpoint must be kept.")
    if not 0 <= max_unsaved_seconds < math.inf:
        raise ConfigurationError(f"max_unsaved_seconds={max_unsaved_seconds!r}: give a finite number of seconds.")


def _plain(value: Any) -> Any:
    """A metric as JSON holds it. A tensor on a GPU is not read: that would wait for everything queued before it."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        return repr(type(value))
    try:
        return _plain(value.item())
    except (AttributeError, ValueError, RuntimeError, TypeError):
        return repr(type(value))
