"""The sidecar's view of buckets: every kind of service, its trust and its keys, and what is told of a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from scripted_server import Reply, Request, ScriptedServer, error, scripted
from sidecar_doubles import Clock, Objects

from dagster_resilient.state import _sidecar_store
from dagster_resilient.state._sidecar_store import Bucket, Patience, open_store, refused, secrets_of, without
from dagster_resilient.state._sidecar_work import Caller, Shared
from dagster_resilient.storage import credentials, object_store, obstore_store

CANARY = "CANARY-secret-0123456789"
CANARY_KEY = "Q0FOQVJZLXNlY3JldC0wMTIzNDU2Nzg5"  # Azure's keys are base64
# Google's emulators take one that asks no service for a token.
ACCOUNT = {
    "type": "service_account",
    "private_key": "",
    "private_key_id": "",
    "client_email": "",
    "disable_oauth": True,
}
CLOUDS: dict[str, tuple[str, dict[str, Any]]] = {
    "s3": ("s3://bucket/root", {"key": "KEY", "secret": CANARY, "endpoint_url": ""}),
    "gcs": ("gs://bucket/root", {"token": ACCOUNT, "endpoint_url": ""}),
    "azure": ("az://bucket/root", {"account_name": "acct", "account_key": CANARY_KEY, "account_host": ""}),
}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)


def told(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the parent tells its sidecar of a store."""
    return dict(object_store.open_store(url, options).sidecar_config())


def whole(_: Request) -> Reply:
    """Any object is there."""
    return Reply(200, b"beat", {"ETag": '"1"', "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT"})


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server that takes all."""
    with scripted(whole) as running:
        yield running


@pytest.mark.parametrize("kind", CLOUDS)
def test_every_kind_of_bucket_is_written_and_read_over_plain_http(server: ScriptedServer, kind: str) -> None:
    """What the parent tells of a store on any service opens it, with the key below its prefix."""
    url, options = CLOUDS[kind]
    options = {name: value or server.endpoint for name, value in options.items()}
    store = open_store(told(url, options))
    store.put("live/a.json", b"beat", 5.0)
    assert store.get("live/a.json", 5.0) == b"beat"
    assert [request.method for request in server.requests] == ["PUT", "GET"]
    assert all("root/live/a.json" in unquote(request.path) for request in server.requests)


def test_trust_is_passed_on_and_timeouts_are_the_sidecars_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate of a company's own counts here too; a read timeout of minutes would hold up a beat."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("obstore.store.S3Store", lambda bucket, **options: seen.append(options["client_options"]))
    options = {"key": "k", "secret": "s", "client_kwargs": {"verify": False}, "config_kwargs": {"read_timeout": 600}}
    config = told("s3://bucket/root", {**options, "endpoint_url": "https://localhost:1"})
    Bucket(config)._client(5.0)
    Bucket({**config, "client": {"root_certificate": "PEM"}})._client(5.0)
    limits = {"timeout": "5000ms", "connect_timeout": "5000ms", "allow_http": False}
    assert seen == [{"allow_invalid_certificates": True, **limits}, {"root_certificate": "PEM", **limits}]


@pytest.mark.parametrize("name", ["AWS_SESSION_TOKEN", "AWS_TOKEN"])
def test_a_token_in_the_environment_does_not_mix_with_given_keys(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Keys of one account with the token of another would be refused as invalid."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OTHER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    monkeypatch.setenv(name, "of-another-account")
    config = told("s3://bucket/root", {"key": "KEY", "secret": CANARY, "endpoint_url": server.endpoint})
    open_store(config).put("a", b"1", 5.0)
    assert "Credential=KEY/" in server.requests[-1].headers["authorization"]
    assert "x-amz-security-token" not in server.requests[-1].headers


def test_the_environment_stays_where_no_keys_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role is obstore's to ask for, and what names it stands there."""
    config = {"kind": "s3", "bucket": "b", "root": "", "config": {"region": "us-east-1"}}
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    Bucket(config)
    assert os.environ["AWS_SESSION_TOKEN"] == "token"


@pytest.mark.parametrize(
    ("status", "code", "is_refusal"),
    [(400, "ExpiredToken", True), (403, "AccessDenied", True), (503, "SlowDown", False), (400, "BadDigest", False)],
)
def test_a_refusal_is_told_each_time_and_anything_else_once(status: int, code: str, is_refusal: bool) -> None:
    """The parent may have newer credentials only later. No line shows a key or token, though the server repeats it."""
    lines: list[dict[str, Any]] = []
    more = f"<Token-0>{CANARY}</Token-0>"
    with scripted(lambda _: error(status, code, more)) as server:
        options = {"key": "KEY", "secret": "s" * 20, "token": CANARY, "endpoint_url": server.endpoint}
        shared = Shared(told("s3://bucket/root", options))
        caller = Caller(shared, Patience(5.0, 22.5), lines.append, shown=shared.shown)
        for _ in range(3):
            caller.attempt("writing", lambda store, limit: store.put("a", b"1", limit))
    assert [line["refused"] for line in lines] == ([True] * 3 if is_refusal else [False])
    assert code in lines[0]["trouble"]
    assert CANARY not in str(lines)


def test_what_is_cut_off_shows_no_half_of_a_secret() -> None:
    """A secret is hidden before the text is shortened; the older ones of a renewed store, too."""
    lines: list[dict[str, Any]] = []
    shared = Shared({"kind": "local", "path": "/nowhere", "config": {"session_token": CANARY}})
    shared.replace({"kind": "local", "path": "/nowhere", "config": {"session_token": "newer"}})
    caller = Caller(Objects, Patience(5.0, 22.5), lines.append, Clock(), shared.shown)

    def fail(*_: object) -> None:
        raise OSError("x" * 280 + CANARY + " newer")

    caller.attempt("writing", fail)
    assert "CANARY" not in lines[0]["trouble"]
    assert "x(hidden) (h" in lines[0]["trouble"]


def test_the_secrets_of_every_service_are_known() -> None:
    """Those that the store itself hides; of a signed URL also the signature alone, which an address shows."""
    config = {"account_key": "aaaa", "sas_key": "sv=1&sig=bbbb", "region": "r", "service_account_key": ""}
    assert secrets_of({"config": config}) == {"aaaa", "sv=1&sig=bbbb", "bbbb"}
    assert secrets_of(None) == secrets_of({"kind": "local", "path": "/"}) == set()
    assert without({"bbbb", "sv=1&sig=bbbb"}, "/?sv=1&sig=bbbb") == "/?(hidden)"
    hidden = set(obstore_store._SECRETS) | set(credentials.CONFIG_KEYS) - {"access_key_id"}
    assert set(_sidecar_store._SECRETS) == hidden


def test_a_store_that_is_not_known_yet_is_asked_for() -> None:
    """The parent had no credentials when it started the sidecar: the failure asks for them, and they are taken up."""
    shared = Shared(None)
    with pytest.raises(ValueError, match="not known yet") as caught:
        shared()
    assert refused(caught.value)
    shared.replace({"kind": "local", "path": "/nowhere"})
    first = shared()
    assert shared() is first
    shared.replace({"kind": "local", "path": "/elsewhere"})
    assert shared() is not first
