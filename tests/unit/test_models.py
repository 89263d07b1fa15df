"""pydantic models: stored by their fields, and read as the class that the loading code names."""

from __future__ import annotations

import datetime as dt
import enum
import json
import uuid
from typing import Any

import numpy as np
import pydantic
import pytest

from dagster_resilient import codecs, load, open_store, open_task
from dagster_resilient.codecs.hints import unsupported_hint
from dagster_resilient.errors import UnsupportedValueError


class Inner(pydantic.BaseModel):
    """A model within one."""

    at: dt.datetime
    weights: tuple[float, ...] = ()


class Settings(pydantic.BaseModel):
    """One of many kinds of fields."""

    name: str
    rate: float = 0.1
    inner: Inner | None = None
    by_key: dict[int, bytes] = {}


class Array(pydantic.BaseModel):
    """A model with what JSON lacks."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    values: Any


class Renamed(pydantic.BaseModel):
    """A model whose fields have other names outside."""

    model_config = pydantic.ConfigDict(validate_by_name=True, validate_by_alias=True)
    step: int = pydantic.Field(alias="global-step")


class Private(pydantic.BaseModel):
    """A model that holds more than its fields."""

    n: int
    _seen: list[int] = pydantic.PrivateAttr(default_factory=list)


class Colour(enum.Enum):
    """A class that a document does not know."""

    RED = 1


class Coloured(pydantic.BaseModel):
    """A model with such a field."""

    colour: Colour


def stored(value: Any) -> Any:
    """A store that holds the value."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    open_task(store, "it").save(value)
    return store


@pytest.mark.parametrize(
    "value",
    [
        Settings(name="a"),
        Settings(name="ü", rate=1e-300, inner=Inner(at=dt.datetime(2026, 1, 2, tzinfo=dt.UTC), weights=(0.1, -0.0))),
        Settings(name="", by_key={1: b"\x00", -(2**70): b""}),
        Renamed(**{"global-step": 3}),
    ],
)
def test_a_model_comes_back_equal(value: pydantic.BaseModel) -> None:
    """In its class, its fields, their types, and in which of them were set."""
    back = load(stored(value), "it", type(value))
    assert (type(back), back, back.model_fields_set) == (type(value), value, value.model_fields_set)
    assert repr(back) == repr(value)


def test_without_a_class_it_says_what_to_name() -> None:
    """The stored name decides nothing: it is only shown."""
    store = stored(Settings(name="a"))
    with pytest.raises(UnsupportedValueError, match=r"test_models\.Settings.*annotate"):
        load(store, "it")
    with pytest.raises(UnsupportedValueError, match="annotate"):
        load(store, "it", dict)


def test_a_class_that_has_changed_names_the_field() -> None:
    """Nothing is coerced: text is no number, however it looks."""

    class Changed(pydantic.BaseModel):
        name: int

    with pytest.raises(UnsupportedValueError, match=r"Changed.*name: Input should be a valid integer"):
        load(stored(Settings(name="12")), "it", Changed)


def test_an_older_value_gets_the_defaults_of_newer_fields() -> None:
    """As pydantic has it."""

    class Newer(Settings):
        added: int = 7

    assert load(stored(Settings(name="a")), "it", Newer).added == 7


@pytest.mark.parametrize("value", [Coloured(colour=Colour.RED), Array(values=object())], ids=["an enum", "an object"])
def test_a_field_that_cannot_be_stored_is_refused_by_its_path(value: pydantic.BaseModel) -> None:
    """Before anything is written."""
    with pytest.raises(UnsupportedValueError, match=r"\$\.fields\.(colour|values)"):
        codecs.encode(value)


def test_a_model_that_holds_more_than_its_fields_is_refused() -> None:
    """What would be lost is not stored at all."""
    value = Private(n=1)
    value._seen.append(3)
    with pytest.raises(UnsupportedValueError, match="Private would not come back equal"):
        codecs.encode(value)


def test_arrays_in_fields_come_back() -> None:
    """They lie beside the document."""
    back = load(stored(Array(values=[np.arange(3), "x"])), "it", Array)
    assert back.values[0].tolist() == [0, 1, 2]


def test_an_annotation_with_a_model_is_no_refusal() -> None:
    """A job whose asset returns one starts."""
    assert unsupported_hint(Settings) is None


def test_the_document_is_plain_json() -> None:
    """For people, and for other tools."""
    (document,) = codecs.encode(Settings(name="a", rate=0.5)).parts["document.json"]
    assert json.loads(bytes(document))["fields"] == {"name": "a", "rate": 0.5, "inner": None, "by_key": {}}
