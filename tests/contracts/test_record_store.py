"""Records: one suite for object stores and SQL databases; then tables, forks, URLs, and SQLite."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import sqlite3
import stat
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from dagster_resilient.errors import (
    ConfigurationError,
    IntegrityError,
    SchemaVersionError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.state import sql_database, sql_dialects
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


def as_nobody(work: Callable[[], None], tmp_path: Path) -> int | None:
    """Run work in a process of a user with no rights of its own; return its exit code."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.stat().st_mode & 0o777 == stat.S_IRWXU:
            folder.chmod(0o755)

    def child() -> None:
        os.setresuid(65534, 65534, 65534)
        work()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    process.kill()
    return process.exitcode


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


# ---- SQLite


def open_files(folder: Path) -> list[str]:
    """What this process has open below a folder."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(handle))
    return [name for name in found if name.startswith(f"{folder}/")]


def test_sqlite_files_are_opened_once_and_closed_with_the_last_user(sqlite_url: str, tmp_path: Path) -> None:
    """Ten openings hold as many files as one, by whatever spelling of the path; none stays open behind the last."""
    many = [open_records(sqlite_url)]
    many[0].create("a/1", fence())
    one = open_files(tmp_path)
    assert one
    for url in (sqlite_url, sqlite_url.replace("/state/", "/other/../state/"), f"sqlite+pysqlite{sqlite_url[6:]}"):
        many += [open_records(url) for _ in range(3)]
    assert [records.get("a/1", Fence) for records in many] == [fence()] * 10
    assert open_files(tmp_path) == one
    many.clear()
    assert open_files(tmp_path) == []


def test_a_forked_process_that_drops_its_records_leaves_those_of_its_parent(sqlite_url: str) -> None:
    """It closes its own connections alone: to close an inherited one would drop the parent's locks."""
    held = [open_records(sqlite_url)]
    held[0].create("a/1", fence())

    def work() -> None:
        inherited = next(iter(held[0]._database._engines.values()))
        assert held[0].get("a/1", Fence) == fence()
        held.clear()
        assert inherited.pool.checkedin() == 1

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0
    assert held[0].create("a/2", fence())


