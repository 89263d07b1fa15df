"""Arrow tables of many types, nested ones too, for property-based tests."""

from __future__ import annotations

import datetime as dt

import hypothesis.strategies as st
import pyarrow as pa

YEARS = dt.datetime.fromisoformat("1990-01-01"), dt.datetime.fromisoformat("2090-01-01")
LEAVES = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float16(): st.floats(width=16),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(max_size=3),
    pa.large_string(): st.text(max_size=3),
    pa.string_view(): st.text(max_size=20),
    pa.binary(): st.binary(max_size=3),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.decimal128(10, 2): st.decimals(-(10**7), 10**7, places=2),
    pa.decimal256(50, 3): st.decimals(-(10**7), 10**7, places=3),
    pa.date32(): st.dates(),
    pa.time32("s"): st.times().map(lambda time: time.replace(microsecond=0)),
    pa.time64("us"): st.times(),
    pa.timestamp("s"): st.datetimes().map(lambda time: time.replace(microsecond=0)),
    pa.timestamp("us", "Europe/Paris"): st.datetimes(*YEARS),
    pa.timestamp("ns"): st.datetimes(*YEARS),
    pa.duration("ms"): st.integers(-(10**9), 10**9).map(lambda number: dt.timedelta(milliseconds=number)),
    pa.month_day_nano_interval(): st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 3),
    pa.null(): st.none(),
    pa.dictionary(pa.int8(), pa.string()): st.text(max_size=2),
    pa.dictionary(pa.int32(), pa.int64()): st.integers(0, 3),
}
METADATA = st.none() | st.dictionaries(st.text(max_size=2), st.text(max_size=2), min_size=1, max_size=2)


def nested(inner):
    """Return strategies of types made of others."""
    fields = st.builds(pa.field, st.just("item"), inner, metadata=METADATA)
    named = st.lists(inner, max_size=3).map(lambda kinds: pa.struct([(f"f{i}", kind) for i, kind in enumerate(kinds)]))
    lists = st.sampled_from([pa.list_, pa.large_list, pa.list_view])
    return (
        st.builds(lambda make, field: make(field), lists, fields)
        | st.builds(pa.list_, inner, st.integers(0, 2))
        | named
        | st.builds(pa.map_, st.just(pa.string()), inner)
    )


KINDS = st.recursive(st.sampled_from(list(LEAVES)), nested, max_leaves=4)


def values(kind):
    """Return a strategy of Python values, and None, of a type."""
    if kind in LEAVES:
        return st.none() | LEAVES[kind]
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    if pa.types.is_map(kind):
        return st.none() | st.lists(st.tuples(st.text(max_size=2), values(kind.item_type)), max_size=2)
    size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
    return st.none() | st.lists(values(kind.value_type), min_size=size or 0, max_size=2 if size is None else size)


@st.composite
def tables(draw):
    """Draw a table of a few columns and chunks."""
    kinds = draw(st.lists(KINDS, max_size=3))
    sizes = draw(st.lists(st.integers(0, 3), max_size=3))
    names = draw(st.lists(st.text(max_size=2), min_size=len(kinds), max_size=len(kinds)))
    fields = [pa.field(name, kind, metadata=draw(METADATA)) for name, kind in zip(names, kinds, strict=True)]
    columns = []
    for kind in kinds:
        chunks = [draw(st.lists(values(kind), min_size=size, max_size=size)) for size in sizes]
        columns.append(pa.chunked_array([pa.array(chunk, kind) for chunk in chunks], kind))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=draw(METADATA)))
