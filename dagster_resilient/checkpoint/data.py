"""Where a training stands in its data.

A loader with `state_dict` and `load_state_dict` keeps its own position. Any other one is *replayed*: a checkpoint holds
the random state at the beginning of the epoch and the number of batches taken; on resume the epoch is begun again under
that state, which draws the same order, and the taken batches are read and dropped. That is exact for every loader
whose order depends on the random state at the beginning of an epoch (torch's `DataLoader` with its samplers, also with
worker processes), and costs the reading of the dropped batches. It is not exact where a sampler draws from the global
generator in the middle of an epoch, or where persistent workers carry random state from one epoch into the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dagster_resilient.checkpoint.rng import capture_rng, restore_rng
from dagster_resilient.errors import ConfigurationError


class DataPosition:
    """An endless walk over the epochs of a loader, that can be captured between two batches."""

    def __init__(self, loader: Any) -> None:
        if hasattr(loader, "__next__") or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise ConfigurationError(
                f"loader is a {type(loader).__name__}, which ends after one epoch; give a DataLoader or a list."
            )
        self._loader = loader
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._taken = 0
        self._epoch_start: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None

    def capture(self) -> dict[str, Any]:
        """Return the position as plain data, after the last batch that was taken."""
        if self._restored is not None:
            return self._restored
        state = {
            "epoch": self._epoch,
            "taken": self._taken,
            "stateful": self._stateful,
            "generators": self._generator_states(),
        }
        return state | ({"loader": self._loader.state_dict()} if self._stateful else {"epoch_start": self._epoch_start})

    def restore(self, state: dict[str, Any]) -> None:
        """Take a captured position; `resume` then goes there.

        Raises:
            ConfigurationError: It was captured from a loader of the other kind.
        """
        if state["stateful"] != self._stateful:
            kinds = ("without state_dict", "with state_dict")
            raise ConfigurationError(
                f"The checkpoint's position is of a loader {kinds[state['stateful']]}; this session's loader is one "
                f"{kinds[self._stateful]}. Give the same kind of loader."
            )
        self._restored = state

    def resume(self) -> None:
        """Go to the restored position, if there is one. Uses the global generators: set these afterwards."""
        state, self._restored = self._restored, None
        if state is None:
            return
        self._epoch, self._taken = state["epoch"], state["taken"]
        if self._stateful:
            self._loader.load_state_dict(state["loader"])
        if self._taken:
            self._replay(state)
        self._set_generators(state["generators"])

    def _replay(self, state: dict[str, Any]) -> None:
        if self._stateful:
            self._iterator = iter(self._loader)
            return
        self._epoch_start = state["epoch_start"]
        restore_rng(self._epoch_start["global"])
        self._set_generators(self._epoch_start["generators"])
        self._announce_epoch()
        self._iterator = iter(self._loader)
        for count in range(self._taken):
            try:
                next(self._iterator)
            except StopIteration:
                raise ConfigurationError(
                    f"The checkpoint stands after batch {self._taken} of epoch {self._epoch}, but the loader has only "
                    f"{count} batches now. Give the same data and batch size, or start afresh."
                ) from None

    def next(self) -> Any:
        """Return the next batch, from the next epoch where one is used up."""
        while True:
            if self._iterator is None:
                self._begin_epoch()
            try:
                batch = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                self._end_epoch()
            else:
                self._taken += 1
                return batch

    def close(self) -> None:
        """Let go of the iterator, and so of its worker processes."""
        self._iterator = None

    def _begin_epoch(self) -> None:
        self._announce_epoch()
        self._epoch_start = {"global": capture_rng(), "generators": self._generator_states()}
        self._iterator = iter(self._loader)

    def _end_epoch(self) -> None:
        if not self._taken:
            raise ConfigurationError("The loader yields no batches: its data set is empty, or smaller than one batch.")
        self._iterator = None
        self._epoch, self._taken = self._epoch + 1, 0

    def _announce_epoch(self) -> None:
        """Distributed samplers shuffle by a number that they must be told, and repeat themselves otherwise."""
        sampler: Any = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)

    def _generators(self) -> list[Any]:
        """The loader's own generators, each once: one object often serves loader and sampler."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        holders = (
            self._loader,
            getattr(self._loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
        found = {id(g): g for holder in holders if hasattr(g := getattr(holder, "generator", None), "get_state")}
        return list(found.values())

    def _generator_states(self) -> list[Any]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: list[Any]) -> None:
        generators = self._generators()
        if len(generators) != len(states):
            raise ConfigurationError(
                f"The checkpoint holds {len(states)} generator(s) of the loader, this loader has {len(generators)}. "
                "Build it with the same generators."
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
