"""The half of `stores.ObjectStoreContract` that is about reading, listing and names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from dagster_resilient.errors import ConfigurationError, ObjectNotFoundError, StorageError
from dagster_resilient.storage import keys
from dagster_resilient.storage.object_store import ObjectStore

Opener = Callable[[], ObjectStore]

_SPECIAL = [
    *("a/%2E%2E/b", "a/%", "a/%25", "a/%2F", "a/+", "a/ ", "a/a b", "a/#", "a/x#y", "a/?", "a/&=,;[]*", "a/~'\""),
    *("a/é", "a/😀"),
]
_UNFIT = ["", "/a", "a/", "a//b", ".", "a/..", "../a", "a/./b", "a/b#12", "a\x00b"]
# Names of partitions that other IO managers confuse, lose, or let leave their folder.
_NAMES = [
    *("0.94-to-0.95", "0.94-to-0.96", "a.parquet", "a", "a/b", "/x", "%2Fx", "..", "%2E%2E", "../../etc/x", "."),
    *("x/y|z", "x|y/z", "A", "é", "e\u0301", "a\nb", "a\tb", "a\x00", "", " ", "[x]", "a*b", "#", "?", "%", "+", "&"),
    *("=", ",", ";", "a%b=1", "partition/", "b=2", "😀", "k" * 300, "k" * 280 + "1" * 20, "漢" * 300, "漢" * 299),
]


def names(store: ObjectStore, prefix: str = "", start_after: str | None = None) -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in store.list(prefix, start_after)]


class ReadingContract:
    """Reading, listing, deleting and names.

    Attributes:
        big: Bytes of the largest object that is written: more than goes into one part of an upload.
        many: Number of objects in the longest listing: more than one page of an answer holds.
    """

    big = 20_000_000
    many = 1105

    @pytest.fixture
    def opener(self) -> Opener:
        """Return what opens the place; to be given by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture `opener`; see ObjectStoreContract.")

    @pytest.fixture
    def store(self, opener: Opener) -> ObjectStore:
        """One handle on the empty place."""
        return opener()

    # ---- reading

    @pytest.mark.parametrize("key", ["absent", "folder", "folder/object/below"])
    def test_reading_what_is_not_there(self, store: ObjectStore, key: str) -> None:
        """It is our error and the builtin one, and names the object. A prefix is no object, nor what is below one."""
        store.put("folder/object", b"1")
        reads: list[Callable[[], object]] = [
            *(lambda: store.get(key), lambda: store.head(key), lambda: store.get_ranges(key, [(0, 1)])),
        ]
        for read in reads:
            with pytest.raises(ObjectNotFoundError, match=re.escape(f"{store.url}/{key}")) as caught:
                read()
            assert isinstance(caught.value, FileNotFoundError)
            assert (caught.value.store, caught.value.key) == (store.url, key)

    def test_head_tells_size_and_time(self, store: ObjectStore) -> None:
        """The time is the store's, with a time zone, and a later write is not older."""
        store.put("a", b"12345")
        store.put("b", b"")
        first, second = store.head("a"), store.head("b")
        assert (first.key, first.size) == ("a", len(b"12345"))
        assert first.last_modified.utcoffset() is not None
        assert first.last_modified <= second.last_modified

    def test_a_rewritten_object_is_no_older_than_what_came_before(self, store: ObjectStore) -> None:
        """The time is that of the last write, not of the first: what is old enough to go is told by it."""
        store.put("a", b"1")
        store.put("b", b"1")
        store.put("a", b"2")
        assert store.head("a").last_modified >= store.head("b").last_modified

    def test_head_and_list_tell_the_same(self, store: ObjectStore) -> None:
        """Size and time of each object. One of the two may leave out the fraction of a second, as S3's HEAD does."""
        for key in ("p/a", "p/b"):
            store.put(key, key.encode() * 3)
        store.put("p/a", b"shorter")
        for listed in store.list("p/"):
            asked = store.head(listed.key)
            assert (asked.key, asked.size) == (listed.key, listed.size)
            assert abs(asked.last_modified - listed.last_modified) <= timedelta(seconds=1)

    def test_get_ranges_returns_each_range_in_the_order_asked_for(self, store: ObjectStore) -> None:
        """Half-open, in any order, overlapping, empty, or none."""
        store.put("a", b"0123456789")
        assert store.get_ranges("a", [(4, 6), (0, 3), (2, 5), (7, 7), (9, 10)]) == [b"45", b"012", b"234", b"", b"9"]
        assert store.get_ranges("a", []) == []

    @pytest.mark.parametrize("ranges", [[(8, 11)], [(0, 1), (20, 30)]], ids=["across the end", "behind the end"])
    def test_get_ranges_never_returns_less_than_asked_for(
        self, store: ObjectStore, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """A range beyond the end is an error that names the object: a short read is never taken for data."""
        store.put("a", b"0123456789")
        with pytest.raises(StorageError, match=re.escape(f"{store.url}/a")):
            store.get_ranges("a", ranges)

    # ---- listing and deleting

    def test_list_yields_what_is_under_a_prefix_in_order(self, store: ObjectStore) -> None:
        """Only keys below the prefix, whatever their depth, in order of key, with sizes; siblings of like names not."""
        written = ["p/b", "p/a", "p/c/deep/er", "pq/x", "p.x", "o/y"]
        for key in written:
            store.put(key, key.encode())
        assert names(store, "p/") == ["p/a", "p/b", "p/c/deep/er"]
        assert names(store, "p/c/") == ["p/c/deep/er"]
        assert names(store) == sorted(written)
        assert [info.size for info in store.list("p/")] == [len(key) for key in names(store, "p/")]
        assert names(store, "absent/") == []

    def test_an_empty_store_lists_nothing(self, store: ObjectStore) -> None:
        """A place that was never written to is an empty store, no error."""
        assert names(store) == []

    def test_list_starts_after_a_name_of_fixed_width(self, store: ObjectStore) -> None:
        """Only greater names are shown, whether or not the named one exists."""
        one, two, three, ten, between, twenty = (f"log/{keys.numbered(n)}.json" for n in (1, 2, 3, 10, 15, 20))
        for key in (one, two, three, ten, twenty):
            store.put(key, b"")
        assert names(store, "log/", two) == [three, ten, twenty]
        assert names(store, "log/", between) == [twenty]
        assert names(store, "log/", twenty) == []

    def test_list_takes_a_folder_like_prefix_only(self, store: ObjectStore) -> None:
        """Stores disagree on what half a name means, so it is refused."""
        with pytest.raises(ConfigurationError, match="'half'"):
            list(store.list("half"))

    def test_a_listing_and_a_delete_have_no_limit(self, store: ObjectStore) -> None:
        """What fills more than one page of an answer is shown whole and in order, and goes in one call."""
        written = [f"many/{keys.numbered(n)}" for n in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b""), written))
        assert names(store, "many/") == written
        store.delete(written[1:])
        assert names(store) == written[:1]

    def test_delete_takes_exactly_the_keys_named(self, store: ObjectStore) -> None:
        """No patterns, no prefixes: what only looks like the key stays. A key that is not there is no error."""
        kept = ["ab", "axb", "a/b", "[x]", "folder/one"]
        for key in [*kept, "a*b"]:
            store.put(key, b"1")
        store.delete(["a*b", "x*", "[ab]", "folder", "ab/c", "absent"])
        assert names(store) == sorted(kept)
        store.delete([])
        assert names(store) == sorted(kept)

    def test_objects_are_no_leftovers(self, store: ObjectStore) -> None:
        """What is whole, large or deleted is never offered for removal."""
        store.put("small", b"1")
        store.put("big", bytes(self.big))
        store.delete(["small"])
        assert list(store.leftovers()) == []

    # ---- keys

    def test_keys_keep_every_character(self, store: ObjectStore) -> None:
        """What a key contains comes back from a listing as it was, and stays apart from what it resembles."""
        for key in _SPECIAL:
            store.put(key, key.encode())
        assert names(store, "a/") == sorted(_SPECIAL)
        assert [store.get(key).decode() for key in _SPECIAL] == _SPECIAL
        store.delete(_SPECIAL[::2])
        assert names(store, "a/") == sorted(_SPECIAL[1::2])

    def test_every_name_of_a_partition_is_an_object_of_its_own(self, store: ObjectStore) -> None:
        """Whatever it is called: long, empty, a path, in two cases, in two forms of Unicode."""
        where = {text: f"tasks/{keys.asset_segment(['asset', text])}/{keys.encode_segment(text)}/1" for text in _NAMES}
        for text, key in where.items():
            store.create(key, text.encode())
        assert names(store) == sorted(where.values())
        assert [store.get(key).decode() for key in where.values()] == _NAMES

    @pytest.mark.parametrize("key", _UNFIT)
    def test_keys_that_some_store_cannot_hold_are_refused_by_all(self, store: ObjectStore, key: str) -> None:
        """No key leaves the root, and none works on one store only. Nothing is written."""
        calls: list[Callable[[], object]] = [
            *(lambda: store.put(key, b"1"), lambda: store.create(key, b"1"), lambda: store.delete([key])),
            *(lambda: store.get(key), lambda: store.head(key), lambda: store.get_ranges(key, [(0, 1)])),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError):
                call()
        assert names(store) == []
