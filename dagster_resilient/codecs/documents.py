"""Exact Python values as JSON with tags.

``{"lr": 0.1, "steps": [1, 2]}`` stands for itself. What JSON lacks is an object with one key that starts with ``$``:
``{"$tuple": [1, 2]}``, ``{"$dict": [[1, "a"], ["1", "b"]]}``, ``{"$float": "7ff8000000000000"}``. Tensors and arrays
become references into a pack (see `tensors`).

The types are matched exactly. A subclass (a namedtuple, an IntEnum, a str subclass) would need its class to be imported
by name to come back as what it was, and a stored name must never decide what is imported. So it is refused, at save,
with its path. What is kept: values and their types, the order of dicts, which of the tensors and arrays are one object.
What is not: which of the lists and dicts are one object, and the iteration order of sets.
"""

from __future__ import annotations

import base64
import binascii
import collections
import datetime as dt
import decimal
import json
import math
import pathlib
import struct
import uuid
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any

from dagster_resilient.codecs.tensors import (
    PackReader,
    PackWriter,
    is_array,
    is_scalar,
    is_tensor,
    scalar_from,
    scalar_to,
)
from dagster_resilient.errors import IntegrityError, SchemaVersionError, UnsupportedValueError

_MAX_DEPTH = 100
_INT64 = 2**63
# Factories whose name may be stored: looking them up here imports and runs nothing that the data chose.
_FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
    "str": str,
    "tuple": tuple,
}
_PATHS: dict[str, type[pathlib.PurePath]] = {
    kind.__name__: kind
    for kind in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}


def encode_document(value: Any, pack: PackWriter) -> bytes:
    """Return the JSON of a value; its tensors and arrays are added to the pack.

    Raises:
        UnsupportedValueError: Something in the value cannot come back as it is. The message holds its path, such as
            ``$.optimizer.state[0].exp_avg``.
    """
    return json.dumps(_Encoder(pack).encode(value), allow_nan=False, separators=(",", ":")).encode()


def decode_document(raw: bytes, pack: PackReader) -> Any:
    """Return the value of a document and its pack.

    Raises:
        IntegrityError: It is no document.
        SchemaVersionError: It holds a tag of a newer version of this library.
    """
    try:
        return _Decoder(pack).decode(json.loads(raw))
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, IntegrityError):
            raise
        raise IntegrityError(f"The stored document cannot be read: {type(error).__name__}: {error}") from error


