"""Keys: reversible, bounded, and never two names for one place or one place for two names."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import check_key

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
LONG_TEXTS = TEXTS | st.text(st.sampled_from("aä+%A/"), min_size=30, max_size=400)
PATHS = st.lists(LONG_TEXTS, min_size=1, max_size=4).map(tuple)
BOUNDARY = re.compile(r"[a-z0-9._=%A-F~+-]+")


@given(LONG_TEXTS)
@example("")
@example("%~" + "0" * 32)
def test_a_segment_is_one_bounded_path_segment_of_plain_characters(text: str) -> None:
    """Whatever the text, its segment has no slash, no leading dot, at most 120 bytes, and a key may hold it."""
    segment = keys.encode_segment(text)
    assert BOUNDARY.fullmatch(segment)
    assert not segment.startswith(".")
    assert len(segment.encode()) <= keys.MAX_SEGMENT
    assert check_key(segment) == segment


@given(LONG_TEXTS)
def test_decoding_returns_the_text_or_says_that_only_a_hash_is_left(text: str) -> None:
    """A segment decodes to its text; only where the text was too long it decodes to None."""
    decoded = keys.decode_segment(keys.encode_segment(text))
    assert decoded == text or (decoded is None and len(text.encode()) > keys.MAX_SEGMENT // 3)


@given(LONG_TEXTS, LONG_TEXTS)
@example("A", "a")
@example("a/b", "a%2Fb")
@example("", " ")
@example(unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"))
def test_distinct_texts_have_distinct_segments_even_where_case_is_folded(one: str, other: str) -> None:
    """Two texts share a segment only if they are equal, also on a file system that folds case."""
    same = keys.encode_segment(one).lower() == keys.encode_segment(other).lower()
    assert same == (one == other)


@given(PATHS)
def test_an_asset_key_is_one_bounded_segment_that_decodes_to_its_parts(path: tuple[str, ...]) -> None:
    """An asset key becomes one segment, and comes back unless it was too long."""
    segment = keys.asset_segment(path)
    assert len(segment) <= keys.MAX_SEGMENT
    assert check_key(segment) == segment
    assert keys.decode_asset_segment(segment) in {path, None}


@given(PATHS, PATHS)
@example(("a", "b"), ("a+b",))
@example(("a" * 100, "b" * 100), ("a" * 100 + "+" + "b" * 100,))
@example(("", ""), ("",))
def test_distinct_asset_keys_have_distinct_segments(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Two asset keys share a segment only if they are equal: also long ones, of which only a hash is left."""
    same = keys.asset_segment(one).lower() == keys.asset_segment(other).lower()
    assert same == (one == other)


@given(st.text(max_size=40))
def test_decoding_foreign_names_never_fails(name: str) -> None:
    """What somebody else put beside our objects is not decoded, and is no error."""
    decoded = keys.decode_segment(name)
    assert decoded is None or keys.encode_segment(decoded) == name


def test_a_lone_surrogate_is_refused_by_name() -> None:
    """Text without a UTF-8 form has no key; the message shows it."""
    with pytest.raises(ConfigurationError, match=r"udc80.*rename"):
        keys.encode_segment("x\udc80")


def test_an_unpartitioned_asset_differs_from_every_partition() -> None:
    """No partition key is written as the unpartitioned asset is, not even "" or what looks like its segment."""
    unpartitioned = keys.partition_segment(None)
    assert unpartitioned not in {keys.partition_segment(text) for text in ("", "None", "-", "%-", unpartitioned)}
    assert keys.decode_partition_segment(unpartitioned) == (True, None)
    assert keys.decode_partition_segment(keys.partition_segment("")) == (True, "")


