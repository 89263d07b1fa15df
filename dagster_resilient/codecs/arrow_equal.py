"""Whether two Arrow columns hold the same, however they are cut into chunks and runs.

pyarrow's own `equals` takes 0.0 and -0.0 for one, and NaN for unequal to itself. So nested arrays are taken apart here,
down to leaves that it compares exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def inner_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and the types that it is made of."""
    import pyarrow as pa  # noqa: PLC0415 - heavy, and needed only where tables are

    yield kind
    if isinstance(kind, pa.BaseExtensionType):
        yield from inner_types(kind.storage_type)
    elif pa.types.is_dictionary(kind):
        yield from inner_types(kind.value_type)
    else:
        for position in range(kind.num_fields):
            yield from inner_types(kind.field(position).type)


def same_columns(ours: pa.ChunkedArray, theirs: pa.ChunkedArray) -> bool:
    """Whether two columns of one type hold the same, in values and nulls and dictionaries."""
    if len(ours) != len(theirs) or ours.null_count != theirs.null_count:
        return False
    return all(_same(*pair) for pair in _aligned(ours, theirs))


def _aligned(ours: pa.ChunkedArray, theirs: pa.ChunkedArray) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield stretches that neither column cuts. Laying them out anew could overflow 32-bit offsets."""
    if not len(ours):
        yield ours.combine_chunks(), theirs.combine_chunks()
        return
    ends = sorted({*_ends(ours), *_ends(theirs)})
    for start, end in zip([0, *ends], ends, strict=False):
        if start < end:
            one, other = ours.slice(start, end - start), theirs.slice(start, end - start)
            yield _solid(one), _solid(other)


def _ends(column: pa.ChunkedArray) -> Iterator[int]:
    end = 0
    for chunk in column.chunks:
        end += len(chunk)
        yield end


def _solid(column: pa.ChunkedArray) -> pa.Array:
    return next(chunk for chunk in column.chunks if len(chunk))


def _same(ours: pa.Array, theirs: pa.Array) -> bool:
    if ours.type != theirs.type or len(ours) != len(theirs):
        return False
    pieces = _pieces(ours)
    if pieces is None:
        return bool(ours.equals(theirs))
    if not ours.is_null().equals(theirs.is_null()):
        return False
    others = _pieces(theirs)
    return others is not None and len(pieces) == len(others) and all(map(_same, pieces, others))


def _pieces(array: pa.Array) -> list[Any] | None:
    """Return arrays that, with the places of the nulls, say all that an array holds; None where `equals` does."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    types, kind = pa.types, array.type
    if types.is_floating(kind):
        return [_bits(array)]
    if types.is_union(kind):
        return _members(array)
    if types.is_struct(kind):
        return list(array.flatten())
    if kind.num_fields and not types.is_run_end_encoded(kind):
        array = _as_list(array) if types.is_map(kind) else array
        return [pc.list_value_length(array), array.flatten()]
    return _decoded(array)


def _decoded(array: pa.Array) -> list[Any] | None:
    """Return what is behind an array that holds its values by way of another."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    if isinstance(array.type, pa.BaseExtensionType):
        return [array.storage]
    if pa.types.is_dictionary(array.type):
        return [array.indices, array.dictionary]
    return [pc.run_end_decode(array)] if pa.types.is_run_end_encoded(array.type) else None


def _bits(array: pa.Array) -> pa.Array:
    """One NaN is as good as another, and Parquet's dictionaries make them one; but the zeros differ."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    nans = pc.is_nan(array)
    if pc.any(nans).as_py():
        array = pc.if_else(nans, pa.scalar(float("nan"), array.type), array)
    return array.view({16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[array.type.bit_width])


def _members(array: pa.Array) -> list[Any]:
    """Return the values that each member of a union gives, and which member gives which.

    pyarrow's `type_codes` and `offsets` begin where the memory does, also in a slice that begins later.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    buffers, size, start = array.buffers(), len(array), array.offset
    codes = pa.Array.from_buffers(pa.int8(), size, [None, buffers[1]], offset=start)
    dense = array.type.mode == "dense"
    places = pa.Array.from_buffers(pa.int32(), size, [None, buffers[2]], offset=start) if dense else None
    members = []
    for position, code in enumerate(array.type.type_codes):
        chosen, member = pc.equal(codes, pa.scalar(code, pa.int8())), array.field(position)
        members.append(member.filter(chosen) if places is None else member.take(places.filter(chosen)))
    return [codes, *members]


def _as_list(array: pa.MapArray) -> pa.ListArray:
    """Return a map as the list of its entries, over the same memory. The kernels for lists know no maps."""
    import pyarrow as pa  # noqa: PLC0415

    entries = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    kind = pa.list_(entries.type)
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:2], offset=array.offset, children=[entries])
