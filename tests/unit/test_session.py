"""The training session: which steps it yields, what it saves when, and what happens when something fails."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from training_doubles import Killed, World, raising

from dagster_resilient.checkpoint import EverySeconds, EverySteps
from dagster_resilient.errors import (
    ConfigurationError,
    FencedError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
    UnsupportedValueError,
)
from dagster_resilient.storage.manifest import read_manifest


@pytest.fixture
def world():
    """A fresh store, log and clock."""
    return World()


def seconds_per_step(world, seconds):
    """Return a step function that lets time pass."""

    def each(_session, _step):
        world.now += seconds

    return each


def outage(world, until=float("inf")):
    """Let the store take no writes until a time."""
    down = StoreUnavailableError("down")
    world.store.fails = lambda verb, key: down if verb == "put" and world.now < until else None


# ---- steps


def test_steps_yield_what_is_left(world):
    """Numbers run from the resumed step up to n, exclusive, as in range."""
    with pytest.raises(Killed):
        world.train(10, raising(Killed(), 5), save=EverySteps(2))
    seen = []
    session = world.train(10, lambda session, step: seen.append(step))
    assert (session.resumed_from, seen, session.step) == (4, [4, 5, 6, 7, 8, 9], 10)


def test_a_step_counts_when_the_next_one_is_asked_for(world):
    """The save after a step happens behind its last line, not before."""
    seen = []
    world.train(3, lambda session, step: seen.append((step, session.step, [*world.last.saved])), save=EverySteps(1))
    assert seen == [(0, 0, []), (1, 1, [1]), (2, 2, [1, 2])]


def test_break_counts_the_step_and_ends_the_training(world):
    """Early stopping is an end: the same goal does not go on after it, a greater one does."""
    with world.session() as session:
        for step in session.steps(100):
            if step == 3:
                break
    assert world.last.saved == [4]
    seen = []
    world.train(100, lambda session, step: seen.append(step))
    assert (seen, world.last.saved) == ([], [])
    world.train(101, lambda session, step: seen.append(step))
    assert (seen[0], seen[-1]) == (4, 100)


def test_two_loops_in_one_session_continue_each_other(world):
    """A break in the first loop counts its step."""
    with world.session() as session:
        for step in session.steps(5):
            if step == 2:
                break
        assert list(session.steps(6)) == [3, 4, 5]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Killed, SystemExit])
def test_an_exception_saves_nothing_and_gives_the_lease_back(world, error):
    """Half a step is not a state to resume from; the exception is passed on as it is."""
    with pytest.raises(error):
        world.train(10, raising(error(), 3), save=EverySteps(2))
    assert (world.last.calls, world.last.saved) == (["acquire", "commit", "release"], [2])


def test_a_failing_release_does_not_hide_the_error(world, caplog):
    """The first failure is what a person must see."""

    def each(_session, _step):
        world.last.release = lambda: (_ for _ in ()).throw(StoreUnavailableError("down"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.train(1, each)
    assert "could not be given back: down" in caplog.text


# ---- saving


def test_an_explicit_save_waits_for_the_end_of_the_step(world):
    """Half a step cannot be resumed exactly; outside of a step it is saved at once."""
    with world.session(save=EverySteps(100)) as session:
        for step in session.steps(4):
            if step == 1:
                session.save()
                assert world.last.saved == []
        assert world.last.saved == [2]
        session.save()
        assert world.last.saved == [2, 4]


def test_weights_are_stored_under_their_own_names(world):
    """Plain safetensors finds `model.weight` in a checkpoint."""
    world.train(0, state={"average": torch.nn.Linear(2, 2)}, model=torch.nn.Linear(2, 2))
    raw = world.store.inner.get(read_manifest(world.store, world.log[0].manifest).objects["tensors.safetensors"].key)
    assert b'"average.weight"' in raw
    assert b'"model.weight"' in raw


def test_what_cannot_be_stored_is_refused_before_the_first_step(world):
    """With its path, and nothing computed or written."""

    class Odd:
        def state_dict(self):
            """Return what cannot be stored."""
            return {"f": print}

        load_state_dict = print

    with pytest.raises(UnsupportedValueError, match=r"^\$\.extra\.f "):
        world.train(1, lambda session, step: pytest.fail("a step was made"), state={"extra": Odd()})
    assert (world.last.calls, world.keys()) == (["acquire", "release"], set())


def test_what_becomes_unsupported_later_fails_at_its_save(world):
    """At once, not at the end; the earlier checkpoints stand."""

    def each(session, step):
        if step == 2:
            session.user["f"] = print

    with pytest.raises(UnsupportedValueError, match=r"\$\.session\.user\.f"):
        world.train(5, each, save=EverySteps(1))
    assert [ref.step for ref in world.log] == [1, 2]


def test_dropped_checkpoints_are_deleted_and_retained_ones_are_whole(world):
    """keep=2 leaves two checkpoints, object for object."""
    world.train(10, save=EverySteps(2), keep=2, model=torch.nn.Linear(2, 1))
    assert [ref.step for ref in world.log] == [8, 10]
    expected = {part.key for ref in world.log for part in read_manifest(world.store, ref.manifest).objects.values()}
    assert world.keys() == expected | {ref.manifest.key for ref in world.log}


def test_a_failing_delete_does_not_hurt_and_is_said_once(world, caplog):
    """Deleting is a kindness; garbage collection finds the rest."""
    world.store.fails = lambda verb, key: StoragePermissionError("denied") if verb == "delete" else None
    world.train(10, save=EverySteps(2), keep=1)
    assert [ref.step for ref in world.log] == [10]
    assert caplog.text.count("stay in the store") == 1


@pytest.mark.parametrize("dies_at", range(6))
def test_a_failure_at_any_write_of_a_save_leaves_the_previous_checkpoint(world, dies_at):
    """keep=1: the old one goes only when the new one is committed. A save has three puts, each looked at afterwards."""
    with pytest.raises(Killed):
        world.train(9, raising(Killed(), 3), save=EverySteps(2), keep=1, model=torch.nn.Linear(2, 1))
    writes = itertools.count()
    full = StorageError("disk full")
    world.store.fails = lambda verb, key: full if verb in {"put", "head"} and next(writes) >= dies_at else None
    with pytest.raises(StorageError, match="disk full"):
        world.train(4, save=EverySteps(1), keep=1, model=torch.nn.Linear(2, 1))
    world.store.fails = lambda verb, key: None
    assert world.train(4, model=torch.nn.Linear(2, 1)).resumed_from == 2


def test_every_seconds_counts_from_the_last_save(world):
    """By the clock that never jumps."""
    world.train(10, seconds_per_step(world, 4), save=EverySeconds(10))
    assert world.last.saved == [3, 6, 9, 10]


def test_a_last_step_that_was_just_saved_is_not_saved_again(world):
    """The final save compares contents, so nothing is uploaded twice."""
    world.train(10, save=EverySteps(5), model=torch.nn.Linear(2, 1))
    assert world.last.saved == [5, 10]


def test_a_change_after_the_loop_is_in_the_final_state(world):
    """Weights that are averaged at the end of the block are what is committed."""
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    with world.session(save=EverySteps(5), model=model) as session:
        assert len(list(session.steps(5))) == 5
        with torch.no_grad():
            model.weight.fill_(7)
    world.train(5, model=other)
    assert other.weight.tolist() == [[7, 7]]


# ---- outages


def test_an_outage_of_the_store_does_not_hurt_the_training(world, caplog):
    """Saves are put off with growing waits and one warning; the first one after the outage needs no new reason."""
    outage(world, until=20)
    world.train(40, seconds_per_step(world, 1), save=EverySteps(2), max_unsaved_seconds=100)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert 20 <= world.last.saved[0] <= 34
    assert world.last.saved[-1] == 40


def test_an_outage_that_outlasts_the_grace_ends_the_training(world):
    """Work that stays undurable for too long is not left to luck."""
    outage(world)
    with pytest.raises(StoreUnavailableError, match=r"Nothing could be saved for .*max_unsaved_seconds=30.*down"):
        world.train(1000, seconds_per_step(world, 1), save=EverySteps(2), max_unsaved_seconds=30)
    assert 30 < world.now < 70
    assert world.last.calls[-1] == "release"


def test_one_failed_save_is_never_fatal_however_rare_saves_are(world):
    """An interval that is longer than the grace must not turn one hiccup into a failure."""
    outage(world, until=1001)
    world.train(20, seconds_per_step(world, 100), save=EverySteps(10), max_unsaved_seconds=30)
    assert world.last.saved == [11, 20]


def test_the_final_save_waits_for_the_store(world):
    """The end of the training is not lost to an outage of minutes."""
    outage(world, until=50)
    world.train(3, max_unsaved_seconds=100)
    assert (world.last.calls[-2:], world.last.saved) == (["commit", "complete"], [3])


def test_the_final_save_gives_up_in_the_end(world):
    """Every wait is finite; the lease is given back."""
    outage(world)
    with pytest.raises(StoreUnavailableError):
        world.train(3, max_unsaved_seconds=100)
    assert world.now <= 100
    assert world.last.calls[-1] == "release"


def test_saves_within_the_loop_ask_the_store_for_less_patience(world):
    """Training must not stall for a minute; at the end there is nothing better to do than to wait."""
    asked = []
    world.store.with_patience = lambda seconds: asked.append(seconds) or world.store
    world.train(3, save=EverySteps(2))
    assert (asked, world.last.saved) == ([5.0], [2, 3])


# ---- ownership and use


def test_a_fence_ends_the_training_at_the_next_step(world):
    """It was read by the heartbeat process; nothing more is saved."""

    def each(_session, step):
        world.last.fence = "superseded" if step == 3 else None

    with pytest.raises(FencedError):
        world.train(10, each, save=EverySteps(1))
    assert (world.last.saved, world.last.calls[-1]) == ([1, 2, 3], "release")


def test_a_refused_commit_is_raised_through(world):
    """A zombie learns of its successor at its next commit."""

    def each(_session, step):
        world.last.check_fenced = lambda: None
        world.last.fence = "superseded" if step >= 3 else None

    with pytest.raises(FencedError):
        world.train(10, each, save=EverySteps(2))
    assert world.last.saved == [2]


def test_progress_and_metrics_are_reported(world):
    """As plain numbers; what is none is named by its type."""
    world.train(1, lambda session, _: session.report(loss=torch.tensor(0.5), n=np.int64(3), many=torch.ones(3)))
    assert world.last.reports == [
        {"step": 0, "resumed_from": 0},
        {"loss": 0.5, "n": 3, "many": "<class 'torch.Tensor'>", "step": 0, "steps_total": 1},
        {"step": 1, "steps_total": 1},
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"save": 5},
        {"keep": 0},
        {"keep": True},
        {"max_unsaved_seconds": -1},
        {"max_unsaved_seconds": float("inf")},
        {"model": object()},
        {"state": {"model": torch.nn.Linear(1, 1)}},
        {"state": {"session": torch.nn.Linear(1, 1)}},
        {"loader": (x for x in [1])},
        {"loader": 5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_cannot_work_are_refused_before_anything_happens(world, options):
    """At construction, before the lease is taken."""
    with pytest.raises(ConfigurationError):
        world.session(**options)


def test_wrong_use_is_refused(world):
    """A loop or a save outside the block, a second entry, batches without a loader, a number that is none."""
    session = world.session()
    with pytest.raises(ConfigurationError, match="not open"):
        session.steps(1)
    with session:
        for call in (lambda: session.batches(1), lambda: session.steps(-1), lambda: session.steps(True)):
            with pytest.raises(ConfigurationError):
                call()
    with pytest.raises(ConfigurationError, match="not open"):
        session.save()
    with pytest.raises(ConfigurationError, match="entered once"), session:
        pass


def test_an_empty_loader_is_an_error(world):
    """It would otherwise be read for ever."""
    with pytest.raises(ConfigurationError, match="no batches"), world.session(loader=[]) as session:
        next(session.batches(1))
