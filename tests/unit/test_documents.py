"""Documents: what is loaded equals what was stored in value and type, or the store is refused with the path."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import json
import math
import pathlib
import struct
import subprocess
import sys
import uuid
import zoneinfo
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_resilient import codecs
from dagster_resilient.errors import IntegrityError, SchemaVersionError, UnsupportedValueError


def round_trip(value):
    """Encode and decode a value as a store would do it, with the bytes joined."""
    encoded = codecs.encode(value)
    parts = {role: b"".join(buffers) for role, buffers in encoded.parts.items()}
    return codecs.decode(encoded.codec, parts, json.loads(json.dumps(encoded.meta)))


def identical(a, b):  # noqa: PLR0911 - one line per family of types
    """Whether two trees are equal in type and value, with NaN equal to itself and -0.0 different from 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        same_order = a.flags.f_contiguous == b.flags.f_contiguous or not a.flags.forc
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() and same_order
    if isinstance(a, np.generic) and not isinstance(a, (np.longdouble, np.str_, np.bytes_)):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, Decimal):
        return repr(a) == repr(b)
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            identical(k, m) and identical(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(identical, a, b))
    return bool(a == b)


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Point:
    x: int


class Pair(NamedTuple):
    a: int
    b: int


class Text(str):
    __slots__ = ()


SAME = [
    {1: "a", "1": "b"},
    {(1, "x"): 1, None: 2, True: 3, b"k": 4, 2.5: 5, frozenset({1}): 6, dt.date(2020, 1, 1): 7},
    {"$tuple": [1], "plain": {"$dict": 2}},
    [1, True, 1.0, "1", b"1", None, (1,), [1], {1}, frozenset({1})],
    [math.inf, -math.inf, math.nan, -0.0, 0.1, 5e-324, struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]],
    [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**70, 7**6000],
    [complex(math.nan, -0.0), 1j],
    ["", "\ud800", "\ud83d\ude00", "\U0001f600", "a\x00b", {"\ud800": 1}],
    [bytearray(b"\x00\xff"), b"", range(1, 2**70, 3)],
    [Decimal("1.10"), Decimal("sNaN12"), Decimal("-0E-7"), Decimal("Infinity")],
    [dt.date(1, 1, 1), dt.time(1, 2, 3, 4, fold=1), dt.timedelta(-1, 1, 1), dt.timedelta.max],
    [dt.datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")), dt.datetime.max],  # noqa: DTZ901 - a naive datetime is a value too
    [dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "X"))],
    [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:\\a"), pathlib.Path("/x"), uuid.UUID(int=5)],
    collections.OrderedDict([("b", 1), (2, collections.OrderedDict())]),
    [collections.deque([1, 2], maxlen=3), collections.Counter("aab"), collections.deque()],
    [np.float64(0.1), np.float32("nan"), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), np.complex128(1j)],
    [np.str_("a\x00"), np.str_("\ud800"), np.str_(""), np.bytes_(b"a\x00"), np.longdouble(1) / 3],
    [np.datetime64("2020-01-01T00:00:01", "s"), np.datetime64("NaT"), np.timedelta64(5, "ms")],
    np.array([(1, 2.5)], dtype=[("a", ">i4"), ("b", "<f8", (2,))])[0],
    [np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(1.5), np.empty((0, 3), "f4")],
    [
        np.arange(3, dtype=">i2"),
        np.array(["a", "bc\x00d"]),
        np.array([b"x"]),
        np.array(["NaT"], "M8[ns]"),
        np.array([1j]),
    ],
    [
        np.zeros(2, [("a", "i4"), ("b", "S3")]),
        np.array([True, False]),
        np.arange(4, dtype=np.float16),
        np.zeros(2, "V3"),
    ],
    np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    [],
    {},
    (),
    "text",
    None,
    b"raw",
    7,
]


@pytest.mark.parametrize("value", SAME, ids=range(len(SAME)))
def test_a_supported_value_comes_back_equal_in_value_and_type(value):
    """Every family of supported values survives with its types, bits and order."""
    assert identical(round_trip(value), value)


def test_a_defaultdict_keeps_its_factory():
    """The factory is stored by name, for the builtin factories only."""
    value = collections.defaultdict(list, a=[1])
    back = round_trip(value)
    assert (type(back), back, back.default_factory) == (collections.defaultdict, value, list)


