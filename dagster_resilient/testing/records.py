"""What every `RecordStore` must do, as tests that a subclass runs on its own records."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from dagster_resilient.errors import ConfigurationError, IntegrityError, SchemaVersionError
from dagster_resilient.state.store import RecordStore
from dagster_resilient.storage.manifest import Record

_ODD = ["%", "%25", "%x", "_", "a_b", "axb", "a+b", "~", "a~b", "a b", "a.b", "a-b", "a=b", "ab", "é", "漢"]


class Note(Record):
    """A small record. Two with one text are equal, as a record and its own retry are."""

    text: str = ""


def _listed(records: RecordStore, prefix: str) -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in records.list(prefix)]


class RecordStoreContract:
    """Subclass it in a test module, and give the fixture `records`: a record store that is empty when a test begins.

    One test also takes the fixture `put_raw`, where there is one: a function that puts a text under a key, as damage
    would leave it::

        class TestMyRecords(RecordStoreContract):
            @pytest.fixture
            def records(self, tmp_path):
                return MyRecords(tmp_path)

    Attributes:
        many: Number of records in the longest listing: more than one page of an answer holds.
    """

    many = 1200

    def test_a_record_is_created_once(self, records: RecordStore) -> None:
        """The first one stands. The same record again is success: it is the writer's own, whose reply was lost."""
        first, other = Note(text="one"), Note(text="two")
        assert records.create("notes/r.json", first)
        assert not records.create("notes/r.json", other)
        assert records.create("notes/r.json", first)
        assert records.get("notes/r.json", Note) == first

    def test_a_deleted_key_is_free(self, records: RecordStore) -> None:
        """Another record can be created there."""
        records.create("notes/r.json", Note(text="one"))
        records.delete(["notes/r.json"])
        assert records.create("notes/r.json", Note(text="two"))
        assert records.get("notes/r.json", Note) == Note(text="two")

    def test_of_racing_creates_one_wins(self, records: RecordStore) -> None:
        """Each of eight threads creates the same key; exactly one is told that it did, and its record stands."""
        together = threading.Barrier(8)

        def create(n: int) -> bool:
            together.wait(timeout=30)
            return records.create("race/r.json", Note(text=str(n)))

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert won.count(True) == 1
        assert records.get("race/r.json", Note) == Note(text=str(won.index(True)))

    def test_absence_is_none(self, records: RecordStore) -> None:
        """Nothing else is: see the next test."""
        records.create("notes/r.json", Note())
        assert records.get("notes/absent.json", Note) is None
        assert records.get("absent/r.json", Note) is None

    def test_a_broken_record_is_an_error(self, records: RecordStore, request: pytest.FixtureRequest) -> None:
        """What cannot be read, or is of a newer version, is never taken for absence. The message names the record."""
        try:
            put_raw: Callable[[str, str], None] = request.getfixturevalue("put_raw")
        except pytest.FixtureLookupError:
            pytest.skip("there is no fixture `put_raw`")
        put_raw("notes/torn.json", '{"text": "r"')
        put_raw("notes/newer.json", '{"schema_version": 99, "text": "r"}')
        with pytest.raises(IntegrityError, match=re.escape(f"{records.url}/notes/torn.json")):
            records.get("notes/torn.json", Note)
        with pytest.raises(SchemaVersionError, match=re.escape(f"{records.url}/notes/newer.json")):
            records.get("notes/newer.json", Note)

    def test_a_record_comes_back_equal(self, records: RecordStore) -> None:
        """Every letter that JSON can hold, also those that a database might take for its own."""
        odd = Note(text="'; DROP TABLE resilient_records; -- %s :key \\ \0 \u2028 漢字 🚀 \n")
        records.create("odd/r.json", odd)
        assert records.get("odd/r.json", Note) == odd

    def test_records_are_listed_in_order_and_deleted_by_name(self, records: RecordStore) -> None:
        """What is not there is no error to delete; what was not named stays."""
        for name in ("b", "a", "c"):
            records.create(f"x/{name}.json", Note(text=name))
        assert _listed(records, "x/") == ["x/a.json", "x/b.json", "x/c.json"]
        records.delete(["x/a.json", "x/absent.json"])
        assert _listed(records, "x/") == ["x/b.json", "x/c.json"]
        records.delete([])
        assert records.get("x/a.json", Note) is None

    def test_keys_are_taken_literally(self, records: RecordStore) -> None:
        """No letter is a pattern, and each key is a record of its own, told apart also in listing and deleting."""
        for name in _ODD:
            assert records.create(f"k/{name}/r.json", Note(text=name))
        for name in _ODD:
            assert records.get(f"k/{name}/r.json", Note) == Note(text=name)
            assert _listed(records, f"k/{name}/") == [f"k/{name}/r.json"]
        records.delete(["k/%/r.json", "k/_/r.json", "k/a_b/r.json"])
        kept = [name for name in _ODD if name not in {"%", "_", "a_b"}]
        assert sorted(_listed(records, "k/")) == sorted(f"k/{name}/r.json" for name in kept)

    def test_a_prefix_ends_at_its_slash(self, records: RecordStore) -> None:
        """Siblings whose names begin alike are not under it, and neither is the record of that very name."""
        inside = ["a/b/1", "a/b/c/2"]
        outside = ["a/b-c", "a/b.json", "a/b0", "a/bb/1", "a/B/1", "A/b/1", "b/a/b/1"]
        for key in [*inside, *outside]:
            records.create(key, Note(text=key))
        assert _listed(records, "a/b/") == inside
        assert _listed(records, "a/none/") == []
        assert len(records.list("")) == len(inside) + len(outside)
        with pytest.raises(ConfigurationError, match="slash"):
            records.list("a/b")

    def test_a_long_listing_is_whole_and_in_bytewise_order(self, records: RecordStore) -> None:
        """More than a page of any store, and in an order that no language's collation would give."""
        letters = ("a", "b", "-", "_", "~", ".x")
        names = [f"many/{letters[n % len(letters)]}{n // len(letters)}.json" for n in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(lambda name: records.create(name, Note(text=name)), names))
        assert _listed(records, "many/") == sorted(names, key=str.encode)
        records.delete(names[:-100])
        assert _listed(records, "many/") == sorted(names[-100:], key=str.encode)

    def test_sizes_and_times_are_the_stores(self, records: RecordStore) -> None:
        """The size of the body in bytes; the time with its zone, by a clock that goes on between two writes."""
        records.create("t/1", Note(text="漢"))
        time.sleep(1.1)  # some stores keep whole seconds
        records.create("t/2", Note())
        first, second = records.list("t/")
        assert first.size == len(Note(text="漢").to_bytes())
        assert first.last_modified.utcoffset() == timedelta(0)
        assert timedelta(0) < second.last_modified - first.last_modified < timedelta(minutes=5)

    @pytest.mark.parametrize("key", ["", "/a", "a//b", "a/../b", "a/.", "a\0b"])
    def test_what_is_no_key_is_refused(self, records: RecordStore, key: str) -> None:
        """By every kind of records alike."""
        calls: list[Callable[[], object]] = [
            *(lambda: records.create(key, Note()), lambda: records.get(key, Note), lambda: records.delete([key])),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError):
                call()
