"""Credentials that end while a store is in use, and secrets that are shown nowhere."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ConnectTimeoutError
from scripted_server import Reply, Request, ScriptedServer, error, scripted

from dagster_resilient.errors import ConfigurationError, StoragePermissionError, StoreUnavailableError
from dagster_resilient.storage import credentials
from dagster_resilient.storage.credentials import boto3_credentials
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.storage.obstore_options import s3_settings

CANARY = "CANARY-secret-0123456789"
OLD, NEW = "OLDKEY", "NEWKEY"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def only_new(request: Request) -> Reply:
    """A server whose old key has expired. A HEAD is answered without a reason, as S3 does."""
    if f"Credential={NEW}/" in request.headers["authorization"]:
        body = (
            b"<DeleteResult><Deleted><Key>root/a</Key></Deleted></DeleteResult>"
            if request.path.endswith("?delete")
            else b""
        )
        return Reply(200, body, {"ETag": '"1"', "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT"})
    return Reply(400) if request.method == "HEAD" else error(400, "ExpiredToken", f"<Token-0>{CANARY}</Token-0>")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server that takes the new key alone."""
    with scripted(only_new) as running:
        yield running


def opened(server: ScriptedServer, **options: Any) -> ObjectStore:
    """A store on a scripted server."""
    return open_store("s3://bucket/root", {"endpoint_url": server.endpoint, **options})


def raising(failure: Exception, asked: list[int] | None = None) -> Callable[[], dict[str, Any]]:
    """A function for credentials that fails, and notes each time that it was asked."""

    def fail() -> dict[str, Any]:
        if asked is not None:
            asked.append(1)
        raise failure

    return fail


CALLS: dict[str, Callable[[ObjectStore], Any]] = {
    "get": lambda store: store.get("a"),
    "get_ranges": lambda store: store.get_ranges("a", [(0, 1)]),
    "get_into": lambda store: store.get_into("a", bytearray(1)),
    "put": lambda store: store.put("a", b"1"),
    "put of parts": lambda store: store.put("a", bytes(9_000_000)),
    "create": lambda store: store.create("a", b"1"),
    "replace": lambda store: store.replace("a", b"1", '"0"'),
    "head": lambda store: store.head("a"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete(["a"]),
    "leftovers": lambda store: list(store.leftovers()),
}


@pytest.mark.parametrize("call", ["put", "create", "replace", "head", "delete", "get"])
def test_new_keys_in_the_environment_are_taken_up(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Keys that expire are read again from the environment, and the call that met it succeeds by itself."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", NEW)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    store = opened(server)
    store.put("before", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OLD)
    store._inner.credentials.renew({})  # type: ignore[attr-defined]
    store._inner.reopen()  # type: ignore[attr-defined]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", NEW)
    server.requests.clear()
    CALLS[call](store)
    used = [f"Credential={NEW}/" in request.headers["authorization"] for request in server.requests]
    assert not used[0]
    assert used[-1]


def test_the_answer_says_that_credentials_have_expired(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no newer ones: which ones they are, and what to do. It is asked for once."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OLD)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    with pytest.raises(
        StoragePermissionError, match=r"environment \(AWS_ACCESS_KEY_ID.*expired.*credentials takes a f"
    ):
        opened(server).get("a")
    assert len(server.requests) == 1
    with pytest.raises(StoragePermissionError, match="storage options have expired"):
        opened(server, key=OLD, secret=CANARY).get("a")


def test_a_function_is_asked_again_when_its_keys_are_refused(server: ScriptedServer) -> None:
    """One function serves for the life of the process; keys that last are not asked for at each request."""
    keys = iter([OLD, NEW])
    asked: list[str] = []

    def ask() -> dict[str, Any]:
        asked.append(next(keys, NEW))
        return {"access_key_id": asked[-1], "secret_access_key": CANARY, "token": "token", "expires_at": None}

    store = opened(server, credentials=ask)
    for _ in range(5):
        store.put("a", b"1")
    assert asked == [OLD, NEW]
    assert server.requests[-1].headers["x-amz-security-token"] == "token"


def test_keys_that_end_soon_are_asked_for_again() -> None:
    """What ends within five minutes counts as ended; what lasts longer is kept."""
    ends = iter([timedelta(minutes=1), timedelta(hours=1), timedelta(hours=1)])
    source = credentials.from_function(
        lambda: {"access_key_id": "k", "secret_access_key": "s", "expires_at": datetime.now(UTC) + next(ends)}
    )
    assert source.current() is not source.current()
    assert source.current() is source.current()


def test_a_function_that_fails_is_an_outage_that_names_it(server: ScriptedServer) -> None:
    """It asks a service, which may come back: it is tried again, and at last the kind of the error is told."""
    for failure in (RuntimeError(CANARY), OSError(CANARY), ConnectTimeoutError(endpoint_url=CANARY)):
        store = opened(server, credentials=raising(failure)).with_patience(0.0)  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailableError, match=f"credentials raised {type(failure).__name__};") as caught:
            store.get("a")
        assert caught.value.__cause__ is failure


