"""Stores for all tests: memory, a local directory, and a real S3 server that is started once, when first asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import servers

from dagster_resilient.storage.object_store import ObjectStore, open_store

Place = tuple[str, dict[str, Any]]
S3 = pytest.param("s3", marks=pytest.mark.s3)

SOAK = os.environ.get("RESILIENT_SOAK") == "1"

# No deadline: a busy machine is no failure.
hypothesis.settings.register_profile("usual", deadline=None, max_examples=1000 if SOAK else 60, print_blob=True)
hypothesis.settings.load_profile("usual")


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
def s3_store(s3_url: str, s3_options: dict[str, Any]) -> ObjectStore:
    """A store on the S3 server, empty."""
    return open_store(s3_url, s3_options)


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    """The URL of a directory that does not exist yet."""
    return f"file://{tmp_path}/store"


def _place(request: pytest.FixtureRequest) -> Place:
    """The S3 server starts only for tests that ask for it."""
    if request.param == "s3":
        return request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
    if request.param == "local":
        return request.getfixturevalue("local_url"), {}
    return f"memory://{uuid.uuid4().hex}", {}


@pytest.fixture(params=["memory", "local", S3])
def place(request: pytest.FixtureRequest) -> Place:
    """URL and options of an empty store, one of each kind."""
    return _place(request)


@pytest.fixture(params=["local", S3])
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
