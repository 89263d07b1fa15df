"""What a failure of obstore is in our tree, by the texts that the services answer."""

from __future__ import annotations

import obstore.exceptions as obs
import pytest
from scripted_server import Reply, Request, error, scripted

from dagster_resilient.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
    VersionConflictError,
)
from dagster_resilient.storage import obstore_errors
from dagster_resilient.storage.object_store import ObjectStore, open_store


def answered(status: int, code: str = "", method: str = "GET") -> Exception:
    """An error as obstore writes it."""
    body = f"<Error><Code>{code}</Code></Error>" if code else ""
    return obs.GenericError(
        f"Generic S3 error: Error performing {method} http://h/b/k in 1ms - Server returned non-2xx status code: "
        f"{status} Reason: {body}\n\nDebug source:\nmethod: {method},"
    )


@pytest.mark.parametrize(
    ("failure", "verb", "expected"),
    [
        (answered(500, "InternalError"), "read", StoreUnavailableError),
        (answered(503, "SlowDown"), "write", StoreUnavailableError),
        (answered(429), "read", StoreUnavailableError),
        (answered(408), "read", StoreUnavailableError),
        (answered(400, "RequestTimeout"), "write", StoreUnavailableError),
        (obs.GenericError("Generic S3 error: error sending request"), "read", StoreUnavailableError),
        (answered(400, "InvalidArgument"), "read", StorageError),
        (answered(404, "NoSuchBucket"), "read", StorageError),
        (answered(404, "ContainerNotFound"), "read", StorageError),
        (answered(400, "ExpiredToken"), "read", StoragePermissionError),
        (answered(400, method="HEAD"), "read", StoragePermissionError),
        (answered(400, method="GET"), "read", StorageError),
        (answered(400, "BadDigest"), "write", StoreUnavailableError),
        (FileNotFoundError("not found: status code: 404 <Code>NoSuchUpload</Code>"), "write", StoreUnavailableError),
        (obs.AlreadyExistsError("status code: 409 Conflict"), "write", StoreUnavailableError),
        (answered(416, "InvalidRange"), "read", StorageError),
        (answered(403, "AuthenticationFailed"), "read", StoragePermissionError),
        (answered(401), "read", StoragePermissionError),
        (FileNotFoundError("Object at location k not found"), "read", ObjectNotFoundError),
        (FileNotFoundError("Object at location k not found"), "replace", VersionConflictError),
        (obs.AlreadyExistsError("Object at location k already exists"), "create", ObjectExistsError),
        (obs.PreconditionError("Request precondition failure"), "create", ObjectExistsError),
        (obs.PreconditionError("Request precondition failure"), "replace", VersionConflictError),
        (obs.PreconditionError("Request precondition failure"), "read", StoreUnavailableError),
        (obs.AlreadyExistsError("status code: 409 Conflict"), "replace", StoreUnavailableError),
    ],
)
def test_each_answer_has_its_class(failure: Exception, verb: str, expected: type[StorageError]) -> None:
    """What asking again may change is told from what it may not; a refusal is never "not there"."""
    ours = obstore_errors.translated(failure, verb, "s3://b/root", "k", "the storage options")
    assert type(ours) is expected
    assert "s3://b/root/k" in str(ours)
    assert (ours.store, ours.key) == ("s3://b/root", "k")


def test_a_server_that_deletes_only_one_by_one_is_told_from_others() -> None:
    """The message names the option that helps."""
    ours = obstore_errors.translated(answered(400, "MissingContentMD5", "POST"), "delete", "s3://b", "k", "")
    assert "bulk_delete=False" in str(ours)


def test_secrets_leave_the_text_of_an_error() -> None:
    """All of it, the debug print too; what is too short to be one stays."""
    failure = obs.GenericError("a token=SECRETTOKEN b ab \n debug SECRETTOKEN")
    obstore_errors.scrub(failure, ["SECRETTOKEN", "ab"])
    assert str(failure) == "a token=(hidden) b ab \n debug (hidden)"


def success(body: bytes = b"") -> Reply:
    """A success."""
    return Reply(200, body, {"ETag": '"1"'})


