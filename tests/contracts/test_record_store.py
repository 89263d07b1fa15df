"""Records: one suite for object stores and SQL databases; then tables, forks and URLs."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from dagster_resilient.errors import (
    ConfigurationError,
    IntegrityError,
    SchemaVersionError,
)
from dagster_resilient.state import sql_database
from dagster_resilient.state.records import Fence
from dagster_resilient.state.sql_store import open_records
from dagster_resilient.state.store import RecordStore
from dagster_resilient.testing import RecordStoreContract

PutRaw = Callable[[str, str], None]


def fence(reason: str = "") -> Fence:
    """A small record; one reason gives equal ones."""
    return Fence(run_id="r", reason=reason, failure_class="lost", by="test", op=f"op {reason}")


def listed(records: RecordStore, prefix: str) -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in records.list(prefix)]


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Inside the block, what is opened has nothing in common with what is open: as in another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql_database._Shared, "databases", weakref.WeakValueDictionary())
        yield


# ---- the suite


class TestRecords(RecordStoreContract):
    """The shipped contract, on every kind of records; `records` and `put_raw` are fixtures of all tests."""


def test_a_broken_record_says_what_to_do(records: RecordStore, put_raw: PutRaw) -> None:
    """Beside its name: restore it, or begin anew; or upgrade."""
    put_raw("fences/torn.json", '{"run_id": "r"')
    put_raw("fences/newer.json", '{"schema_version": 99, "run_id": "r"}')
    with pytest.raises(IntegrityError, match=r"valid Fence: [^\n]*[^.]\. Restore this [^\n]*backup"):
        records.get("fences/torn.json", Fence)
    with pytest.raises(SchemaVersionError, match="Upgrade"):
        records.get("fences/newer.json", Fence)


# ---- both databases


def test_times_are_finer_than_a_second(sql_url: str) -> None:
    """A log is trimmed by them, and an owner's age is told from them."""
    records = open_records(sql_url)
    for n in range(20):
        records.create(f"t/{n:02d}", fence())
    times = [info.last_modified for info in records.list("t/")]
    assert times == sorted(times)
    assert len({moment.microsecond // 1000 for moment in times}) > 1
    assert all(abs(moment - datetime.now(UTC)) < timedelta(minutes=5) for moment in times)


def test_the_tables_are_made_by_who_comes_first(sql_url: str) -> None:
    """Twenty processes use an empty database at once: none fails, and every record is there."""
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(20)

    def work(n: int) -> None:
        together.wait(timeout=60)
        assert open_records(sql_url).create(f"p/{n}", fence(str(n)))

    processes = [fork.Process(target=work, args=(n,)) for n in range(20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 20
    assert len(open_records(sql_url).list("p/")) == 20


def test_a_forked_process_has_connections_of_its_own(sql_url: str) -> None:
    """Parent and child go on side by side with the records that the parent opened, and neither sees the other's end."""
    records = open_records(sql_url)
    records.create("f/before", fence())

    def work() -> None:
        for n in range(20):
            assert records.create(f"f/child-{n:02d}", fence(str(n)))
        assert records.get("f/before", Fence) == fence()

    child = multiprocessing.get_context("fork").Process(target=work)
    pool: Any = records._database._engine().pool
    with pool._pool.mutex:  # as if another thread were just taking a connection
        child.start()
    for n in range(20):
        assert records.create(f"f/parent-{n:02d}", fence(str(n)))
    child.join(30)
    child.kill()
    assert child.exitcode == 0
    assert records.create("f/after", fence())
    assert len(records.list("f/")) == 42


def test_newer_tables_are_refused(sql_url: str) -> None:
    """A newer library may mean something else by them: nothing is read from them or written to them."""
    first = open_records(sql_url)
    first.create("a/1", fence())
    first._database.run("raise", "", lambda c: c.execute(sa.text("INSERT INTO resilient_schema VALUES (2)")) and None)
    with elsewhere():
        records = open_records(sql_url)
    for call in (lambda: records.get("a/1", Fence), lambda: records.create("a/2", fence()), lambda: records.list("")):
        with pytest.raises(SchemaVersionError, match=r"version 2.*up to 1.*Upgrade"):
            call()
    assert listed(first, "") == ["a/1"]


def test_half_made_tables_are_completed(sql_url: str) -> None:
    """A process that died while it made them leaves nothing that stops the next one."""
    records = open_records(sql_url)
    records.create("a/1", fence())
    records._database.run("damage", "", lambda c: c.execute(sa.text("DELETE FROM resilient_schema")) and None)
    with elsewhere():
        again = open_records(sql_url)
    assert again.create("a/2", fence())
    assert listed(again, "") == ["a/1", "a/2"]


def test_patience_is_shared_with_nobody(sql_url: str) -> None:
    """`with_patience` returns the same records with another bound, and leaves the first as they were."""
    records = open_records(sql_url)
    hasty = records.with_patience(0.0)
    assert (hasty._patience, records._patience) == (0.0, 60.0)
    assert hasty.create("a/1", fence())
    assert listed(records, "") == ["a/1"]
    assert repr(hasty) == repr(records) == f"SqlRecords('{records.url}')"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://u:canary-secret@h/db", "'mysql'.*sqlite.*postgresql"),
        ("postgresql+asyncpg://u:canary-secret@h/db", r"'postgresql\+asyncpg'"),
        ("postgres://u:canary-secret@h/db", "'postgres'.*postgresql://"),
        ("sqlite://", "memory"),
        ("sqlite:///:memory:", "memory"),
        ("sqlite:///file:x?mode=memory&uri=true", "path alone"),
        ("sqlite://host/x.db", "path alone"),
        ("just words", "cannot be read"),
        ("", "cannot be read"),
        ("postgresql://u:canary-secret@h:port/db", "cannot be read"),
        ("postgresql://u:canary@secret@h/db", "%40"),
        ("postgresql://u:canary@sec/ret@h/db", "%40"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(url: str, reason: str) -> None:
    """By name and with what to write instead; what may be a password is not repeated."""
    with pytest.raises(ConfigurationError, match=reason) as caught:
        open_records(url)
    shown = "".join(traceback.format_exception(caught.value))
    assert "canary" not in shown.replace(repr(url), "")


def test_all_that_is_open_of_one_url_shares_connections(sql_url: str) -> None:
    """Whatever their patience; another database has its own, and what nobody has any more is opened anew."""
    many = [open_records(sql_url).with_patience(float(n)) for n in range(10)]
    assert len({id(records._database) for records in many}) == 1
    with elsewhere():
        assert open_records(sql_url)._database is not many[0]._database
    assert open_records("sqlite:////elsewhere/r.db")._database is not many[0]._database
    gone = weakref.ref(many[0]._database)
    many.clear()
    assert gone() is None
