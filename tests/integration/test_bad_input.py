"""What a user sees who gets the store wrong: at once, one error of the right kind that names the thing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import servers

from dagster_resilient.errors import (
    CircuitOpenError,
    ConfigurationError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage import obstore_store
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.storage.retry import DEFAULT_PATIENCE, RetryingStore

# Patience is a minute: a test that is done within less has not retried what is final.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(DEFAULT_PATIENCE / 2)]


@pytest.fixture(autouse=True)
def no_credentials_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only what a test gives counts."""
    for name in [name for name in os.environ if name.startswith("AWS_") and name != "AWS_CA_BUNDLE"]:
        monkeypatch.delenv(name)
    return


def calls_of(store: ObjectStore) -> dict[str, Callable[[], Any]]:
    """Every operation of a store, by name."""
    return {
        "get": lambda: store.get("a"),
        "get_ranges": lambda: store.get_ranges("a", [(0, 1)]),
        "put": lambda: store.put("a", b"1"),
        "put large": lambda: store.put("a", [b"x" * 6_000_000]),
        "create": lambda: store.create("a", b"1"),
        "head": lambda: store.head("a"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete(["a"]),
    }


def expect(store: ObjectStore, kind: type[Exception], *words: str, but: tuple[str, ...] = ()) -> None:
    """Every operation, except those named, raises exactly this error, with the words in its message."""
    for name, call in calls_of(store).items():
        if name not in but:
            with pytest.raises(StorageError) as caught:
                call()
            # A store that has not answered for a while is not asked any more, which says the same.
            answered = {kind, CircuitOpenError} if kind is StoreUnavailableError else {kind}
            assert type(caught.value) in answered, f"{name}: {caught.value!r}"
            assert [word for word in (store.url, *words) if word not in str(caught.value)] == []


# ---- URLs and options


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", ["empty"]),
        ("  ", ["empty"]),
        ("gopher://host/x", ["'gopher'", "not known"]),
        ("s3+http://bucket/x", ["'s3+http'"]),
        ("http://bucket.s3.amazonaws.com/x", ["fsspec's http"]),
        ("s3://", ["no bucket", "s3://BUCKET/PREFIX"]),
        ("s3:///prefix", ["no bucket"]),
        ("s3:/bucket/prefix", ["bucket"]),
        ("s3://buc ket/prefix", ["no bucket"]),
        ("s3://bucket/../other", ["../other"]),
        ("file://data/x", ["file:///data/x"]),
        ("file:data", ["file"]),
    ],
)
def test_a_url_that_cannot_work_is_refused_before_anything_is_written(
    url: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message shows what is wrong and how it is written; no folder with a strange name appears."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert [word for word in words if word not in str(caught.value)] == []
    assert list(tmp_path.iterdir()) == []


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    """They would end up in logs and run configurations."""
    with pytest.raises(ConfigurationError, match="options") as caught:
        open_store("s3://AKIDEXAMPLE:hunter2@bucket/prefix")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"keyy": "k", "secret": "s"}, "keyy"),
        ({"aws_access_key_id": "k"}, "aws_access_key_id"),
        ({"endpoint": "http://x"}, "endpoint "),
        ({"client_kwargs": {"region": "eu-west-1"}}, "region "),
    ],
)
def test_a_misspelt_option_is_refused_and_named(options: dict[str, Any], word: str) -> None:
    """It must not fall back to credentials or an endpoint from elsewhere; the message lists what is known."""
    with pytest.raises(ConfigurationError, match=r"known are key, secret, token, endpoint_url") as caught:
        open_store("s3://bucket/prefix", options)
    assert word in str(caught.value)


# ---- S3


@pytest.mark.s3
def test_no_such_bucket(s3_options: dict[str, Any]) -> None:
    """It is named as such. HEAD alone cannot tell: its answer carries no reason."""
    store = open_store("s3://missing-bucket/prefix", s3_options)
    expect(store, StorageError, "no such bucket", "missing-bucket", but=("head",))
    with pytest.raises(ObjectNotFoundError):
        store.head("a")


@pytest.mark.s3
@pytest.mark.parametrize(
    ("wrong", "code"),
    [({"secret": "wrong"}, "SignatureDoesNotMatch"), ({"key": "nobody"}, "InvalidAccessKeyId")],
)
def test_wrong_credentials(s3_url: str, s3_options: dict[str, Any], wrong: dict[str, str], code: str) -> None:
    """Permission denied, with the server's code where it gives one: never "not found", never retried, nothing shown."""
    store = open_store(s3_url, {**s3_options, **wrong})
    expect(store, StoragePermissionError, "permission denied", "credentials")
    with pytest.raises(StoragePermissionError, match=code) as caught:
        store.get("a")
    assert s3_options["secret"] not in str(caught.value)


