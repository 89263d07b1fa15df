"""Codecs of users: registered, found by type and by name, replaced, refused."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from dagster_resilient import Codec, Encoded, codecs, load, open_store, open_task
from dagster_resilient.codecs.hints import unsupported_hint
from dagster_resilient.errors import ConfigurationError, IntegrityError, SchemaVersionError, UnsupportedValueError


@dataclass
class Point:
    """A type that no codec of the library takes."""

    x: int
    y: int


class Points(Codec):
    """Stores it."""

    names = ("point/1",)
    types = (Point,)

    def encode(self, value: Point) -> Encoded:
        """As JSON, with something in the manifest."""
        return Encoded("point/1", {"point.json": [json.dumps(asdict(value)).encode()]}, {"axes": ["x", "y"]})

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Point:
        """From it."""
        assert (name, meta) == ("point/1", {"axes": ["x", "y"]})
        return Point(**json.loads(codecs.part(parts, "point.json")))


@pytest.fixture
def points() -> Iterator[Points]:
    """It is registered, and no longer after the test."""
    codec = codecs.register_codec(Points())
    yield codec
    codecs.unregister_codec(codec)


@pytest.mark.usefixtures("points")
def test_a_value_of_ones_own_type_comes_back() -> None:
    """Through a store, with its manifest."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    stored = open_task(store, "here").save(Point(1, 2))
    assert (load(store, "here"), stored.codec) == (Point(1, 2), "point/1")


def test_without_its_codec_it_is_refused_and_cannot_be_loaded(points: Points) -> None:
    """Neither guessed nor imported: the message says what to do."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    task = open_task(store, "here")
    task.save(Point(1, 2))
    codecs.unregister_codec(points)
    with pytest.raises(SchemaVersionError, match=r"'point/1'.*register_codec"):
        load(store, "here")
    with pytest.raises(UnsupportedValueError, match="Point"):
        task.save(Point(3, 4))
    codecs.register_codec(points)
    assert load(store, "here") == Point(1, 2)


@pytest.mark.usefixtures("points")
def test_annotations_know_it() -> None:
    """A job whose asset returns it starts; without the codec it would be refused before any compute."""
    assert unsupported_hint(Point) is None


def test_annotations_do_not_know_it_without() -> None:
    """The counterpart."""
    assert "Point" in (unsupported_hint(Point) or "")


@pytest.mark.usefixtures("points")
def test_a_subclass_is_not_taken_for_it() -> None:
    """It would come back as what it was not."""

    class Special(Point):
        pass

    with pytest.raises(UnsupportedValueError, match="Special"):
        codecs.encode(Special(1, 2))


@pytest.mark.usefixtures("points")
def test_a_module_that_is_imported_again_replaces_its_codec() -> None:
    """As a notebook does, and Dagster's reload."""
    codecs.unregister_codec(codecs.register_codec(Points()))
    with pytest.raises(UnsupportedValueError):
        codecs.encode(Point(1, 2))


@pytest.mark.parametrize("name", ["point", "Point/1", "point/one", "a b/1", "../x/1", "point/1/2", ""])
def test_a_name_that_no_manifest_could_keep_is_refused(name: str) -> None:
    """With an example."""
    kind = type("Named", (Points,), {"names": (name,)})
    with pytest.raises(ConfigurationError, match="molecule/1"):
        codecs.register_codec(kind())


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize("name", ["document/1", "point/1"])
def test_a_name_that_another_codec_has_is_refused(name: str) -> None:
    """What was stored would be read by the wrong one."""
    kind = type("Other", (Points,), {"names": (name,)})
    with pytest.raises(ConfigurationError, match="another name"):
        codecs.register_codec(kind())


@pytest.mark.usefixtures("points")
def test_a_part_that_is_not_there_is_an_integrity_error() -> None:
    """Codecs of users have the same way to ask for it."""
    with pytest.raises(IntegrityError, match=r"point\.json"):
        codecs.decode("point/1", {}, {"axes": ["x", "y"]})
