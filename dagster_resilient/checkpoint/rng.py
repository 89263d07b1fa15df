"""The random number generators of a process, captured and set as one."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

log = logging.getLogger(__name__)


def capture_rng() -> dict[str, Any]:
    """Return the states of the global generators: Python's, and numpy's, torch's and CUDA's where these are in use.

    A `numpy.random.Generator` belongs to whoever made it; keep its ``bit_generator.state`` in the session's user state.
    """
    states: dict[str, Any] = {"python": random.getstate()}
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if np is not None:
        states["numpy"] = np.random.get_state(legacy=False)
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        # Asking a CUDA that is not in use would start it, and take hundreds of MB of its memory.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Set the generators to captured states; those that were not captured stay as they are."""
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np  # noqa: PLC0415 - heavy, and loaded already where it was in use

        np.random.set_state(states["numpy"])  # noqa: NPY002 - the global one is what others draw from
    if "torch" in states:
        import torch  # noqa: PLC0415

        torch.set_rng_state(states["torch"])
    if "cuda" in states:
        _restore_cuda(states["cuda"])


def _restore_cuda(states: list[Any]) -> None:
    import torch  # noqa: PLC0415

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count != len(states):
        log.warning(
            "The checkpoint was saved with %d CUDA device(s), this process has %d: random numbers on CUDA will differ.",
            len(states),
            count,
        )
    for device, state in enumerate(states[:count]):
        torch.cuda.set_rng_state(state, device)
