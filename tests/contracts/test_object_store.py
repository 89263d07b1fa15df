"""The shipped contract of object stores, on memory, a directory and a real S3 server; and what only URLs have."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.testing import ObjectStoreContract

Place = tuple[str, dict[str, Any]]
RunPython = Callable[..., str]


class TestStores(ObjectStoreContract):
    """Every store that `open_store` opens."""

    @pytest.fixture
    def opener(self, place: Place) -> Callable[[], ObjectStore]:
        """Each call opens the same empty place."""
        return lambda: open_store(*place)


NUMBERS: dict[str, Callable[[], Any]] = {
    "a matrix": lambda: np.arange(6, dtype="i8").reshape(2, 3),
    "every second number": lambda: np.arange(12, dtype="f8")[::2],
    "no row": lambda: np.zeros((0, 3)),
    "big-endian": lambda: np.arange(3, dtype=">i4"),
}


def names(store: ObjectStore, prefix: str = "") -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in store.list(prefix)]


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
def test_arrays_are_written_as_their_bytes(store: ObjectStore, numbers: Callable[[], Any]) -> None:
    """Whatever the shape, stride or order of bytes of a numpy array."""
    store.put("a", memoryview(numbers()))
    assert store.get("a") == numbers().tobytes()


def test_the_url_that_a_store_shows_opens_the_same_place(place: Place) -> None:
    """It is the name of the place, in whatever spelling it was given."""
    store = open_store(*place)
    store.put("a", b"1")
    assert names(open_store(store.url, place[1])) == ["a"]


def test_a_prefix_is_a_store_of_its_own(place: Place) -> None:
    """A store below another one has keys of its own, which the outer one sees below the prefix."""
    url, options = place
    outer, inner = open_store(url, options), open_store(f"{url}/in ner%2F", options)
    inner.put("a", b"1")
    outer.put("b", b"2")
    assert names(inner) == ["a"]
    if outer.is_shared:  # names of memory stores do not nest
        assert names(outer) == ["b", "in ner%2F/a"]


def test_no_credential_is_shown(place: Place) -> None:
    """Neither the URL nor the representation of a store contains a secret; only the sidecar's configuration does."""
    store = open_store(*place)
    shown = f"{store.url} {store!r}"
    assert not [value for name, value in place[1].items() if name != "endpoint_url" and value in shown]
    assert store.url in repr(store)


def test_another_process_sees_every_acknowledged_write(shared_place: Place, run_python: RunPython) -> None:
    """A fresh process reads, lists and is refused by what this one wrote, and this one sees what it wrote."""
    store = open_store(*shared_place)
    store.create("ours", b"1")
    assert names(store, "theirs/") == []
    code = """
from dagster_resilient.errors import ObjectExistsError
from dagster_resilient.storage.object_store import open_store
store = open_store(*given)
print(store.get("ours").decode(), [info.key for info in store.list("")])
try:
    store.create("ours", b"theirs")
except ObjectExistsError:
    print("refused")
store.put("theirs/a", b"2")
"""
    assert run_python(code, shared_place).splitlines() == ["1 ['ours']", "refused"]
    assert (store.get("ours"), store.get("theirs/a")) == (b"1", b"2")
    assert names(store) == ["ours", "theirs/a"]


def test_a_sidecar_can_open_the_store_again(shared_place: Place) -> None:
    """The configuration is plain JSON. It carries what a process needs that has nothing but obstore."""
    config = open_store(*shared_place).sidecar_config()
    assert json.loads(json.dumps(config)) == config
    assert config["kind"] in {"s3", "local"}


def test_memory_has_no_second_process() -> None:
    """A store in memory says so, instead of letting a sidecar see an empty one."""
    store = open_store("memory://alone")
    assert not store.is_shared
    with pytest.raises(ConfigurationError, match="memory://alone"):
        store.sidecar_config()
