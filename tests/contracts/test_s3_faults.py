"""The real client stack against the faults of a network and of a busy server: every call is exact, or the right error.

A proxy in front of the real server makes the faults. What is stored is judged past the proxy. Waits and timeouts of the
client are shortened; nothing else of it is changed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from proxy import S3Proxy
from proxy_rules import Seen, answer, lose_reply, reset_before, slow_down, throttle
from s3_calls import (
    BIG,
    BODIES_READ,
    BODIES_WRITTEN,
    DOWNLOAD_FAULTS,
    FAULTS,
    OLD,
    READS,
    REQUEST_FAULTS,
    SMALL,
    STEPS,
    TRIES,
    UPLOAD_FAULTS,
    WRITES,
    body,
    names,
    prepare,
    size,
    sizes,
    watch,
)

from dagster_resilient.errors import ObjectExistsError, StoreUnavailableError, VersionConflictError
from dagster_resilient.storage import retry
from dagster_resilient.storage.object_store import ObjectStore
from dagster_resilient.testing import FakeClock

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("quick")]

Opened = Callable[..., Any]

# ---- faults that pass


READ_CASES = [*itertools.product(["latency", *REQUEST_FAULTS], READS), *itertools.product(DOWNLOAD_FAULTS, BODIES_READ)]
WRITE_CASES = [*itertools.product(REQUEST_FAULTS, WRITES), *itertools.product(UPLOAD_FAULTS, BODIES_WRITTEN)]


@pytest.mark.parametrize(("fault", "read"), READ_CASES)
@pytest.mark.usefixtures("impatient")
def test_a_read_is_exact(s3_proxy: S3Proxy, through: Opened, given: ObjectStore, fault: str, read: str) -> None:
    """However many tries it takes, the caller gets all bytes, or all names, and those that are stored."""
    tries = TRIES.get(fault, 3)
    s3_proxy.plan(FAULTS[fault](n=tries))
    assert READS[read](through(given.url)) == READS[read](given)
    assert sum(seen.fault is not None for seen in s3_proxy.seen) >= tries


@pytest.mark.parametrize(("fault", "write"), [*itertools.product(["latency"], WRITES), *WRITE_CASES])
@pytest.mark.usefixtures("impatient")
def test_a_write_is_there_once_and_whole(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, fault: str, write: str
) -> None:
    """It succeeds, the result is one exact object, and at no time anything but the old or the new one was visible."""
    before, after, call = WRITES[write]
    prepare(judge, before)
    tries = TRIES.get(fault, 3)
    s3_proxy.plan(FAULTS[fault](n=tries))
    visible = watch(s3_proxy, size, judge)
    call(faulty)
    assert body(judge) == after
    assert names(judge) == ([] if after is None else ["a"])
    assert set(visible) <= sizes(before, after)
    assert sum(seen.fault is not None for seen in s3_proxy.seen) >= tries


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", ["internal_error", "reset_before", "lose_reply", "never_answer"])
@pytest.mark.usefixtures("impatient")
def test_each_step_of_an_upload_in_parts_may_fail(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, fault: str, step: str
) -> None:
    """Whichever step is lost, before or after the server did it, the object is whole in the end, and never in part."""
    judge.put("a", OLD)
    s3_proxy.plan(FAULTS[fault](n=TRIES.get(fault, 3), **STEPS[step]))
    visible = watch(s3_proxy, size, judge)
    faulty.put("a", BIG)
    assert body(judge) == BIG
    assert set(visible) <= sizes(OLD, BIG)


def test_a_part_that_fails_does_not_repeat_the_others(s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any) -> None:
    """Else a large object, of many parts, never arrives while a server refuses one request in five."""
    s3_proxy.plan(slow_down(3, **STEPS["part"]))
    faulty.put("a", BIG)
    assert body(judge) == BIG
    assert s3_proxy.count("PUT", "partNumber=1") == 1


def test_an_error_inside_a_success_is_an_error(s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any) -> None:
    """S3 may answer the last step of an upload with 200 and an error in the body: the upload is not done."""
    s3_proxy.plan(answer(200, "InternalError", 3, **STEPS["complete"]))
    faulty.put("a", BIG)
    assert s3_proxy.count(**STEPS["complete"]) == 4
    assert body(judge) == BIG


@pytest.mark.usefixtures("impatient")
def test_a_slow_download_is_no_failure(s3_proxy: S3Proxy, through: Opened, given: ObjectStore) -> None:
    """Where bytes keep coming, a body may take longer than the time after which a silent server is given up."""
    s3_proxy.plan(throttle(8_000_000, method="GET"))
    assert through(given.url).get("big") == BIG
    assert s3_proxy.count() == 1


@pytest.mark.usefixtures("impatient")
def test_a_slow_upload_is_no_failure(s3_proxy: S3Proxy, judge: ObjectStore, through: Opened) -> None:
    """Where bytes keep going, a request may take longer than the time after which a silent server is given up."""
    s3_proxy.plan(throttle(5_000_000, method="PUT"))
    through(judge.url, patience=0.0).put("a", BIG[:4_000_000])
    assert body(judge) == BIG[:4_000_000]


# ---- create


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_create_that_lost_its_own_reply_has_succeeded(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, lost: int
) -> None:
    """The server refuses the second try because of the first one: that is success, not a conflict."""
    s3_proxy.plan(lose_reply(lost, method="PUT"))
    faulty.create("a", SMALL)
    assert body(judge) == SMALL
    assert [seen.status for seen in s3_proxy.seen if seen.method == "PUT"] == [200, *[412] * lost]


@pytest.mark.parametrize("fault", ["lose_reply", "reset_before", "internal_error", "cut_upload"])
def test_a_create_is_refused_where_another_one_was_first(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, fault: str
) -> None:
    """Also after lost messages only an object with our own bytes counts as ours, and the other one stays."""
    judge.put("a", OLD)
    s3_proxy.plan(FAULTS[fault](n=3, method="PUT"))
    with pytest.raises(ObjectExistsError, match=f"{judge.url}/a"):
        faulty.create("a", SMALL)
    assert body(judge) == OLD


def test_a_create_is_refused_where_another_one_came_between_its_tries(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any
) -> None:
    """The first try never arrived, somebody else created, and the second try says so."""

    def other(seen: Seen) -> None:
        if seen.fault is not None:
            judge.create("a", OLD)

    s3_proxy.plan(reset_before(1))
    s3_proxy.on_request = other
    with pytest.raises(ObjectExistsError):
        faulty.create("a", SMALL)
    assert body(judge) == OLD


def test_a_create_is_repeated_while_nobody_has_won(s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any) -> None:
    """409 means that another conditional write of the key is under way. If that one fails, the key is free."""
    s3_proxy.plan(answer(409, "ConditionalRequestConflict", 2, method="PUT"))
    faulty.create("a", SMALL)
    assert body(judge) == SMALL


# ---- replace


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_replace_that_lost_its_own_reply_has_succeeded(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, lost: int
) -> None:
    """Its second try meets the version that the first one made: that is success, and the version is returned."""
    judge.put("a", OLD)
    s3_proxy.plan(lose_reply(lost, method="PUT"))
    version = faulty.replace("a", SMALL, judge.head("a").version)
    assert body(judge) == SMALL
    assert version == judge.head("a").version


@pytest.mark.parametrize("fault", ["lose_reply", "reset_before", "internal_error", "cut_upload"])
def test_a_replace_is_refused_where_another_one_was_first(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, fault: str
) -> None:
    """Also after lost messages; what the other one wrote stays."""
    judge.put("a", SMALL)
    version = judge.head("a").version
    judge.put("a", OLD)
    s3_proxy.plan(FAULTS[fault](n=3, method="PUT"))
    with pytest.raises(VersionConflictError, match=f"{judge.url}/a"):
        faulty.replace("a", SMALL, version)
    assert body(judge) == OLD


# ---- faults that stay


@pytest.mark.parametrize("read", ["get", "get_ranges", "list"])
@pytest.mark.parametrize("fault", [*REQUEST_FAULTS, *DOWNLOAD_FAULTS])
@pytest.mark.usefixtures("impatient")
def test_a_read_that_always_fails_is_given_up(
    s3_proxy: S3Proxy, through: Opened, given: ObjectStore, fault: str, read: str
) -> None:
    """The patience ends, with an error that names the store; less than everything is never returned."""
    s3_proxy.plan(FAULTS[fault](n=None))
    with pytest.raises(StoreUnavailableError, match=given.url):
        READS[read](through(given.url, patience=0.1))
    assert 0 < s3_proxy.count() < 40


@pytest.mark.parametrize(("fault", "write"), WRITE_CASES)
@pytest.mark.usefixtures("impatient")
def test_a_write_that_always_fails_is_given_up(
    s3_proxy: S3Proxy, judge: ObjectStore, through: Opened, fault: str, write: str
) -> None:
    """The patience ends, with an error that names the store. What is stored is the old or the new object, whole."""
    before, after, call = WRITES[write]
    prepare(judge, before)
    s3_proxy.plan(FAULTS[fault](n=None))
    visible = watch(s3_proxy, size, judge)
    with pytest.raises(StoreUnavailableError, match=judge.url):
        call(through(judge.url, patience=0.1))
    assert body(judge) in {before, after}
    assert set(visible) <= sizes(before, after)
    assert 0 < s3_proxy.count() < 60
    s3_proxy.plan()
    call(through(judge.url))
    assert body(judge) == after


def test_retries_are_finite_and_spaced(
    s3_proxy: S3Proxy, through: Opened, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is busy for ever is asked some ten times a minute, not as often as it can say no."""
    clock = FakeClock()
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.1)
    store = through(s3_url, patience=60.0)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "monotonic", clock)
    s3_proxy.plan(slow_down(None))
    with pytest.raises(StoreUnavailableError, match="SlowDown"):
        store.get("a")
    assert clock() <= 60.0
    assert max(clock.slept) > 1.0
    assert 10 < s3_proxy.count() < 120