def opened(endpoint: str, **options: object) -> ObjectStore:
    """A store on a scripted server, that is asked once."""
    store = open_store("s3://bucket/root", {"endpoint_url": endpoint, "key": "k", "secret": "s", **options})
    return store.with_patience(0.0)  # type: ignore[attr-defined,no-any-return]


def test_a_delete_that_a_server_refuses_for_one_key_is_an_error() -> None:
    """The answer to a delete of many is 200, also where some keys stay: nothing is silently left."""
    body = (
        b"<DeleteResult><Error><Key>root/a</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"
    )
    with scripted(lambda _: success(body)) as server, pytest.raises(StorageError, match="AccessDenied"):
        opened(server.endpoint).delete(["a", "b"])


def test_keys_are_deleted_one_by_one_where_that_is_asked_for() -> None:
    """Servers that want an MD5 or do not know the request for many keys are served by the option bulk_delete=False."""
    with scripted(lambda request: error(400, "MissingContentMD5") if request.method == "POST" else success()) as s:
        with pytest.raises(StorageError, match="bulk_delete=False"):
            opened(s.endpoint).delete(["a", "b"])
        s.requests.clear()
        opened(s.endpoint, bulk_delete=False).delete(["a", "b"])
        assert sorted((one.method, one.path) for one in s.requests) == [
            ("DELETE", "/bucket/root/a"),
            ("DELETE", "/bucket/root/b"),
        ]


PLAIN = {"request_checksum_calculation": "when_required"}


def test_bodies_are_signed_and_carry_a_checksum_unless_told_otherwise() -> None:
    """A server that checks either refuses what was changed on the way. Some reject the checksum: it can be left out.

    It is in a header, never in a trailer, which more servers reject.
    """
    with scripted(lambda _: success()) as server:
        for options in ({}, {"unsigned_payload": True}, {"config_kwargs": PLAIN}):
            opened(server.endpoint, **options).put("a", b"1")
        first, fast, plain = (request.headers for request in server.requests)
    digest, crc = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b", "x-amz-checksum-crc64nvme"
    assert (first["x-amz-content-sha256"], first[crc]) == (digest, fast[crc])
    assert fast["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert plain["x-amz-content-sha256"] == digest
    assert not [name for name in plain if "checksum" in name]
    assert not [name for name in first if "trailer" in name]


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_server_that_rejects_checksums_is_told_how_to_be_served(verb: str) -> None:
    """The message names the option; with it the same server takes the write."""

    def answer(request: Request) -> Reply:
        unknown = any(name.startswith("x-amz-checksum") for name in request.headers)
        return error(400, "InvalidArgument") if unknown else success()

    with scripted(answer) as server:
        with pytest.raises(StorageError, match="'request_checksum_calculation': 'when_required'"):
            getattr(opened(server.endpoint), verb)("a", b"1")
        getattr(opened(server.endpoint, config_kwargs=PLAIN), verb)("a", b"1")


def test_the_environment_does_not_weaken_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some variables are read by obstore itself; they would make `checks_bodies` untrue, or ignore conditions."""
    for name, value in {"UNSIGNED_PAYLOAD": "true", "SKIP_SIGNATURE": "true", "CONDITIONAL_PUT": "disabled"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with scripted(lambda _: success()) as server:
        opened(server.endpoint).create("a", b"1")
        headers = server.requests[0].headers
    assert headers["x-amz-content-sha256"].startswith("6b86")
    assert headers["if-none-match"] == "*"
    assert "authorization" in headers


def test_a_large_object_that_changes_while_it_is_read_is_read_again() -> None:
    """The pieces of a large range are of one version; another version is an outage, which is tried again."""

    def answer(request: Request) -> Reply:
        if "if-match" in request.headers:
            return error(412, "PreconditionFailed")
        first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        about = {"ETag": '"1"', "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT"}
        return Reply(206, bytes(last + 1 - first), {"Content-Range": f"bytes {first}-{last}/99999999", **about})

    with scripted(answer) as server, pytest.raises(StoreUnavailableError, match="another writer"):
        opened(server.endpoint).get_ranges("a", [(0, 40_000_000)])
