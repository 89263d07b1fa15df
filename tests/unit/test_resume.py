"""Exact resume: a run that was killed ends bit-equal to one that was not."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from training_doubles import Killed, Toy, World, raising

from dagster_resilient.checkpoint import EverySteps
from dagster_resilient.errors import ConfigurationError


@pytest.fixture
def world():
    """A fresh store and log."""
    return World()


def straight(n, **options):
    """Return an uninterrupted run."""
    toy = Toy(**options)
    toy.run(World(), n)
    return toy


def resumed(world, n, kills, every, **options):
    """Return a run that is killed at each of the steps, with all its losses and ids. A resumed try has other seeds."""
    losses, ids = {}, {}
    for number, kill in enumerate([*kills, None]):
        toy = Toy(seed=number if world.log else 0, **options)
        with contextlib.suppress(Killed):
            toy.run(world, n, kill, every)
        losses |= toy.losses
        ids |= toy.ids
    return toy, losses, ids


@pytest.mark.parametrize(
    ("kills", "every"),
    [([7], 3), ([5], 5), ([6], 5), ([11, 12, 13], 2), ([1], 10), ([10, 10], 5), ([19], 1)],
    ids=["mid-epoch", "epoch boundary", "after the boundary", "three kills", "before a save", "twice", "last step"],
)
@pytest.mark.parametrize("options", [{}, {"generator": True}], ids=["global rng", "own generator"])
def test_a_killed_run_ends_bit_equal_to_an_uninterrupted_one(world, kills, every, options):
    """Weights, moments, schedule, every loss and every sample id, over four epochs."""
    expected = straight(20, **options)
    toy, losses, ids = resumed(world, 20, kills, every, **options)
    assert (losses, ids) == (expected.losses, expected.ids)
    assert all(torch.equal(toy.model.state_dict()[key], tensor) for key, tensor in expected.model.state_dict().items())
    for one, other in zip(toy.optimizer.state.values(), expected.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)
    assert toy.scheduler.state_dict() == expected.scheduler.state_dict()


def test_worker_processes_do_not_change_the_order_of_a_resumed_run(world):
    """With two workers, which read ahead, mid-epoch."""
    expected = straight(12, workers=2)
    _, losses, ids = resumed(world, 12, [8], 3, workers=2)
    assert (losses, ids) == (expected.losses, expected.ids)


def test_each_sample_is_seen_once_per_epoch_across_kills(world):
    """No sample repeated, none skipped."""
    _, _, ids = resumed(world, 20, [7, 13], 2)
    for epoch in range(4):
        seen = itertools.chain(*(ids[step] for step in range(epoch * 5, epoch * 5 + 5)))
        assert sorted(seen) == list(range(40))


class StatefulLoader:
    """A loader that keeps its own position, shuffles by the global generator, and counts what it reads."""

    def __init__(self):
        self.order, self.at, self.read = [], 0, 0

    def __iter__(self):
        if self.at >= len(self.order):
            self.order, self.at = torch.randperm(6).tolist(), 0
        while self.at < len(self.order):
            self.at += 1
            self.read += 1
            yield self.order[self.at - 1]

    def state_dict(self):
        """Return the position."""
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state):
        """Take a position."""
        self.order, self.at = list(state["order"]), state["at"]


def walk(world, loader, n, kill=None):
    """Return what a run sees by step: the batch and a random number."""
    seen = {}
    with contextlib.suppress(Killed), world.session(loader=loader, save=EverySteps(1)) as session:
        for step, batch in session.batches(n):
            raising(Killed(), kill)(session, step)
            seen[step] = batch, torch.rand(1).item()
    return seen


@pytest.mark.parametrize("kill", [4, 6, 7])
def test_a_loader_with_a_state_of_its_own_continues_without_replay(world, kill):
    """Its state decides; nothing is read twice. An epoch has six batches."""
    torch.manual_seed(0)
    expected = walk(World(), StatefulLoader(), 15)
    torch.manual_seed(0)
    first = walk(world, StatefulLoader(), 15, kill)
    torch.manual_seed(1)
    loader = StatefulLoader()
    second = walk(world, loader, 15)
    assert first | second == expected
    assert loader.read == 15 - kill


def test_a_distributed_sampler_is_told_the_epoch(world):
    """It shuffles by seed and epoch; without the call every epoch would have the order of the first."""
    data = list(range(8))

    def loader():
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=3)
        return torch.utils.data.DataLoader(data, 4, sampler=sampler, collate_fn=list)

    expected = {step: batch for step, (batch, _) in walk(World(), loader(), 6).items()}
    first = walk(world, loader(), 6, kill=3)
    seen = {step: batch for step, (batch, _) in (first | walk(world, loader(), 6)).items()}
    assert seen == expected
    assert expected[0] + expected[1] != expected[2] + expected[3]


def test_random_numbers_drawn_between_entering_and_the_loop_do_not_shift_the_run(world):
    """The uninterrupted run drew them before its first step, so the resumed one must not draw them after its save."""

    def run(world, kill=None):
        seen = {}
        with contextlib.suppress(Killed), world.session(save=EverySteps(2)) as session:
            torch.rand(3)
            for step in session.steps(6):
                raising(Killed(), kill)(session, step)
                seen[step] = torch.rand(1).item()
        return seen

    torch.manual_seed(0)
    expected = run(World())
    torch.manual_seed(0)
    seen = run(world, kill=4)
    assert seen | run(world) == expected


def test_saving_changes_neither_parameters_nor_random_state():
    """A run that saves after each step equals one that never does."""
    often = Toy()
    often.run(World(), 7, every=1)
    never = Toy()
    never.run(World(), 7, every=1000)
    assert often.losses == never.losses


def test_a_finished_training_yields_nothing_and_saves_nothing_more(world):
    """A step that failed after its training does not train again."""
    Toy().run(world, 6, every=4)
    toy = Toy(seed=9)
    session = toy.run(world, 6)
    assert toy.losses == {}
    assert (session.resumed_from, world.last.calls) == (6, ["acquire", "complete"])


def test_more_steps_than_before_continue_a_finished_training(world):
    """The goal may grow; what was done stays done."""
    Toy().run(world, 6)
    toy = Toy(seed=9)
    toy.run(world, 9)
    assert sorted(toy.losses) == [6, 7, 8]
    assert toy.losses[8] == straight(9).losses[8]


def test_user_state_is_restored_exactly(world):
    """With types: a tuple stays a tuple, an int key an int, a numpy scalar one."""
    state = {"best": np.float64(0.1), 1: (1, 2), "rng": np.random.default_rng(3).bit_generator.state}
    world.train(1, lambda session, _: session.user.update(state))
    session = world.train(1)
    assert session.user == state
    assert (type(session.user["best"]), list(session.user)) == (np.float64, list(state))


def test_less_data_than_the_checkpoint_has_taken_is_an_error(world):
    """The order could not be the same; the message says what changed."""
    walk(world, [1, 2, 3, 4], 10, kill=3)
    with pytest.raises(ConfigurationError, match="after batch 3 of epoch 0, but the loader has only 2"):
        walk(world, [1, 2], 10)


def test_another_kind_of_loader_is_an_error(world):
    """A position of one kind says nothing to the other."""
    walk(world, [1, 2, 3, 4], 10, kill=3)
    with pytest.raises(ConfigurationError, match="same kind of loader"):
        walk(world, StatefulLoader(), 10)


def test_other_generators_of_the_loader_are_an_error(world):
    """Their states could not be put back."""
    with contextlib.suppress(Killed):
        Toy(generator=True).run(world, 9, kill_at=3, every=1)
    with pytest.raises(ConfigurationError, match=r"1 generator\(s\) of the loader, this loader has 0"):
        Toy().run(world, 9)