@pytest.mark.parametrize(
    "slip",
    [TypeError, NameError, AttributeError, KeyError, IndexError, ZeroDivisionError, AssertionError, ImportError],
)
def test_a_function_with_a_slip_is_refused_at_once(server: ScriptedServer, slip: type[Exception]) -> None:
    """No service raises that: it is not asked again, though the patience is long."""
    asked: list[int] = []
    store = opened(server, credentials=raising(slip(CANARY), asked)).with_patience(600.0)  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=rf"raised {slip.__name__};.*Correct the function") as caught:
        store.get("a")
    assert isinstance(caught.value.__cause__, slip)
    assert len(asked) == 1
    assert CANARY not in str(caught.value)


def test_the_text_of_a_failure_of_a_function_is_repeated_nowhere(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It may hold what the function asks with. Not in the message, nor in the breaker's warning and its refusal."""
    caplog.set_level(logging.DEBUG, "dagster_resilient")
    failure = OSError(f"https://vault/?token={CANARY}")
    store = opened(server, credentials=raising(failure)).with_patience(0.0)  # type: ignore[attr-defined]
    shown = []
    for _ in range(8):
        with pytest.raises(StoreUnavailableError) as caught:
            store.get("a")
        shown.append(f"{caught.value!r} {caught.value} {caught.value.args}")
    assert "did not answer" in caplog.text
    assert CANARY not in "".join(shown) + caplog.text


@pytest.mark.parametrize("function", ["no function", lambda: None, lambda: {"access_key_id": "k"}])
def test_what_is_no_function_for_credentials_is_refused(server: ScriptedServer, function: Any) -> None:
    """The message says what it must return."""
    with pytest.raises(ConfigurationError, match="credentials must"):
        opened(server, credentials=function).get("a")


def test_a_session_of_boto3_lends_its_credentials(server: ScriptedServer) -> None:
    """They are frozen for each request, with an end before boto3 would renew them; none at all is an error."""
    frozen = SimpleNamespace(access_key=NEW, secret_key=CANARY, token=None)
    session = SimpleNamespace(get_credentials=lambda: SimpleNamespace(get_frozen_credentials=lambda: frozen))
    opened(server, credentials=boto3_credentials(session)).put("a", b"1")
    assert boto3_credentials(session)()["expires_at"] - datetime.now(UTC) < timedelta(minutes=11)
    with pytest.raises(ConfigurationError, match="no credentials"):
        boto3_credentials(SimpleNamespace(get_credentials=lambda: None))()


def test_a_profile_is_read_by_boto3(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option or in the environment; one that is not there is refused by name."""
    (tmp_path / "credentials").write_text(f"[mine]\naws_access_key_id = {NEW}\naws_secret_access_key = {CANARY}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    opened(server, profile="mine").put("a", b"1")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    opened(server).put("a", b"1")
    with pytest.raises(ConfigurationError, match="profile 'other'"):
        opened(server, profile="other")


def test_a_profile_without_boto3_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """An absent package is no absent profile."""
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(ConfigurationError, match=r"dagster-resilient\[aws\]"):
        s3_settings("bucket", {"profile": "mine"})


def test_a_token_in_the_environment_does_not_mix_with_given_keys(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of one account with the token of another would be refused as invalid."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OLD)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-account")
    opened(server, key=NEW, secret=CANARY).put("a", b"1")
    assert "x-amz-security-token" not in server.requests[-1].headers


# ---- nothing shows a secret


def everything_shown(failure: BaseException) -> str:
    """All that a log, a report or a debugger's first look would show of an error."""
    chain: list[BaseException] = [failure]
    while (last := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(last)
    return "".join(traceback.format_exception(failure)) + "".join(f"{one!r}{one}{one.args}" for one in chain)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", ["InvalidToken", "AccessDenied", "InternalError", "NoSuchUpload"])
def test_no_error_repeats_a_secret_that_the_server_repeats(
    call: str, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S3 puts an invalid token into its answer: neither the error nor what it came from, nor a log, shows it."""
    caplog.set_level(logging.DEBUG, "dagster_resilient")
    status = 500 if code == "InternalError" else 403
    with scripted(lambda _: error(status, code, f"<Token-0>{CANARY}</Token-0>")) as server:
        store = opened(server, key="key", secret=CANARY + "-key", token=CANARY).with_patience(0.0)  # type: ignore[attr-defined]
        with pytest.raises(OSError, match=r"bucket/root") as caught:
            CALLS[call](store)
    assert CANARY not in everything_shown(caught.value) + caplog.text + repr(store) + store.url
    assert CANARY not in repr(store._inner._settings) + repr(store._inner.credentials)


def in_fork(work: Callable[[], Any]) -> Any:
    """Run work in a forked child and return its result."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            with os.fdopen(write, "w") as pipe:
                json.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(result)


def arguments_of_children() -> list[str]:
    """The command lines of this process's children."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    children = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]


def test_new_keys_are_taken_up_in_a_forked_process(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its helper is replaced by one with the new keys; there is only ever one."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", NEW)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    store = opened(server)
    store.put("a", b"1")

    def child() -> Any:
        os.environ["AWS_ACCESS_KEY_ID"] = OLD
        store._inner.credentials.renew({})  # type: ignore[attr-defined]
        os.environ["AWS_ACCESS_KEY_ID"] = NEW
        store.put("b", b"1")
        version = store.replace("b", b"2", store.head("b").version or "")
        return [version, len(arguments_of_children())]

    assert in_fork(child) == ['"1"', 1]
    assert [OLD in request.headers["authorization"] for request in server.requests] == [False, True, *[False] * 3]


def test_no_error_repeats_a_secret_in_a_forked_process(server: ScriptedServer) -> None:
    """The helper of a forked process answers with the same errors, and its command line holds no key."""
    store = opened(server, key=OLD, secret=CANARY + "-key", token=CANARY)
    with pytest.raises(StoragePermissionError):
        store.get("a")

    def child() -> Any:
        try:
            store.get("a")
        except StoragePermissionError as failure:
            return [everything_shown(failure), "\n".join(arguments_of_children())]

    shown, arguments = in_fork(child)
    assert "have expired" in shown
    assert CANARY not in shown
    assert "serve(" in arguments
    assert CANARY not in arguments


def test_options_that_are_refused_show_no_value() -> None:
    """A misspelt option is named; what it holds may be the secret itself."""
    for options in ({"secrt": CANARY}, {"key": "k", "secret": CANARY, "anon": True}, {"secret": CANARY}):
        with pytest.raises(ConfigurationError) as caught:
            open_store("s3://bucket", options)
        assert CANARY not in everything_shown(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        open_store("s3://bucket", {"endpoint_url": f"http://user:{CANARY}@host"})
    assert CANARY not in everything_shown(caught.value)
