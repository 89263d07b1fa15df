"""What an annotation already says: whether any value of a type could be stored, before the value is computed."""

from __future__ import annotations

import datetime as dt
import decimal
import inspect
import pathlib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import pydantic

from dagster_resilient.codecs.registry import own_types

_PLAIN: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset, type(None),
    dt.date, dt.time, dt.timedelta, decimal.Decimal, pathlib.PurePath, pydantic.BaseModel,
)  # fmt: skip
_LIBRARIES = {
    "pandas": ("DataFrame",),
    "pyarrow": ("Table", "RecordBatch"),
    "polars": ("DataFrame", "Series"),
    "numpy": ("ndarray", "generic"),
    "torch": ("Tensor",),
}


def unsupported_hint(hint: Any) -> str | None:
    """Return the name of a class that no codec takes, if a hint allows no other value; None where a value may fit.

    Judged cautiously: only plain classes, and unions of them, that are neither a base nor a subclass of anything that
    can be stored. The value itself decides in the end.
    """
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        refused = [unsupported_hint(choice) for choice in typing.get_args(hint) if choice is not type(None)]
        return " | ".join(name for name in refused if name) if refused and all(refused) else None
    if not inspect.isclass(hint) or typing.get_origin(hint) is not None or hint in {object, Any}:
        return None
    fits = any(issubclass(hint, known) or issubclass(known, hint) for known in _storable())
    return None if fits else f"{hint.__module__}.{hint.__qualname__}"


def _storable() -> Iterator[type]:
    """A class of a library can be meant only where the library is loaded."""
    yield from _PLAIN
    yield from own_types()
    for module, names in _LIBRARIES.items():
        loaded = sys.modules.get(module)
        if loaded is not None:
            yield from (getattr(loaded, name) for name in names)
