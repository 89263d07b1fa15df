"""Places for the cases that were reported of other tools: memory, a directory, a real S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dagster_resilient import ResilientResource
from dagster_resilient.state import heartbeat
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore

Place = tuple[str, dict[str, Any]]
S3 = pytest.param("s3", marks=pytest.mark.s3)


@pytest.fixture(params=["memory", "local", S3])
def place(request: pytest.FixtureRequest) -> Place:
    """URL and options of an empty store, one of each kind. Other kinds are covered by the contract of stores."""
    if request.param == "s3":
        return request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
    if request.param == "local":
        return request.getfixturevalue("local_url"), {}
    return f"memory://{uuid.uuid4().hex}", {}


@pytest.fixture
def resilient(place) -> ResilientResource:
    """A resource on an empty store, one of each kind."""
    url, options = place
    return ResilientResource(url=url, storage_options=options)


@pytest.fixture(params=["local", S3])
def shared_place(request: pytest.FixtureRequest) -> Place:
    """URL and options of an empty store that other processes can open."""
    if request.param == "s3":
        return request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
    return request.getfixturevalue("local_url"), {}


@pytest.fixture
def saved() -> Callable[[ObjectStore, str], list[int]]:
    """Tell the steps of the checkpoints that stand in a store for a task."""

    def look(store: ObjectStore, name: str) -> list[int]:
        head = NumberedLog(ObjectRecords(store), keys.task_prefix([name], None, "log")).head()
        return [] if head is None else [checkpoint.step for checkpoint in head.checkpoints]

    return look


@pytest.fixture(autouse=True)
def _no_heartbeat_outlives_its_store() -> Iterator[None]:
    """A script's heartbeat lasts until its process ends; end it with the test."""
    yield
    heartbeat._close_all()