def test_an_ordered_dict_keeps_the_metadata_of_a_state_dict():
    """Torch reads the versions of modules from `_metadata` when it loads a state dict."""
    value = collections.OrderedDict(a=1)
    value._metadata = collections.OrderedDict({"": {"version": 2}})
    assert round_trip(value)._metadata == value._metadata


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, 1, 2, {"b": Colour.RED}]}, "$.a[3].b"),
        ([Level.LOW], "$[0]"),
        ({"p": Pair(1, 2)}, "$.p"),
        ([Point(1)], "$[0]"),
        ([Text("x")], "$[0]"),
        ({"optimizer": {"state": [{"x": object()}]}}, "$.optimizer.state[0].x"),
        ({"a b": {1: print}}, "$['a b'][1]"),
        ({Level.LOW: 1}, "$[<Level.LOW: 1>]"),
        ((lambda: 1,), "$[0]"),
        ([collections.defaultdict(Pair)], "$[0]"),
        ([np.array([object()])], "$[0]"),
        ([np.zeros((1, 1)).view(np.matrix)], "$[0]"),
        ([np.ma.masked_array([1], [True])], "$[0]"),
        ([np.rec.array([(1,)], dtype=[("a", int)])], "$[0]"),
        ([np.array(["a"], dtype=np.dtypes.StringDType())], "$[0]"),
        ([np.random.default_rng(0)], "$[0]"),
        ([dt.datetime(2020, 1, 1, tzinfo=type("Z", (dt.tzinfo,), {})())], "$[0]"),
        ([memoryview(b"x")], "$[0]"),
    ],
)
def test_what_would_not_come_back_equal_is_refused_with_its_path(value, path):
    """A subclass or a foreign object is never turned into something near it."""
    with pytest.raises(UnsupportedValueError) as caught:
        codecs.encode(value)
    assert str(caught.value).startswith(path + " ")


def test_a_value_that_contains_itself_is_refused():
    """A cycle ends in an error that names it, not in a full stack."""
    value = {"a": []}
    value["a"].append(value)
    with pytest.raises(UnsupportedValueError, match=r"\$\.a\[0\] contains itself"):
        codecs.encode(value)


def test_the_same_object_twice_is_no_cycle():
    """Only a path back to an open container is a cycle."""
    inner = [1]
    assert round_trip([inner, inner]) == [[1], [1]]


def test_ten_thousand_levels_are_refused():
    """Depth is bounded, so that whatever was stored can be loaded."""
    value = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(UnsupportedValueError, match="nested more than"):
        codecs.encode(value)


def test_the_deepest_accepted_value_can_be_loaded():
    """The bound at save leaves room on the stack at load."""
    value = []
    for _ in range(99):
        value = ({"k": value},) if _ % 2 else [value]
        if _ == 60:
            break
    assert round_trip(value) == value


def test_the_output_is_json_that_strict_parsers_read():
    """No NaN tokens, no lone surrogates."""
    encoded = codecs.encode([math.nan, math.inf, "\ud800", 2**70, {1: 2}])

    def refuse(token):
        raise AssertionError(token)

    raw = b"".join(encoded.parts["document.json"])
    json.loads(raw, parse_constant=refuse)
    assert b"\\ud800" not in raw


def test_equal_sets_have_equal_bytes():
    """The order in which a set is built does not show."""
    forward, backward = set(), set()
    for text in "abcdefgh":
        forward.add(text)
    for text in "hgfedcba":
        backward.add(text)
    assert codecs.encode(forward).parts == codecs.encode(backward).parts


def test_an_unknown_tag_asks_for_a_newer_version():
    """A document of a later version is never half understood."""
    with pytest.raises(SchemaVersionError, match="Upgrade"):
        codecs.decode("document/1", {"document.json": b'[{"$later": 1}]'}, {})


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff", b'{"$bytes": 1}', b'{"$ndarray": {"name": "x"}}', b'{"$int": "z"}']
)
def test_damaged_documents_are_integrity_errors(raw):
    """What cannot be read is an error of our tree, whatever went wrong inside."""
    with pytest.raises(IntegrityError):
        codecs.decode("document/1", {"document.json": raw}, {})


def test_an_unknown_codec_asks_for_a_newer_version():
    """The message names the codec and those that are known."""
    with pytest.raises(SchemaVersionError, match=r"'document/2'.*document/1.*upgrade"):
        codecs.decode("document/2", {}, {})


@pytest.mark.parametrize("codec", ["bytes/1", "document/1", "pandas-parquet/1"])
def test_a_manifest_without_the_objects_of_its_codec_is_an_integrity_error(codec):
    """Not a KeyError from the inside."""
    with pytest.raises(IntegrityError, match="lists no object"):
        codecs.decode(codec, {}, {})


def test_importing_the_codecs_loads_no_heavy_library():
    """A process without tensors and frames does not pay for them."""
    code = (
        "import sys, dagster_resilient.codecs as c; c.encode({'a': (1, 2)}); print([m for m in sys.modules if m in %r])"
    )
    heavy = {"torch", "numpy", "pandas", "pyarrow", "dagster", "safetensors"}
    ran = subprocess.run([sys.executable, "-c", code % heavy], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


keys = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary())
scalars = st.one_of(keys, st.complex_numbers(), st.decimals(), st.timedeltas(), st.datetimes(), st.times(), st.uuids())
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner), st.frozensets(keys), st.sets(keys)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_any_tree_of_supported_values_is_exact(value):
    """Random trees: a NaN in a set or as a key is compared by the bytes of the second encoding."""
    first = codecs.encode(value)
    back = round_trip(value)
    assert codecs.encode(back).parts == first.parts
    assert type(back) is type(value)
