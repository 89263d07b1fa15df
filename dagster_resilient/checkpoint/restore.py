"""Finding the checkpoint to resume from: the newest one whose every byte is as it was written."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from dagster_resilient.checkpoint.save import CODEC
from dagster_resilient.checkpoint.task import TrainingTask
from dagster_resilient.codecs.trees import decode_tree
from dagster_resilient.errors import IntegrityError, SchemaVersionError
from dagster_resilient.state.records import CheckpointRef
from dagster_resilient.storage.manifest import get_object, read_manifest
from dagster_resilient.storage.object_store import ObjectStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read and verified.

    Attributes:
        ref: Its step and manifest.
        tree: What was saved.
    """

    ref: CheckpointRef
    tree: dict[str, Any]


def newest_checkpoint(task: TrainingTask) -> Restored | None:
    """Return the newest valid checkpoint, or None where none was ever committed.

    A damaged one is skipped with a warning that names it.

    Raises:
        StorageError: The store refuses or does not answer. That is never "no checkpoint".
        SchemaVersionError: A newer version of the library wrote the newest one.
        IntegrityError: There are checkpoints, and all of them are damaged.
    """
    damaged: list[str] = []
    for ref in reversed(task.checkpoints):
        try:
            return Restored(ref, _read(task.store, ref))
        except SchemaVersionError:
            # Not damaged: the newer version can go on from it, so falling back would throw away good work.
            raise
        except IntegrityError as error:
            log.warning("The checkpoint of step %d (%s) is damaged and skipped: %s", ref.step, ref.manifest.key, error)
            damaged.append(f"step {ref.step}: {error}")
    if damaged:
        raise IntegrityError(
            f"All {len(damaged)} checkpoints are damaged ({'; '.join(damaged)}). "
            "Restore the objects, or start this task afresh."
        )
    return None


def _read(store: ObjectStore, ref: CheckpointRef) -> dict[str, Any]:
    manifest = read_manifest(store, ref.manifest)
    where = f"{store.url}/{ref.manifest.key}"
    if manifest.codec != CODEC:
        raise SchemaVersionError(
            f"{where} was written as {manifest.codec!r}; this version reads {CODEC}. Upgrade dagster-resilient."
        )
    tree = decode_tree({role: get_object(store, stored) for role, stored in manifest.objects.items()})
    if not isinstance(tree, dict) or tree["session"]["step"] != ref.step:
        raise IntegrityError(f"{where} does not hold step {ref.step}, which its log entry says.")
    return tree
