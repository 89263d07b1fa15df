"""What S3 refuses, and bytes that change on the way: the right error, once, or the exact object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from proxy import S3Proxy
from proxy_rules import answer, expired_token, flip_byte
from s3_calls import BIG, BLOCKS, BODIES_WRITTEN, CALLS, SMALL, STEPS, WRITES, body, names, prepare, watch

from dagster_resilient.errors import (
    IntegrityError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
)
from dagster_resilient.storage.manifest import get_object, put_object
from dagster_resilient.storage.object_store import ObjectStore

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("quick")]

Opened = Callable[..., Any]


# ---- refusals


@pytest.mark.parametrize("call", CALLS)
def test_a_refusal_is_asked_for_once(s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, call: str) -> None:
    """403 does not change by asking again: one request, the fitting error, and nothing is written."""
    s3_proxy.plan(answer(403, "AccessDenied", None))
    with pytest.raises(StoragePermissionError, match=judge.url):
        CALLS[call](faulty)
    assert s3_proxy.count() <= (BLOCKS if call == "get_ranges" else 1)
    assert names(judge) == []


@pytest.mark.parametrize("call", ["get", "get of 12 MB", "get_ranges", "head"])
def test_what_is_not_there_is_asked_for_once(s3_proxy: S3Proxy, faulty: Any, call: str) -> None:
    """404 does not change by asking again, and it is never the answer to a refusal."""
    with pytest.raises(ObjectNotFoundError):
        CALLS[call](faulty)
    assert s3_proxy.count() <= (BLOCKS if call == "get_ranges" else 1)


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_secret_is_refused_by_the_server(
    s3_proxy: S3Proxy, judge: ObjectStore, through: Opened, call: str
) -> None:
    """The proxy leaves signatures as they are, so the server judges them: one request, and no secret in the message."""
    with pytest.raises(StoragePermissionError) as caught:
        CALLS[call](through(judge.url, secret="not-the-secret"))
    assert {seen.status for seen in s3_proxy.seen} == {403}
    assert s3_proxy.count() <= (BLOCKS if call == "get_ranges" else 1)
    assert "not-the-secret" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("call", [name for name in CALLS if name != "head"])
def test_an_expired_token_is_named_and_nothing_is_lost(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, call: str, status: int
) -> None:
    """The error says so. What was stored stays, and when the credentials are good again the same store goes on."""
    judge.put("small", SMALL)
    s3_proxy.plan(expired_token(None, status))
    with pytest.raises(StoragePermissionError, match="ExpiredToken"):
        CALLS[call](faulty)
    assert s3_proxy.count() <= (BLOCKS if call == "get_ranges" else 1)
    s3_proxy.plan()
    faulty.put("next", SMALL)
    assert judge.get("small") == faulty.get("next") == SMALL


def test_an_expired_token_is_a_refusal_of_head_too(s3_proxy: S3Proxy, faulty: Any) -> None:
    """S3 answers HEAD with a bare 400 then: a matter of credentials, as for every other call."""
    s3_proxy.plan(expired_token(None))
    with pytest.raises(StoragePermissionError):
        faulty.head("a")


@pytest.mark.parametrize("call", ["put", "put of 12 MB", "get", "delete"])
def test_a_conflict_of_a_plain_write_passes(s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, call: str) -> None:
    """409 (OperationAborted) asks to try again. Only a create can meet an object that is in its way."""
    judge.put("small", SMALL)
    s3_proxy.plan(answer(409, "OperationAborted", 3))
    CALLS[call](faulty)
    assert s3_proxy.count() > 3


@pytest.mark.parametrize("step", ["part", "complete"])
def test_an_upload_that_is_gone_is_begun_again(s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, step: str) -> None:
    """Somebody's clean-up aborted it; on AWS also the second try of a last step whose reply was lost says so."""
    s3_proxy.plan(answer(404, "NoSuchUpload", 1, **STEPS[step]))
    faulty.put("a", BIG)
    assert body(judge) == BIG


# ---- bytes that change on the way


@pytest.mark.parametrize("write", BODIES_WRITTEN)
def test_a_body_that_changed_on_the_way_is_never_stored(
    s3_proxy: S3Proxy, judge: ObjectStore, faulty: Any, write: str
) -> None:
    """The server refuses it, and the write is repeated or is an error: what is visible is what was sent."""
    before, after, call = WRITES[write]
    prepare(judge, before)
    s3_proxy.plan(flip_byte(100))
    visible = watch(s3_proxy, body, judge)
    try:
        call(faulty)
    except StorageError:
        after = before
    assert set(visible) <= {before, WRITES[write][1]}
    assert body(judge) == after


def test_bytes_that_changed_on_the_way_back_are_never_a_value(s3_proxy: S3Proxy, faulty: Any) -> None:
    """S3 sends no checksum with a reply; the manifest's own one finds the flipped bit, and the next read is right."""
    stored = put_object(faulty, "a", SMALL)
    s3_proxy.plan(flip_byte(100, method="GET"))
    with pytest.raises(IntegrityError, match=f"{faulty.url}/a"):
        get_object(faulty, stored)
    assert get_object(faulty, stored) == SMALL