def test_a_commit_to_sqlite_is_synced_before_it_is_acknowledged(sqlite_url: str) -> None:
    """Write-ahead logging, with at least synchronous=FULL (2) on each connection."""
    records = open_records(sqlite_url)
    modes = records._database.run(
        "ask", "", lambda c: [c.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
    )
    assert modes[0] == "wal"
    assert modes[1] >= 2


def test_a_locked_sqlite_file_is_waited_for(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer's transaction delays ours, and stops no reader. It is unavailable only when the patience ends."""
    monkeypatch.setattr(sql_dialects, "_SQLITE_WAIT", 0.05)
    records = open_records(sqlite_url)
    records.create("a/1", fence())
    path = sqlite_url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match=r"records\.db/a/2: database is locked"):
            records.with_patience(0.0).create("a/2", fence())
        assert records.get("a/1", Fence) == fence()
        release = threading.Timer(0.3, other.rollback)
        release.start()
        assert records.create("a/2", fence())
        release.join()


def test_a_full_disk_is_final_and_named(sqlite_url: str) -> None:
    """It is no outage that waiting ends; what was there before can be read."""
    records = open_records(sqlite_url)
    records.create("a/1", fence())
    records._database.run("limit", "", lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1") and None)
    with pytest.raises(StorageError, match=r"records\.db/a/2: database or disk is full") as caught:
        records.create("a/2", fence("x" * 100_000))
    assert type(caught.value) is StorageError
    assert records.get("a/1", Fence) == fence()


def test_a_file_that_is_no_database_is_an_integrity_error(sqlite_url: str) -> None:
    """Never taken for "no records"."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    path.parent.mkdir()
    path.write_text("no database, but a text that is longer than the header of one would be. " * 20)
    with pytest.raises(IntegrityError, match=r"not a database.*backup"):
        open_records(sqlite_url).get("a/1", Fence)


def test_a_folder_in_place_of_the_file_is_final(tmp_path: Path) -> None:
    """Waiting does not change it."""
    with pytest.raises(StorageError, match="unable to open") as caught:
        open_records(f"sqlite:///{tmp_path}").list("")
    assert type(caught.value) is StorageError


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_vanished_is_an_outage_and_never_made_anew(sqlite_url: str, replaced: bool) -> None:
    """A new and empty one would hide every fence. When the file is back, the records go on."""
    folder = Path(sqlite_url.removeprefix("sqlite:///")).parent
    records = open_records(sqlite_url).with_patience(0.0)
    records.create("a/1", fence())
    kept = folder.rename(folder.with_name("kept"))
    if replaced:
        with elsewhere():
            open_records(sqlite_url).create("b/1", fence())
    for call in (lambda: records.get("a/1", Fence), lambda: records.create("a/2", fence()), lambda: records.list("")):
        with pytest.raises(StoreUnavailableError, match="vanished or was replaced"):
            call()
    assert folder.exists() == replaced
    if replaced:
        shutil.rmtree(folder)
    kept.rename(folder)
    assert records.get("a/1", Fence) == fence()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_file_that_may_not_be_written_is_a_refusal(tmp_path: Path) -> None:
    """Not an outage: the rights must be changed."""
    url = f"sqlite:///{tmp_path}/r.db"
    open_records(url).create("a/1", fence())

    def work() -> None:
        with pytest.raises(StoragePermissionError, match=r"r\.db/a/2"):
            open_records(url).create("a/2", fence())

    assert as_nobody(work, tmp_path) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "name"), [(0o000, "r.db"), (0o000, "below/r.db"), (0o555, "r.db"), (0o555, "x/r.db")])
def test_a_folder_without_rights_is_a_refusal(tmp_path: Path, mode: int, name: str) -> None:
    """Whether it may not be looked into or not be written; at once, though the patience is long."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, 65534, 65534)

    def work() -> None:
        for call in (lambda: records.list(""), lambda: records.create("a/2", fence())):
            with pytest.raises(StoragePermissionError, match="closed") as caught:
                call()
            assert (caught.value.store, type(caught.value)) == (records.url, StoragePermissionError)

    records = open_records(f"sqlite:///{folder}/{name}").with_patience(600.0)
    assert as_nobody(work, tmp_path) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_that_is_closed_later_is_a_refusal(tmp_path: Path) -> None:
    """Also for who used the file before: it has not vanished."""
    folder = tmp_path / "closed"
    folder.mkdir()
    os.chown(folder, 65534, 65534)

    def work() -> None:
        records = open_records(f"sqlite:///{folder}/r.db").with_patience(600.0)
        assert records.create("a/1", fence())
        folder.chmod(0o000)
        with pytest.raises(StoragePermissionError, match="closed"):
            records.get("a/1", Fence)
        folder.chmod(0o700)
        assert records.get("a/1", Fence) == fence()

    assert as_nobody(work, tmp_path) == 0


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    """By its name: below a file, or where no folder can be. Waiting does not change it."""
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for folder in (f"{tmp_path}/file", f"{tmp_path}/file/below", f"{tmp_path}/dangling", "/proc/nowhere"):
        with pytest.raises(ConfigurationError, match=f"{folder} cannot be made"):
            open_records(f"sqlite:///{folder}/r.db").with_patience(600.0).list("")


def test_a_folder_that_holds_no_files_is_refused_at_once() -> None:
    """It is there, and root may write to it, but no file can be made in it."""
    with pytest.raises((ConfigurationError, StoragePermissionError), match="/proc/self"):
        open_records("sqlite:////proc/self/r.db").with_patience(600.0).list("")


def test_too_many_open_files_are_an_outage(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite says no more than that it cannot open the file; that passes, also at the first use."""

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def cannot_open(*_: object, **__: object) -> Any:
        error = sqlite3.OperationalError("unable to open database file")
        error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
        raise error

    monkeypatch.setattr(sql_dialects.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(sqlite3, "connect", cannot_open)
    with pytest.raises(StoreUnavailableError, match="unable to open"):
        open_records(sqlite_url).with_patience(0.0).list("")


def test_a_relative_path_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the process changes its directory before the first use."""
    monkeypatch.chdir(tmp_path)
    records = open_records("sqlite:///r.db")
    assert records.url == f"sqlite:///{tmp_path}/r.db"
    monkeypatch.chdir("/")
    records.create("a/1", fence())
    assert (tmp_path / "r.db").exists()
