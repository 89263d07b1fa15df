"""A task's life under network faults: nothing that was committed is lost, and nobody is fenced by mistake."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from durable import make_task, steps
from proxy import S3Proxy
from s3_calls import FAULTS

from dagster_resilient.errors import StoreUnavailableError
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.manifest import StoredObject, get_object, put_object
from dagster_resilient.storage.object_store import ObjectStore

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("quick", "impatient")]

Opened = Callable[..., Any]
BODY = bytes(range(256)) * 4


def stored(task: DurableTask, name: str) -> StoredObject:
    """Write an object as a checkpoint's or a value's, for a commit to name."""
    return put_object(task.store, f"data/{name}", BODY)


LIFE: list[Callable[[DurableTask], Any]] = [
    lambda task: task.acquire(),
    lambda task: task.commit_checkpoint(1, stored(task, "1"), keep=2),
    lambda task: task.commit_checkpoint(2, stored(task, "2"), keep=2),
    lambda task: task.commit_value(stored(task, "value")),
    lambda task: task.complete(),
]
COMMITS = ["checkpoint", "checkpoint", "value", "complete"]
RESUMED = [[], [], [1], [1, 2], [1, 2], [1, 2]]  # the checkpoints after so many acts

# Two requests in a row meet the fault in each round of four: one more than the client hides by itself. A silent server
# costs a timeout each time.
STRIKES = [
    *itertools.product([name for name in FAULTS if name not in {"never_answer", "stall_body"}], range(1, 5), [4]),
    *itertools.product(["never_answer", "stall_body"], [1, 4], [9]),
]


def check(judge: ObjectStore) -> None:
    """The log is sound and ends in the whole life; what its head names is there, byte for byte."""
    history = make_task(judge).log.history()
    assert [entry.kind for entry in history if entry.kind != "acquire"] == COMMITS
    assert [entry.n for entry in history] == list(range(1, len(history) + 1))
    assert all(after.parent_op == before.op for before, after in itertools.pairwise(history))
    head = history[-1]
    assert [checkpoint.step for checkpoint in head.checkpoints] == [1, 2]
    assert head.value is not None
    named: list[Any] = [head.value.manifest, *(checkpoint.manifest for checkpoint in head.checkpoints)]
    assert [get_object(judge, one) for one in named] == [BODY] * 3


@pytest.mark.parametrize(("fault", "first", "every"), STRIKES)
def test_a_life_under_faults_is_the_same_life(  # noqa: PLR0917 - three make the case
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, fault: str, first: int, every: int
) -> None:
    """Half of all requests fail: each act succeeds and is exactly one entry, in order, with its bytes."""
    s3_proxy.plan(*(FAULTS[fault](n=None, first=first + n, every=every) for n in range(2)))
    task = make_task(faulty)
    for act in LIFE:
        act(task)
    check(judge)
    assert make_task(judge).log.history()[0].kind == "acquire"
    assert [entry.kind for entry in make_task(judge).log.history()].count("acquire") == 1
    assert any(seen.fault for seen in s3_proxy.seen)


def requests_of_a_life(proxy: S3Proxy, store: ObjectStore) -> int:
    """How many requests it takes without a fault."""
    proxy.plan()
    task = make_task(store)
    for act in LIFE:
        act(task)
    return proxy.count()


@pytest.mark.parametrize("fault", ["internal_error", "lose_reply"])
def test_a_writer_that_loses_the_store_is_not_fenced(
    s3_proxy: S3Proxy, through: Opened, s3_url: str, fault: str
) -> None:
    """Whenever it begins, an outage is "unavailable", and the next try resumes from all that was acknowledged."""
    for begin in range(1, requests_of_a_life(s3_proxy, through(f"{s3_url}/count")), 2):
        url, done = f"{s3_url}/{begin}", []
        s3_proxy.plan(FAULTS[fault](n=None, first=begin))
        task = make_task(through(url, patience=0.0))
        with pytest.raises(StoreUnavailableError):
            done.extend(act(task) for act in LIFE)
        s3_proxy.plan()
        successor = make_task(through(url), run="run-2", attempt=2)
        successor.acquire()
        assert steps(successor) in RESUMED[len(done) : len(done) + 2]


@pytest.mark.parametrize("fault", ["reset_before", "lose_reply"])
def test_a_writer_goes_on_when_the_store_is_back(s3_proxy: S3Proxy, through: Opened, s3_url: str, fault: str) -> None:
    """It repeats the act that raised, whether or not that had landed: each commit is in the log once."""
    for begin in range(2, requests_of_a_life(s3_proxy, through(f"{s3_url}/count")), 2):
        url = f"{s3_url}/{begin}"
        s3_proxy.plan(FAULTS[fault](n=4, first=begin))
        task = make_task(through(url, patience=0.0))
        for act in LIFE:
            again(act, task)
        check(through(url))


def again(act: Callable[[DurableTask], Any], task: DurableTask) -> None:
    """Repeat an act while the store is away, as a caller does; here it is back soon."""
    for _ in range(5):
        try:
            act(task)
        except StoreUnavailableError:
            continue
        return
    pytest.fail("the store did not come back")