ADDRESSING = {
    "A01 dots and separators": ["0.94-to-0.95", "0.94-to-0.96", "a.parquet", "a"],
    "A02 a key inside another": ["a", "a/b", "a/b/", "a/b/c"],
    "A03 leaving the root": ["/x", "%2Fx", "..", "%2E%2E", "../../etc/x", ".", "%2E", "x/../y"],
    "A05 several dimensions": ["x/y|z", "x|y/z", "x|y|z"],
    "A09 long ASCII": ["k" * 300, "k" * 299 + "x", "k" * 280 + "y" * 20],
    "A09 long CJK": ["漢" * 300, "漢" * 299 + "字", "漢" * 299],
    "A10 special characters": [*"#?%+&=,;[]* \n\t\x00😀", "", "[x]", "a*b", "a\nb"],
    "A12 case": ["A", "a", "Aa", "aA", "aa"],
    "A14 hive style": ["a%b=1", "partition/", "b=2", "a=1/b=2"],
}


@pytest.mark.parametrize("texts", ADDRESSING.values(), ids=ADDRESSING.keys())
def test_partition_keys_known_to_collide_elsewhere_do_not(texts: list[str]) -> None:
    """Keys that other storage layouts merge, nest or lose each have one place of their own, below the task prefix."""
    prefixes = [keys.task_prefix(["asset"], text, "log") for text in texts]
    assert len({prefix.lower() for prefix in prefixes}) == len(texts)
    assert all(check_key(prefix).startswith("tasks/asset/") and prefix.count("/") == 3 for prefix in prefixes)
    assert not [(a, b) for a in prefixes for b in prefixes if a != b and b.startswith(a + "/")]


@pytest.mark.parametrize("texts", ADDRESSING.values(), ids=ADDRESSING.keys())
def test_a_listing_gives_back_the_partition_keys(texts: list[str]) -> None:
    """What is found in storage decodes to the keys of the definition, or says that the records must be asked (A14)."""
    decoded = [keys.decode_partition_segment(keys.partition_segment(text)) for text in texts]
    assert [text for ok, text in decoded if ok] == [text for text in texts if len(text) <= keys.MAX_SEGMENT]


def test_a_multi_partition_key_and_its_plain_text_are_one_place() -> None:
    """A key given as a subclass of str, as Dagster does, has the place of its text (A06)."""

    class MultiPartitionKey(str):
        __slots__ = ()

        def __repr__(self) -> str:
            return "never used"

    assert keys.partition_segment(MultiPartitionKey("p|q")) == keys.partition_segment("p|q")


def test_an_asset_key_and_a_longer_one_do_not_nest() -> None:
    """A task of asset `x` and one of `x/y`, partitioned or not, have prefixes of which none is inside another (A08)."""
    prefixes = [
        keys.task_prefix(*task, "data") for task in ([["x"], None], [["x", "y"], None], [["x"], "y"], [["x"], "a"])
    ]
    assert not [(a, b) for a in prefixes for b in prefixes if a != b and b.startswith(a + "/")]


def test_numbers_sort_as_text() -> None:
    """Fixed width: the order of names in a listing is the order of numbers."""
    numbers = [1, 2, 9, 10, 99, 100, 1_000_000]
    assert sorted(keys.numbered(n) for n in numbers) == [keys.numbered(n) for n in numbers]


@given(TEXTS, st.sampled_from(["worker", "step"]), st.from_regex(r"[0-9a-f]{32}", fullmatch=True))
def test_a_heartbeat_key_names_run_role_and_process(run_id: str, role: str, process: str) -> None:
    """A LIST alone tells whose heartbeat it is."""
    decoded = keys.decode_live_key(keys.live_key(run_id, role, process))
    assert decoded == (run_id, role, process) or keys.decode_segment(keys.encode_segment(run_id)) is None
    mark = keys.hung_key(run_id, role, process)
    assert keys.decode_hung_key(mark) == decoded
    assert keys.decode_live_key(mark) is None


@pytest.mark.parametrize("key", ["live/x/step-zz.json", "live/x.json", "fences/x.json", "live/x/step-0a.json/y"])
def test_other_objects_are_no_heartbeats(key: str) -> None:
    """What lies under `live/`, or `hung/`, for another reason is not taken for a process."""
    assert keys.decode_live_key(key) is None
    assert keys.decode_hung_key(key.replace("live/", "hung/")) is None
