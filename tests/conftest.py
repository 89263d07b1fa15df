"""Stores for all tests: memory, a local directory, and a real S3 server that is started once, when first asked for."""

from __future__ import annotations

import collections
import functools
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import postgres
import pytest
import servers
import sqlalchemy as sa
from durable import make_task
from proxy import S3Proxy

from dagster_resilient.state.sql_store import SqlRecords, open_records
from dagster_resilient.state.store import ObjectRecords, RecordStore
from dagster_resilient.state.task import DurableTask
from dagster_resilient.storage.object_store import ObjectStore, open_store

Place = tuple[str, dict[str, Any]]
S3 = pytest.param("s3", marks=pytest.mark.s3)
S3FS = pytest.param("s3fs", marks=pytest.mark.s3)
POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)

SOAK = os.environ.get("RESILIENT_SOAK") == "1"
# One for the whole run: the workers inherit it, and so all of them collect the same sampled tests.
SEED = os.environ.setdefault("RESILIENT_SEED", str(random.SystemRandom().randrange(10**9)))

# No deadline: a busy machine is no failure.
hypothesis.settings.register_profile("usual", deadline=None, max_examples=1000 if SOAK else 60, print_blob=True)
hypothesis.settings.load_profile("usual")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say with what the kill sweeps, and the other samples, can be played again."""
    terminalreporter.write_line(f"RESILIENT_SEED={SEED}")


# The files that take longest, longest first: begun last, each would hold up the end while other workers stand idle.
_LONGEST = (
    "test_range_kills",
    "test_demo",
    "test_demo_faults",
    "test_kill_table",
    "test_docs",
    "test_false_positives",
    "test_training_kill",
    "test_outage",
    "test_reexecute_buttons",
    "test_recovery_apart",
    "test_executor",
    "test_reexecution",
    "test_recovery_hang",
    "test_example_project",
    "test_preemption",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: the longest files, then those with most tests."""
    sizes = collections.Counter(item.path for item in items)
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (places.get(item.path.stem, len(_LONGEST)), -sizes[item.path], item.path))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.SeaweedServer]:
    """The S3 server of this test session. A test that kills or freezes it brings it back before it ends."""
    server = servers.SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def s3_bucket(s3_server: servers.SeaweedServer) -> str:
    """The one bucket: each bucket has volumes of its own, so tests share it and use prefixes."""
    return servers.BUCKET


@pytest.fixture
def s3_url(s3_bucket: str) -> str:
    """A URL with a prefix that no other test uses."""
    return f"s3://{s3_bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_options(s3_server: servers.SeaweedServer) -> dict[str, Any]:
    """Storage options for `open_store` and fsspec."""
    return s3_server.options


@pytest.fixture
def s3_proxy(s3_server: servers.SeaweedServer) -> Iterator[S3Proxy]:
    """A proxy in front of the S3 server, without faults as yet. Only its endpoint differs in the options."""
    with S3Proxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def s3_store(s3_url: str, s3_options: dict[str, Any]) -> ObjectStore:
    """A store on the S3 server, empty."""
    return open_store(s3_url, s3_options)


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    """The URL of a directory that does not exist yet."""
    return f"file://{tmp_path}/store"


def _place(request: pytest.FixtureRequest) -> Place:
    """The S3 server starts only for tests that ask for it."""
    through_fsspec = "fsspec+" if request.param in {"s3fs", "fsspec-local", "fsspec-memory"} else ""
    if request.param in {"s3", "s3fs"}:
        return through_fsspec + request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
    if request.param in {"local", "fsspec-local"}:
        return through_fsspec + request.getfixturevalue("local_url"), {}
    return f"{through_fsspec}memory://{uuid.uuid4().hex}", {}


@pytest.fixture(params=["memory", "local", S3, "fsspec-memory", "fsspec-local", S3FS])
def place(request: pytest.FixtureRequest) -> Place:
    """URL and options of an empty store, one of each kind."""
    return _place(request)


@pytest.fixture(params=["local", S3, "fsspec-local"])
def shared_place(request: pytest.FixtureRequest) -> Place:
    """URL and options of an empty store, one of each kind that other processes can open."""
    return _place(request)


@pytest.fixture
def store(place: Place) -> ObjectStore:
    """An empty store, one of each kind."""
    return open_store(*place)


@pytest.fixture
def shared_store(shared_place: Place) -> ObjectStore:
    """An empty store, one of each kind that other processes can open."""
    return open_store(*shared_place)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.PostgresServer]:
    """The PostgreSQL of this test session. A test that kills or freezes it brings it back before it ends."""
    server = postgres.PostgresServer()
    try:
        server.create()
        yield server
    finally:
        server.remove()


@pytest.fixture
def postgres_url(postgres_server: postgres.PostgresServer) -> str:
    """A URL of that server, with a schema that no other test uses."""
    return postgres_server.schema_url()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet, in a folder that does not either."""
    return f"sqlite:///{tmp_path}/state/records.db"


@pytest.fixture(params=["memory", "local", S3, "fsspec-local", "sqlite", POSTGRES])
def records(request: pytest.FixtureRequest) -> RecordStore:
    """Empty records, on one object store and one SQL database of each kind."""
    if request.param in {"sqlite", "postgres"}:
        return open_records(request.getfixturevalue(f"{request.param}_url"))
    return ObjectRecords(open_store(*_place(request)))


@pytest.fixture
def put_raw(records: RecordStore) -> Callable[[str, str], None]:
    """Put any text under a key, as damage, or a newer version of the library, would leave it."""
    if isinstance(records, ObjectRecords):
        store = records._store
        return lambda key, body: store.put(key, body.encode())
    assert isinstance(records, SqlRecords)
    database = records._database
    insert = sa.text("INSERT INTO resilient_records (key, body, size) VALUES (:key, :body, 0)")
    return lambda key, body: database.run("put", key, lambda c: c.execute(insert, {"key": key, "body": body}) and None)


@pytest.fixture
def make(records: RecordStore) -> Callable[..., DurableTask]:
    """Make a try of a task on these records, as `durable.make_task` does; its data is never asked for."""
    return functools.partial(make_task, open_store(f"memory://{uuid.uuid4().hex}"), records=records)


@pytest.fixture(params=["sqlite", POSTGRES])
def sql_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty SQL database, one of each kind."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run code in a fresh interpreter and return what it prints.

    The code finds `given`, the JSON value that was passed. It goes in by a pipe: it may hold credentials.
    """

    def run(code: str, given: Any = None, timeout: float = 60.0) -> str:
        whole = f"import json, sys\ngiven = json.load(sys.stdin)\n{code}"
        done = subprocess.run(
            [sys.executable, "-c", whole],
            input=json.dumps(given),
            text=True,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
        return done.stdout

    return run


@pytest.fixture(autouse=True)
def _no_sidecar_outlives_its_test() -> Iterator[None]:
    """A sidecar of this process that reads a fence ends it, as it should; the fences of a test end with the test."""
    yield
    heartbeat = sys.modules.get("dagster_resilient.state.heartbeat")
    if heartbeat is not None:
        heartbeat._close_all()
