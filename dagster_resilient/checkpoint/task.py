"""What a training session needs of a task. `state.task.DurableTask` is one."""

from __future__ import annotations

from typing import Any, Protocol

from dagster_resilient.state.notice import Notice
from dagster_resilient.state.records import CheckpointRef
from dagster_resilient.storage.manifest import StoredObject
from dagster_resilient.storage.object_store import ObjectStore


class TrainingTask(Protocol):
    """A task whose training can be committed step by step by one owner at a time."""

    @property
    def store(self) -> ObjectStore:
        """Where the objects of checkpoints go."""

    @property
    def checkpoints(self) -> tuple[CheckpointRef, ...]:
        """The retained checkpoints, oldest first, as this owner has read them."""

    def acquire(self) -> object:
        """Become the owner: a new generation, that refuses the writes of all earlier ones."""

    def data_prefix(self) -> str:
        """Return a prefix that no other write uses."""

    def commit_checkpoint(self, step: int, manifest: StoredObject, keep: int) -> tuple[CheckpointRef, ...]:
        """Make a written checkpoint visible, atomically.

        Returns:
            The checkpoints that dropped out; their objects may be deleted now.

        Raises:
            FencedError: A newer owner has taken over. The checkpoint is not visible.
        """

    def complete(self) -> None:
        """Record that the training is done, and stop being the owner."""

    def release(self) -> None:
        """Stop being the owner and leave the state for the next one."""

    def check_fenced(self) -> None:
        """Raise `FencedError` if it is known that a newer owner has taken over. Costs no request."""

    def report(self, **progress: Any) -> None:
        """Show progress. Never raises, never blocks."""

    def expect_progress(self, hung_after: float | None) -> None:
        """Have it noticed where no report comes for so many seconds, or, for None, for much longer than usual."""

    def relax_progress(self) -> None:
        """Expect no more reports. A second call does nothing."""

    def notice(self) -> Notice:
        """Return a listener for being told to leave."""

    def preempted(self, signal: str) -> None:
        """Record that this process leaves, since it was told to by a signal. Never raises."""
