"""pydantic models: their fields as a document, and the class from whoever loads them.

A stored name never decides what is imported. So the class is the one that the loading code names: the annotation of an
input, or `expected`. Its own validation decides whether it takes what was stored, strictly: nothing is coerced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic

from dagster_resilient.codecs.codec import Codec, Encoded
from dagster_resilient.codecs.trees import decode_tree, encode_tree
from dagster_resilient.errors import UnsupportedValueError

MODEL = "pydantic/1"


class ModelCodec(Codec):
    """Instances of pydantic models. Each is validated again before it is stored: none comes back different."""

    names = (MODEL,)

    def takes(self, value: Any) -> bool:
        """Whether it is an instance of a model."""
        return isinstance(value, pydantic.BaseModel)

    def encode(self, value: pydantic.BaseModel) -> Encoded:
        """See `Codec`."""
        kind = type(value)
        encoded = encode_tree(_fields(value), MODEL)
        try:
            back = _made(kind, decode_tree(_joined(encoded)))
            same = _whole(back) == _whole(value)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(f"The value cannot be stored: {error}") from error
        if not same:
            raise UnsupportedValueError(
                f"The {_name(kind)} would not come back equal from its fields; store them, or register a codec for it."
            )
        return Encoded(MODEL, encoded.parts, {"model": _name(kind)})

    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Refuse: nobody named the class.

        Raises:
            UnsupportedValueError: Always. Names the class as it was called when it was stored.
        """
        raise UnsupportedValueError(
            f"The value is a {meta.get('model')}, a pydantic model, whose class must be named by whoever loads it: "
            "annotate the input with it, or pass it as `expected`."
        )

    def decode_as(self, wanted: Any, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:
        """Return an instance of the wanted model, whose validation takes what was stored, strictly.

        Raises:
            UnsupportedValueError: No model is wanted, or it does not take what was stored. Names the field.
        """
        if not (isinstance(wanted, type) and issubclass(wanted, pydantic.BaseModel)):
            return self.decode(name, parts, meta)
        return _made(wanted, decode_tree(parts))


def _fields(value: pydantic.BaseModel) -> dict[str, Any]:
    """Return what was set, and what differs from its default no less: a default may change with the code."""
    return {"fields": value.model_dump(mode="python", round_trip=True), "set": sorted(value.model_fields_set)}


def _whole(value: pydantic.BaseModel) -> dict[str, bytes]:
    """Return all that an instance holds as bytes: `==` says nothing of types, and has no answer for arrays."""
    return _joined(encode_tree(_fields(value) | {"private": value.__pydantic_private__}))


def _joined(encoded: Encoded) -> dict[str, bytes]:
    return {role: b"".join(buffers) for role, buffers in encoded.parts.items()}


def _made(kind: type[pydantic.BaseModel], stored: Any) -> pydantic.BaseModel:
    try:
        made = kind.model_validate(stored["fields"], strict=True, by_name=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(step) for step in first["loc"]) or "the whole"
        raise UnsupportedValueError(
            f"{_name(kind)} does not take what was stored: {field}: {first['msg']}. Load it as the class with which it "
            "was stored, or give the field a validator or default for older values."
        ) from error
    made.model_fields_set.intersection_update(stored["set"])
    return made


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
