"""Restoring: the newest valid checkpoint, whole, into objects that fit it; else an error or a warning that says why."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from blake3 import blake3
from training_doubles import Killed, World, raising

from dagster_resilient.checkpoint import EverySteps
from dagster_resilient.errors import (
    ConfigurationError,
    IntegrityError,
    SchemaVersionError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.state.records import CheckpointRef
from dagster_resilient.storage.manifest import read_manifest


def linear():
    """Return a fresh small model."""
    return torch.nn.Linear(2, 1)


@pytest.fixture
def world():
    """Three checkpoints of a model, of steps 2, 4 and 6, whose run was killed at step 7."""
    world = World()
    with contextlib.suppress(Killed):
        world.train(10, raising(Killed(), 7), save=EverySteps(2), model=linear())
    assert [ref.step for ref in world.log] == [2, 4, 6]
    return world


def key_of(world, ref, role):
    """Return the key of one object of a checkpoint."""
    return ref.manifest.key if role == "manifest" else read_manifest(world.store, ref.manifest).objects[role].key


def flip_a_bit(world, key):
    """Damage an object as a failing disk would."""
    raw = bytearray(world.store.inner.get(key))
    raw[len(raw) // 2] ^= 1
    world.store.inner.put(key, bytes(raw))


ROLES = ["manifest", "document.json", "tensors.safetensors"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["flipped", "emptied", "cut", "gone"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_it(world, role, how, caplog):
    """The previous one is loaded; damage is never a value."""
    key = key_of(world, world.log[-1], role)
    if how == "flipped":
        flip_a_bit(world, key)
    elif how == "gone":
        world.store.inner.delete([key])
    else:
        world.store.inner.put(key, b"" if how == "emptied" else world.store.inner.get(key)[:-1])
    assert world.train(4, model=linear()).resumed_from == 4
    assert "checkpoint of step 6" in caplog.text
    assert key in caplog.text


def test_two_swapped_objects_are_damage(world):
    """Both are whole, each in the other's place: both checkpoints are skipped."""
    one, other = (key_of(world, ref, "document.json") for ref in world.log[-2:])
    first, second = world.store.inner.get(one), world.store.inner.get(other)
    world.store.inner.put(one, second)
    world.store.inner.put(other, first)
    assert world.train(2, model=linear()).resumed_from == 2


def test_only_damaged_checkpoints_are_an_error(world):
    """To start over silently would throw all work away."""
    for ref in world.log:
        flip_a_bit(world, key_of(world, ref, "document.json"))
    with pytest.raises(IntegrityError, match="All 3 checkpoints are damaged"):
        world.train(10, model=linear())
    assert world.last.calls == ["acquire", "release"]


@pytest.mark.parametrize("error", [StoragePermissionError, StoreUnavailableError])
def test_a_store_that_refuses_is_never_no_checkpoint(world, error):
    """Access denied raises; it neither starts from scratch nor skips anything."""
    world.store.fails = lambda verb, key: error("no") if verb == "get" else None
    with pytest.raises(error):
        world.train(10, model=linear())


def test_a_checkpoint_of_a_newer_version_is_not_skipped(world):
    """It is not damaged: falling back would throw good work away."""
    ref = world.log[-1]
    raw = read_manifest(world.store, ref.manifest).model_copy(update={"codec": "checkpoint/9"}).to_bytes()
    world.store.inner.put(ref.manifest.key, raw)
    stored = ref.manifest.model_copy(update={"size": len(raw), "blake3": blake3(raw).hexdigest()})
    world.log[-1] = CheckpointRef(step=ref.step, manifest=stored)
    with pytest.raises(SchemaVersionError, match="checkpoint/9"):
        world.train(10, model=linear())


def test_a_manifest_under_the_wrong_step_is_damage(world):
    """The log says 6, the content 2."""
    world.log[-1] = CheckpointRef(step=6, manifest=world.log[0].manifest)
    assert world.train(4, model=linear()).resumed_from == 4


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (dict, "holds the state of model; this session has nothing"),
        (lambda: {"model": torch.nn.Linear(3, 1)}, "size mismatch"),
        (lambda: {"model": torch.nn.Sequential(linear())}, "Missing key.*Unexpected key"),
        (lambda: {"model": linear().to(torch.bfloat16)}, "weight is torch.float32 .* torch.bfloat16 here"),
        (lambda: {"model": linear(), "loader": [1, 2]}, "holds no position in a loader"),
        (lambda: {"model": linear(), "state": {"ema": linear()}}, "this session has ema, model"),
    ],
    ids=["fewer objects", "shape", "prefix", "dtype", "loader", "more objects"],
)
def test_a_checkpoint_that_does_not_fit_is_an_error(world, options, what):
    """Never silently skipped keys, never random weights."""
    with pytest.raises(ConfigurationError, match=f"(?s)step 6.*{what}"):
        world.train(10, **options())
    assert world.last.calls == ["acquire", "release"]


def test_keys_that_a_lenient_model_left_out_are_an_error(world):
    """A model that loads with strict=False still may not lose weights silently."""

    class Lenient(torch.nn.Linear):
        def load_state_dict(self, state_dict):
            """Load what fits."""
            return super().load_state_dict({}, strict=False)

    with pytest.raises(ConfigurationError, match=re.escape("missing keys: ['weight', 'bias']")):
        world.train(10, model=Lenient(2, 1))


def test_a_fresh_optimizer_gets_its_moments_in_their_own_dtype():
    """Torch would cast float32 moments to the parameter's bfloat16, and keeps none where it is not told."""

    def build():
        model = linear().to(torch.bfloat16)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    world, first, second = World(), build(), build()
    first["model"](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    first["optimizer"].step()
    for state in first["optimizer"].state.values():
        state["exp_avg"] = torch.full(state["exp_avg"].shape, 1 / 3)
    world.train(0, **first)
    world.train(0, **second)
    moments = [state["exp_avg"] for state in second["optimizer"].state.values()]
    assert len(moments) == 2
    assert all(torch.equal(moment, torch.full(moment.shape, 1 / 3)) for moment in moments)


def test_tied_weights_are_stored_once_and_stay_tied():
    """One copy in the store; the model that ties them still does after the load."""

    def build():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
        model[1].weight = model[0].weight
        return model

    world, first, second = World(), build(), build()
    world.train(0, model=first)
    world.train(0, model=second)
    assert second[0].weight is second[1].weight
    assert torch.equal(first[0].weight, second[0].weight)
    size = next(info.size for info in world.store.inner.list("") if info.key.endswith("safetensors"))
    assert size < 1.7 * first[0].weight.nbytes


def test_buffers_and_module_versions_are_restored():
    """Running statistics are state too."""

    def build():
        return torch.nn.BatchNorm1d(2)

    world, first, second = World(), build(), build()
    first(torch.randn(8, 2))
    world.train(0, model=first)
    world.train(0, model=second)
    assert (second.num_batches_tracked.item(), second.running_mean.tolist()) == (1, first.running_mean.tolist())
