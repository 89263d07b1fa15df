"""What a checkpoint holds of the trained objects, and how it is put back without a silent loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from dagster_resilient.codecs.tensors import is_tensor
from dagster_resilient.errors import ConfigurationError


class Stateful(Protocol):
    """What has a state that can be saved: modules, optimizers, schedulers, scalers, metrics, your own classes."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state."""


def capture_objects(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the states of objects by name. The tensors are live: encode and write them before training goes on."""
    return {name: stateful.state_dict() for name, stateful in objects.items()}


def restore_objects(objects: Mapping[str, Stateful], saved: Mapping[str, Any], where: str) -> None:
    """Put saved states back into objects.

    Args:
        objects: The same objects by the same names as at the save.
        saved: What `capture_objects` returned.
        where: Name of the checkpoint, for messages.

    Raises:
        ConfigurationError: The names, keys, shapes or dtypes do not fit. Nothing is skipped silently.
    """
    if objects.keys() != saved.keys():
        raise ConfigurationError(
            f"{where} holds the state of {_names(saved)}; this session has {_names(objects)}. Give it the same objects."
        )
    for name, stateful in objects.items():
        try:
            _restore(stateful, saved[name])
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"{where} does not fit this {name}: {error}") from error


def _names(objects: Mapping[str, Any]) -> str:
    return ", ".join(sorted(objects)) or "nothing"


def _restore(stateful: Stateful, saved: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(stateful, torch.nn.Module):
        _require_same_dtypes(stateful.state_dict(), saved)
    result = stateful.load_state_dict(saved)
    missing, unexpected = getattr(result, "missing_keys", None), getattr(result, "unexpected_keys", None)
    if missing or unexpected:
        raise ValueError(f"missing keys: {missing or 'none'}; unexpected keys: {unexpected or 'none'}")
    if torch is not None and isinstance(stateful, torch.optim.Optimizer):
        _complete_optimizer(stateful, saved)


def _require_same_dtypes(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Torch copies float32 weights into a bfloat16 model without a word."""
    for key, tensor in now.items():
        stored: Any = saved.get(key)
        if is_tensor(tensor) and is_tensor(stored) and stored.dtype != tensor.dtype:
            raise ValueError(f"{key} is {stored.dtype} in the checkpoint and {tensor.dtype} here")


def _complete_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Put back what `load_state_dict` has cast: it gives every float state the dtype of its parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if key not in optimizer.state[param]:
                raise ValueError(f"the optimizer did not take {key!r} of parameter {number}")
            if is_tensor(value) and optimizer.state[param][key].dtype != value.dtype:
                optimizer.state[param][key] = value.to(optimizer.state[param][key].device)
