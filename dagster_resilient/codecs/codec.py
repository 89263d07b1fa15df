"""What a codec is: how the values of some types are stored, and read again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dagster_resilient.errors import IntegrityError
from dagster_resilient.storage.object_store import Buffer

# How much of a table people are shown.
HEAD_ROWS, HEAD_COLUMNS = 5, 50
_CELL = 80

Cell = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Summary:
    """What people are shown of a table that was stored.

    Attributes:
        rows: Number of rows.
        columns: Types by the columns' names, in order.
        head: The first rows, by column.
    """

    rows: int
    columns: dict[str, str]
    head: list[dict[str, Cell]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value in the form in which it is stored.

    The buffers are the value's own memory where that is possible: write them before the value is changed again.

    Attributes:
        codec: Name and version of the codec.
        parts: Buffers of each object, by its role, which is its file name too.
        meta: JSON that the codec needs to decode, kept in the manifest.
        summary: What people are shown of it, for a table. It is not stored.
    """

    codec: str
    parts: dict[str, list[Buffer]]
    meta: dict[str, Any] = field(default_factory=dict)
    summary: Summary | None = None


class Codec(ABC):
    """How values of some types are stored. Subclass it for your own types, and give an instance to `register_codec`.

    A value must come back equal, in type and in all that it holds, or be refused by `encode`.

    Attributes:
        names: The names under which it stores, each with its version, such as ``molecule/1``. Manifests keep them, and
            `decode` gets the one that was kept: a codec that changes its form adds a name and still reads the old ones.
        types: The classes whose instances it takes. Subclasses have codecs of their own, or none.
    """

    names: ClassVar[tuple[str, ...]]
    types: ClassVar[tuple[type, ...]] = ()

    def takes(self, value: Any) -> bool:
        """Whether it is this codec that stores a value."""
        return type(value) in self.types

    @abstractmethod
    def encode(self, value: Any) -> Encoded:
        """Encode a value.

        Raises:
            UnsupportedValueError: It would not come back equal. Names what in it is to blame.
        """

    @abstractmethod
    def decode(self, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:
        """Return the value of verified objects.

        Args:
            name: One of `names`.
            parts: The bytes of each object by role.
            meta: What `encode` gave, as it comes back from JSON.

        Raises:
            IntegrityError: The objects are not what the codec writes.
        """

    def decode_as(self, wanted: Any, name: str, parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Return the same for an annotation that names a class, if several classes can read what is stored.

        Args:
            wanted: The class; None where nobody named one.
            name: See `decode`.
            parts: See `decode`.
            meta: See `decode`.
        """
        return self.decode(name, parts, meta)


def shown(value: Any) -> Cell:
    """Return a cell as people are shown it, and as JSON holds it: numbers as they are, anything else as short text."""
    kind = type(value)
    if kind in {int, bool} or (kind is float and math.isfinite(value)):
        return value  # type: ignore[no-any-return]
    text = str(value)
    return text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."


def part(parts: Mapping[str, bytes], role: str) -> bytes:
    """Return an object's bytes.

    Raises:
        IntegrityError: The manifest lists none of that role.
    """
    if role not in parts:
        raise IntegrityError(f"The manifest lists no object {role!r}, which its codec needs.")
    return parts[role]
