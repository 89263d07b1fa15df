"""Stores through the fault proxy, by a client whose waits and timeouts are short. Nothing else of it is changed."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import servers
from proxy import S3Proxy
from s3_calls import BIG, SMALL

from dagster_resilient.storage import breaker, obstore_store, retry
from dagster_resilient.storage.object_store import ObjectStore, open_store


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait a tenth of what they usually do, in both layers, and no test finds a circuit open."""
    backoff = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=50), "base": 2}
    monkeypatch.setattr(obstore_store, "_RETRY", {**obstore_store._RETRY, "backoff": backoff})
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.01)
    for one in list(breaker._SHARED.values()):
        one.renew()


@pytest.fixture
def impatient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent server is given up after 0.4 s, not 30."""
    monkeypatch.setitem(obstore_store._CLIENT, "read_timeout", timedelta(seconds=0.4))


@pytest.fixture
def through(s3_proxy: S3Proxy, s3_options: dict[str, Any]) -> Callable[..., Any]:
    """Open a store through the proxy."""

    def opened(url: str, patience: float = 30.0, **options: Any) -> Any:
        store: Any = open_store(url, {**s3_options, "endpoint_url": s3_proxy.endpoint, **options})
        return store.with_patience(patience)

    return opened


@pytest.fixture
def faulty(through: Callable[..., Any], s3_url: str) -> Any:
    """An empty store, through the proxy."""
    return through(s3_url)


@pytest.fixture
def judge(s3_url: str, s3_options: dict[str, Any]) -> Any:
    """The same store past the proxy, without retries: what is really there."""
    store: Any = open_store(s3_url, s3_options)
    return store._inner


@pytest.fixture(scope="module")
def given(s3_server: servers.SeaweedServer) -> ObjectStore:
    """Objects for all tests that only read."""
    store = open_store(f"s3://{servers.BUCKET}/{uuid.uuid4().hex}", s3_server.options)
    store.put("small", SMALL)
    store.put("big", BIG)
    return store
