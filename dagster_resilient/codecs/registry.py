"""Picks the codec for a value by its type, and for stored objects by the name in their manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from dagster_resilient.codecs.builtin import BUILT_IN
from dagster_resilient.codecs.codec import Codec, Encoded
from dagster_resilient.codecs.views import wanted_class
from dagster_resilient.errors import ConfigurationError, SchemaVersionError

C = TypeVar("C", bound=Codec)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*/[0-9]+")
_OWN: list[Codec] = []  # users' codecs, newest first: they go before ours


def register_codec(codec: C) -> C:
    """Let a codec of your own store values, before those of the library are asked.

    Call it where the code that stores and the code that loads import it: at the top of the module with the assets.
    Every process has a registry of its own, and a stored name never decides what is imported.

    Returns:
        The codec. A module that is imported again replaces the codec of its class.

    Raises:
        ConfigurationError: A name is not of the form ``name/version``, or another codec has it.
    """
    for name in codec.names:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"The codec {_class_of(codec)} has the name {name!r}; write lower-case letters, digits and -._, then a "
                "slash and the version of the form, such as 'molecule/1'."
            )
    same = [known for known in _OWN if _class_of(known) == _class_of(codec)]
    taken = {name: known for known in (*BUILT_IN, *_OWN) if known not in same for name in known.names}
    clash = next((name for name in codec.names if name in taken), None)
    if clash is not None:
        raise ConfigurationError(
            f"The codec {_class_of(codec)} has the name {clash!r}, which {_class_of(taken[clash])} has already. What "
            "is stored names its codec: choose another name."
        )
    _OWN[:] = [codec, *(known for known in _OWN if known not in same)]
    return codec


def unregister_codec(codec: Codec) -> None:
    """Take the codec of a class away again: in tests. What it stored cannot be loaded then."""
    _OWN[:] = [known for known in _OWN if _class_of(known) != _class_of(codec)]


def encode(value: Any) -> Encoded:
    """Encode a value by the first codec that takes it: users', then the library's.

    Raises:
        UnsupportedValueError: It would not come back equal in value and type. Names the path or the column.
    """
    return next(codec for codec in _known() if codec.takes(value)).encode(value)


def decode(name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any], wanted: Any = None) -> Any:
    """Return the value of verified objects.

    Args:
        name: The codec, from the manifest.
        parts: The bytes of each object by role.
        meta: From the manifest.
        wanted: An annotation. It may name a class as which the codec can give the value, such as another library's
            table; anything else changes nothing.

    Raises:
        SchemaVersionError: This process does not know the codec.
        IntegrityError: The objects are not what the codec writes.
    """
    for codec in _known():
        if name in codec.names:
            return codec.decode_as(wanted_class(wanted), name, parts, meta)
    known = ", ".join(known for codec in _known() for known in codec.names)
    raise SchemaVersionError(
        f"The value was stored by the codec {name!r}; this process knows {known}. Import the module that gives it to "
        "register_codec(), or, if it is one of the library's, upgrade dagster-resilient."
    )


def own_types() -> Iterator[type]:
    """Return the classes that users' codecs take, for the check of annotations."""
    return (kind for codec in _OWN for kind in codec.types)


def _known() -> Iterator[Codec]:
    yield from _OWN
    yield from BUILT_IN


def _class_of(codec: Codec) -> str:
    return f"{type(codec).__module__}.{type(codec).__qualname__}"
