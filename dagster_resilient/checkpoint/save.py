"""Writing checkpoints, and what happens while the store cannot take them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from blake3 import blake3

from dagster_resilient.checkpoint.task import TrainingTask
from dagster_resilient.codecs.codec import Encoded
from dagster_resilient.codecs.trees import encode_tree
from dagster_resilient.errors import IntegrityError, StorageError, StoreUnavailableError
from dagster_resilient.state.records import CheckpointRef
from dagster_resilient.storage.manifest import read_manifest, write_manifest, write_objects
from dagster_resilient.storage.object_store import Buffer, ObjectStore
from dagster_resilient.storage.retry import hasty

log = logging.getLogger(__name__)

CODEC = "checkpoint/1"
# While training waits: long enough for a dropped connection, short against the work that a stall would cost.
_PATIENCE_IN_LOOP = 5.0
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0


def encode_checkpoint(tree: Mapping[str, Any]) -> Encoded:
    """Encode what is to be saved. The buffers are the live tensors: write them before training goes on.

    Raises:
        UnsupportedValueError: Something cannot come back as it is; the message holds its path.
    """
    return encode_tree(dict(tree), CODEC)


class Saver:
    """Commits checkpoints of one session and keeps account of what is durable.

    A save inside the loop that meets an unavailable store is put off, not fatal: training goes on, and the save is
    tried again with growing waits. Only when nothing has become durable for `max_unsaved_seconds` does it raise.
    """

    def __init__(
        self,
        task: TrainingTask,
        *,
        keep: int,
        max_unsaved_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._task = task
        self._keep = keep
        self._max_unsaved = max_unsaved_seconds
        self._clock, self._sleep = clock, sleep
        self._durable_at = clock()
        self._latest: CheckpointRef | None = None
        self._failures = 0
        self._retry_at: float | None = None
        self._warned_of_deletes = False

    def begin(self, latest: CheckpointRef | None) -> None:
        """Start the account: work is unsaved from now on, or since the checkpoint that was just restored."""
        self._latest, self._durable_at = latest, self._clock()

    @property
    def seconds_since_save(self) -> float:
        """Seconds since a checkpoint became durable, or since the session began."""
        return self._clock() - self._durable_at

    @property
    def overdue(self) -> bool:
        """Whether a save was put off and should be tried again now."""
        return self._retry_at is not None and self._clock() >= self._retry_at

    @property
    def put_off(self) -> bool:
        """Whether a save was put off, whether or not its time has come."""
        return self._retry_at is not None

    def save(self, step: int, tree: Mapping[str, Any]) -> None:
        """Commit a checkpoint, with all the patience that the store has.

        Raises:
            UnsupportedValueError: It cannot be stored exactly; nothing was written.
            FencedError: A newer owner has taken over.
            StorageError: The store refuses or does not answer. The earlier checkpoints stand.
        """
        self._commit(step, encode_checkpoint(tree), self._task.store)

    def save_in_loop(self, step: int, tree: Mapping[str, Any]) -> None:
        """Commit a checkpoint, or put it off while the store does not take it: down, full, or read-only for a while.

        Raises:
            StoreUnavailableError: Nothing has become durable for `max_unsaved_seconds`, and this is not the first try.
        """
        encoded = encode_checkpoint(tree)
        try:
            self._commit(step, encoded, hasty(self._task.store, _PATIENCE_IN_LOOP))
        except StorageError as error:
            self._put_off(step, error)

    def _put_off(self, step: int, error: StorageError) -> None:
        unsaved = self.seconds_since_save
        if unsaved > self._max_unsaved and self._failures:
            message = f"Nothing could be saved for {unsaved:.0f} s (max_unsaved_seconds={self._max_unsaved:g}): {error}"
            raise StoreUnavailableError(message, store=error.store, key=error.key) from error
        if not self._failures:
            log.warning("The checkpoint of step %d could not be saved and is tried again later: %s", step, error)
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2**self._failures)
        self._failures += 1
        self._retry_at = self._clock() + wait

    def save_last(self, step: int, tree: Mapping[str, Any]) -> None:
        """Commit the final state, unless the last checkpoint holds exactly that; wait for the store if need be."""
        encoded = encode_checkpoint(tree)
        if not self._is_latest(step, encoded):
            self.persist(lambda: self._commit(step, encoded, self._task.store))

    def save_to_leave(self, step: int, tree: Mapping[str, Any]) -> None:
        """Commit a state unless the last checkpoint holds exactly that, with no more patience than the store has.

        Raises:
            StorageError: The store refuses or does not answer. The earlier checkpoints stand.
        """
        encoded = encode_checkpoint(tree)
        if not self._is_latest(step, encoded):
            self._commit(step, encoded, self._task.store)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None where there is none."""
        return None if self._latest is None else self._latest.step

    def persist(self, call: Callable[[], None]) -> None:
        """Repeat a call while the store is unavailable, for at most `max_unsaved_seconds`."""
        begun, failures = self._clock(), 0
        while True:
            try:
                return call()
            except StoreUnavailableError as error:
                wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2**failures)
                if self._clock() + wait - begun > self._max_unsaved:
                    raise
                if not failures:
                    log.warning("The end of the training cannot be saved yet and is tried again: %s", error)
                failures += 1
                self._sleep(wait)

    def _commit(self, step: int, encoded: Encoded, store: ObjectStore) -> None:
        prefix = self._task.data_prefix()
        written = write_objects(store, prefix, encoded.codec, encoded.parts, {"step": step})
        manifest = write_manifest(store, prefix, written)
        dropped = self._task.commit_checkpoint(step, manifest, self._keep)
        self._latest = CheckpointRef(step=step, manifest=manifest)
        self._durable_at = self._clock()
        if self._failures:
            log.info("The store takes checkpoints again; step %d is saved.", step)
        self._failures, self._retry_at = 0, None
        for old in dropped:
            self._delete(old, store)

    def _delete(self, old: CheckpointRef, store: ObjectStore) -> None:
        """Delete a checkpoint that nothing names any more. What stays is found by garbage collection later."""
        try:
            manifest = read_manifest(store, old.manifest)
            # The manifest goes last: what is left of an interrupted delete can still be found through it.
            store.delete([*(part.key for part in manifest.objects.values()), old.manifest.key])
        except (StorageError, IntegrityError) as error:
            if not self._warned_of_deletes:
                log.warning("The objects of the old checkpoint of step %d stay in the store: %s", old.step, error)
            self._warned_of_deletes = True

    def _is_latest(self, step: int, encoded: Encoded) -> bool:
        if self._latest is None or self._latest.step != step:
            return False
        try:
            stored = read_manifest(self._task.store, self._latest.manifest).objects
        except (StorageError, IntegrityError):
            return False
        digests = {role: _digest(buffers) for role, buffers in encoded.parts.items()}
        return digests == {role: part.blake3 for role, part in stored.items()}


def _digest(buffers: list[Buffer]) -> str:
    digest = blake3()
    for chunk in buffers:
        digest.update(chunk)
    return digest.hexdigest()