class _Encoder:
    """Walks a value. `trail` holds the keys from the root to where it stands."""

    def __init__(self, pack: PackWriter) -> None:
        self._pack = pack
        self._trail: list[Any] = []
        self._open: set[int] = set()

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _COMPOSED:
            return self._composed(value, _COMPOSED[kind])
        return self._foreign(value)

    def _foreign(self, value: Any) -> Any:
        if is_tensor(value):
            return {"$tensor": self._pack.add_tensor(value, self._name(), self._path())}
        if is_array(value):
            return {"$ndarray": self._pack.add_array(value, self._name(), self._path())}
        if is_scalar(value):
            return {"$npscalar": scalar_to(value, self._path())}
        raise self._refusal(value)

    def _composed(self, value: Any, encode: Callable[[_Encoder, Any], Any]) -> Any:
        if id(value) in self._open:
            raise UnsupportedValueError(f"{self._path()} contains itself; a value that is to be stored must be a tree.")
        if len(self._trail) >= _MAX_DEPTH:
            raise UnsupportedValueError(f"{self._path()} is nested more than {_MAX_DEPTH} deep; store it flatter.")
        self._open.add(id(value))
        try:
            return encode(self, value)
        finally:
            self._open.discard(id(value))

    def items(self, values: Iterable[Any]) -> list[Any]:
        return [self._at(i, value) for i, value in enumerate(values)]

    def sorted_items(self, values: Iterable[Any]) -> list[Any]:
        """Sets come in an order that differs from process to process; equal sets should have equal bytes."""
        return sorted(self.items(values), key=json.dumps)

    def mapping(self, value: dict[Any, Any]) -> Any:
        """A dict whose keys are all plain text is a JSON object, which people can read; any other a list of pairs."""
        if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
            return {key: self._at(key, item) for key, item in value.items()}
        return {"$dict": self.pairs(value)}

    def pairs(self, value: dict[Any, Any]) -> list[list[Any]]:
        return [[self._key(key), self._at(key, item)] for key, item in value.items()]

    def ordered(self, value: collections.OrderedDict[Any, Any]) -> Any:
        """Torch hangs the versions of modules on a state dict as an attribute, and needs them when it loads."""
        attributes = dict(vars(value))
        if not attributes:
            return {"$ordered": [self.pairs(value)]}
        if set(attributes) != {"_metadata"}:
            raise UnsupportedValueError(
                f"{self._path()} is an OrderedDict with attributes ({', '.join(attributes)}), which cannot be kept."
            )
        return {"$ordered": [self.pairs(value), self._at("_metadata", attributes["_metadata"])]}

    def defaults(self, value: collections.defaultdict[Any, Any]) -> Any:
        factory = value.default_factory
        name = next((name for name, known in _FACTORIES.items() if known is factory), None)
        if factory is not None and name is None:
            message = (
                f"{self._path()} is a defaultdict with the factory {factory!r}, which cannot be stored; use one of"
            )
            raise UnsupportedValueError(f"{message} {', '.join(_FACTORIES)}, or a dict.")
        return {"$defaultdict": [name, self.pairs(value)]}

    def _at(self, key: Any, value: Any) -> Any:
        self._trail.append(key)
        encoded = self.encode(value)
        self._trail.pop()
        return encoded

    def _key(self, key: Any) -> Any:
        if is_tensor(key):
            raise UnsupportedValueError(
                f"{self._path()} has a tensor as a key, which is equal only to itself; use a name."
            )
        return self._at(key, key)

    def moment(self, value: dt.datetime | dt.time) -> list[Any]:
        """`fold` tells the two 2:30 of an autumn night apart; the ISO form lacks it."""
        return [value.replace(tzinfo=None).isoformat(), value.fold, self._zone(value.tzinfo)]

    def _zone(self, zone: dt.tzinfo | None) -> Any:
        if zone is None:
            return None
        if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
            return zone.key
        if type(zone) is dt.timezone:
            offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
            return [_duration(offset), *name]
        raise UnsupportedValueError(
            f"{self._path()} has the time zone {zone!r}; use datetime.timezone or zoneinfo.ZoneInfo."
        )

    def _name(self) -> str:
        return ".".join(str(key) for key in self._trail) or "value"

    def _path(self) -> str:
        steps = (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in self._trail)
        whole = "$" + "".join(steps)
        return whole if len(whole) <= 300 else f"{whole[:140]} ... {whole[-140:]}"  # noqa: PLR2004 - keeps a message readable

    def _refusal(self, value: Any) -> UnsupportedValueError:
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        base = next((base.__name__ for base in kind.__mro__[1:] if base in _COMPOSED or base in _SCALARS), None)
        advice = f"convert it to {base}" if base else "store what it is made of: numbers, text, lists, dicts, tensors"
        advice = "store its state_dict()" if hasattr(value, "state_dict") else advice
        return UnsupportedValueError(
            f"{self._path()} is a {name}, which cannot be stored so that it comes back equal; {advice}."
        )


class _Decoder:
    def __init__(self, pack: PackReader) -> None:
        self.pack = pack

    def decode(self, stored: Any) -> Any:
        if isinstance(stored, list):
            return [self.decode(item) for item in stored]
        if not isinstance(stored, dict):
            return stored
        tag = next(iter(stored), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in stored.items()}
        if tag not in _DECODERS:
            raise SchemaVersionError(
                f"The stored document holds a value of kind {tag!r}, which this version does not know. "
                "Upgrade dagster-resilient."
            )
        return _DECODERS[tag](self, stored[tag])

    def pairs(self, stored: list[list[Any]]) -> Iterable[tuple[Any, Any]]:
        return ((self.decode(key), self.decode(item)) for key, item in stored)

    def ordered(self, stored: list[Any]) -> collections.OrderedDict[Any, Any]:
        value = collections.OrderedDict(self.pairs(stored[0]))
        if len(stored) > 1:
            value._metadata = self.decode(stored[1])  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own place for it
        return value