@pytest.mark.s3
def test_no_credentials_at_all(s3_url: str, s3_options: dict[str, Any]) -> None:
    """Anonymous access to a closed bucket is refused."""
    store = open_store(s3_url, {"endpoint_url": s3_options["endpoint_url"], "anon": True})
    expect(store, StoragePermissionError, "permission denied")


def test_an_endpoint_that_refuses_connections() -> None:
    """After the patience, and not before: unavailable, with the address that was tried."""
    endpoint = f"http://127.0.0.1:{servers.free_ports(1)}"
    store = open_store("s3://bucket/prefix", {"key": "k", "secret": "s", "endpoint_url": endpoint})
    assert isinstance(store, RetryingStore)
    expect(store.with_patience(0.2), StoreUnavailableError, endpoint)


def test_an_endpoint_that_does_not_exist() -> None:
    """A host name that cannot be resolved is shown."""
    store = open_store("s3://bucket/x", {"key": "k", "secret": "s", "endpoint_url": "http://no-such-host.invalid"})
    assert isinstance(store, RetryingStore)
    with pytest.raises(StoreUnavailableError, match=r"no-such-host\.invalid"):
        store.with_patience(0.5).get("a")


@pytest.mark.s3
@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(
    s3_server: servers.SeaweedServer, s3_url: str, s3_options: dict[str, Any]
) -> None:
    """What was acknowledged is there again, and a write that was begun during the outage succeeds by waiting."""
    store = open_store(s3_url, s3_options)
    assert isinstance(store, RetryingStore)
    store.put("before", b"1")
    begun = threading.Event()

    def write() -> None:
        begun.set()
        store.create("during", b"2")

    with s3_server.outage():
        with pytest.raises(StoreUnavailableError, match=s3_url):
            store.with_patience(0.2).get("before")
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        begun.wait(timeout=10)
    writer.join(timeout=25)
    assert [info.key for info in store.list("")] == ["before", "during"]


@pytest.mark.s3
@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers(
    s3_server: servers.SeaweedServer, s3_url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence ends by a timeout: unavailable. When the server goes on, so does the store."""
    monkeypatch.setitem(obstore_store._CLIENT, "read_timeout", timedelta(seconds=1))
    store = open_store(s3_url, s3_options)
    assert isinstance(store, RetryingStore)
    store.put("a", b"1")
    with s3_server.frozen(), pytest.raises(StoreUnavailableError, match=s3_url):
        store.with_patience(0.5).get("a")
    assert store.get("a") == b"1"


# ---- directories


def test_a_path_below_a_file(tmp_path: Path) -> None:
    """A store cannot be there; the file is named, and stays as it is."""
    (tmp_path / "file").write_text("mine")
    expect(open_store(tmp_path / "file" / "store"), StorageError, "Not a directory", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_that_cannot_be_made() -> None:
    """Nobody makes folders in /proc, root included: every write says so. Until then it is merely not there."""
    reads = ("get", "get_ranges", "head", "list", "delete")
    expect(open_store("/proc/store"), StorageError, "No such file or directory", but=reads)


AS_NOBODY = """
import os
from dagster_resilient.errors import StorageError
from dagster_resilient.storage.object_store import open_store
stores = [open_store(path) for path in given]
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
calls = [lambda s: s.get("a"), lambda s: s.put("b", b"1"), lambda s: s.create("b", b"1"), lambda s: list(s.list("p/"))]
for store in stores:
    for call in calls:
        try:
            call(store)
            print("no error")
        except StorageError as error:
            print(type(error).__name__, error)
"""


def test_a_directory_without_rights(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """Who may not write or look into it is told so: what cannot be read is not "not there"."""
    os.chmod(tmp_path.parent, 0o755)  # noqa: PTH101
    os.chmod(tmp_path.parent.parent, 0o755)  # noqa: PTH101
    tmp_path.chmod(0o755)
    readable, closed = tmp_path / "readable", tmp_path / "closed"
    for folder in (readable, closed):
        open_store(folder).put("a", b"1")
        (folder / "p").mkdir()
    readable.chmod(0o555)
    closed.chmod(0o000)
    try:
        lines = run_python(AS_NOBODY, [str(readable), str(closed), str(readable / "new")]).splitlines()
    finally:
        closed.chmod(0o755)
        readable.chmod(0o755)
    refused = "StoragePermissionError"
    # What can be looked into and is not there is "not there": the last place has never been written to.
    expected = [*["no", refused, refused, "no"], *[refused] * 4, *["ObjectNotFoundError", refused, refused, "no"]]
    assert [line.split()[0] for line in lines] == expected
    assert all("Permission denied" in line and str(tmp_path) in line for line in lines if line.startswith(refused))
