"""Records in SQLite: durability, locks, files that are full, broken, gone or out of reach, and what stays open."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from test_record_store import elsewhere, fence

from dagster_resilient.errors import (
    ConfigurationError,
    IntegrityError,
    StorageError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.state import sql_dialects
from dagster_resilient.state.records import Fence
from dagster_resilient.state.sql_store import open_records


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


def open_files(folder: Path) -> list[str]:
    """What this process has open below a folder."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(str(handle.readlink()))
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


def test_too_many_open_files_are_an_outage(sqlite_url: str) -> None:
    """SQLite says no more than that it cannot open the file; that passes, also at the first use."""

    def work() -> None:
        assert open_records(f"{sqlite_url}.other").list("") == []  # all code is loaded
        highest = max(int(handle.name) for handle in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(Path(os.devnull).open())  # noqa: SIM115 - they are to stay open
        with pytest.raises(StoreUnavailableError, match="unable to open"):
            open_records(sqlite_url).with_patience(0.0).list("")
        held.clear()
        assert open_records(sqlite_url).list("") == []

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0


def test_a_relative_path_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the process changes its directory before the first use."""
    monkeypatch.chdir(tmp_path)
    records = open_records("sqlite:///r.db")
    assert records.url == f"sqlite:///{tmp_path}/r.db"
    monkeypatch.chdir("/")
    records.create("a/1", fence())
    assert (tmp_path / "r.db").exists()