def _is_text(text: str) -> bool:
    """Whether a str has a UTF-8 form. Lone surrogates have none, and JSON would join two of them into one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(text: str) -> Any:
    return text if _is_text(text) else {"$str": text.encode("utf-8", "surrogatepass").hex()}


def _integer(number: int) -> Any:
    """Beyond 64 bits as hexadecimal: other readers would round, and Python limits the decimal digits it parses."""
    return number if -_INT64 <= number < _INT64 else {"$int": hex(number)}


def _float(number: float) -> Any:
    """The shortest decimal form is exact for every finite number; the others as their bits, for JSON has no NaN."""
    return number if math.isfinite(number) else {"$float": struct.pack(">d", number).hex()}


def _base64(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode()


def _unbase64(text: str) -> bytes:
    return binascii.a2b_base64(text, strict_mode=True)


def _duration(span: dt.timedelta) -> list[int]:
    return [span.days, span.seconds, span.microseconds]


def _zone_from(stored: Any) -> dt.tzinfo | None:
    if stored is None:
        return None
    if isinstance(stored, str):
        return zoneinfo.ZoneInfo(stored)
    return dt.timezone(dt.timedelta(*stored[0]), *stored[1:])


def _moment(kind: Any) -> Callable[[_Decoder, Any], Any]:
    def decode(_: _Decoder, stored: Any) -> Any:
        text, fold, zone = stored
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=_zone_from(zone))

    return decode


_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: _integer,
    float: _float,
    str: _text,
    bytes: lambda v: {"$bytes": _base64(v)},
    bytearray: lambda v: {"$bytearray": _base64(v)},
    complex: lambda v: {"$complex": [_float(v.real), _float(v.imag)]},
    decimal.Decimal: lambda v: {"$decimal": str(v)},
    dt.date: lambda v: {"$date": v.isoformat()},
    dt.timedelta: lambda v: {"$timedelta": _duration(v)},
    uuid.UUID: lambda v: {"$uuid": v.hex},
    range: lambda v: {"$range": [_integer(v.start), _integer(v.stop), _integer(v.step)]},
    **{kind: lambda v: {"$path": [type(v).__name__, _text(str(v))]} for kind in _PATHS.values()},
}

_COMPOSED: dict[type, Callable[[_Encoder, Any], Any]] = {
    list: _Encoder.items,
    tuple: lambda e, v: {"$tuple": e.items(v)},
    set: lambda e, v: {"$set": e.sorted_items(v)},
    frozenset: lambda e, v: {"$frozenset": e.sorted_items(v)},
    dict: _Encoder.mapping,
    collections.OrderedDict: _Encoder.ordered,
    collections.defaultdict: _Encoder.defaults,
    collections.Counter: lambda e, v: {"$counter": e.pairs(v)},
    collections.deque: lambda e, v: {"$deque": [v.maxlen, e.items(v)]},
    dt.datetime: lambda e, v: {"$datetime": e.moment(v)},
    dt.time: lambda e, v: {"$time": e.moment(v)},
}

_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$int": lambda _, s: int(s, 16),
    "$float": lambda _, s: struct.unpack(">d", bytes.fromhex(s))[0],
    "$str": lambda _, s: bytes.fromhex(s).decode("utf-8", "surrogatepass"),
    "$bytes": lambda _, s: _unbase64(s),
    "$bytearray": lambda _, s: bytearray(_unbase64(s)),
    "$complex": lambda d, s: complex(d.decode(s[0]), d.decode(s[1])),
    "$decimal": lambda _, s: decimal.Decimal(s),
    "$date": lambda _, s: dt.date.fromisoformat(s),
    "$time": _moment(dt.time),
    "$datetime": _moment(dt.datetime),
    "$timedelta": lambda _, s: dt.timedelta(*s),
    "$uuid": lambda _, s: uuid.UUID(s),
    "$range": lambda d, s: range(*d.decode(s)),
    "$path": lambda d, s: _PATHS[s[0]](d.decode(s[1])),
    "$tuple": lambda d, s: tuple(d.decode(s)),
    "$set": lambda d, s: set(d.decode(s)),
    "$frozenset": lambda d, s: frozenset(d.decode(s)),
    "$dict": lambda d, s: dict(d.pairs(s)),
    "$ordered": _Decoder.ordered,
    "$defaultdict": lambda d, s: collections.defaultdict(_FACTORIES[s[0]] if s[0] else None, d.pairs(s[1])),
    "$counter": lambda d, s: collections.Counter(dict(d.pairs(s))),
    "$deque": lambda d, s: collections.deque(d.decode(s[1]), s[0]),
    "$npscalar": lambda d, s: scalar_from(s[0], d.decode(s[1])),
    "$tensor": lambda d, s: d.pack.tensor(s),
    "$ndarray": lambda d, s: d.pack.array(s),
}
