"""Reading into memory that is there already."""

from __future__ import annotations

import re
from array import array

import pytest

from dagster_resilient.errors import ObjectNotFoundError, StorageError
from dagster_resilient.storage.object_store import ObjectStore


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_a_buffer_is_filled(store: ObjectStore, start: int, size: int) -> None:
    """With the bytes from the start on, so many as it holds, whatever kind of buffer it is."""
    store.put("a", b"0123456789")
    buffer, inside = bytearray(size), bytearray(b"." * (size + 2))
    store.get_into("a", buffer, start)
    store.get_into("a", memoryview(inside)[1:-1], start)
    assert buffer == b"0123456789"[start : start + size]
    assert inside == b"." + buffer + b"."


def test_numbers_are_filled_by_their_bytes(store: ObjectStore) -> None:
    """A buffer of numbers is one of bytes."""
    store.put("a", memoryview(array("d", [1.5, 2.5])))
    numbers = array("d", [0.0])
    store.get_into("a", memoryview(numbers), 8)
    assert numbers[0] == 2.5


@pytest.mark.parametrize(("start", "size"), [(0, 11), (5, 6), (20, 1)])
def test_a_buffer_that_cannot_be_filled_is_an_error(store: ObjectStore, start: int, size: int) -> None:
    """Where the object ends before: it is named, and nobody takes the rest for data."""
    store.put("a", b"0123456789")
    with pytest.raises(StorageError, match=re.escape(f"{store.url}/a")):
        store.get_into("a", bytearray(size), start)


def test_filling_from_what_is_not_there(store: ObjectStore) -> None:
    """It is named."""
    with pytest.raises(ObjectNotFoundError, match=re.escape(f"{store.url}/absent")):
        store.get_into("absent", bytearray(1))
