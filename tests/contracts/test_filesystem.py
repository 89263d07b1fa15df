"""A store as an fsspec filesystem: what it promises, and the libraries that use it."""

from __future__ import annotations

import io
import logging
import pickle
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from dagster_resilient.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoragePermissionError,
    StoreUnavailableError,
)
from dagster_resilient.storage.filesystem import StoreFileSystem
from dagster_resilient.storage.object_store import ObjectStore, open_store

RunPython = Callable[..., str]


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """An empty store."""
    if request.param == "s3":
        found: ObjectStore = request.getfixturevalue("s3_store")
        return found
    return open_store(
        f"memory://{uuid.uuid4().hex}" if request.param == "memory" else request.getfixturevalue("local_url")
    )


@pytest.fixture
def fs(store: ObjectStore) -> StoreFileSystem:
    """Its view."""
    return store.filesystem()  # type: ignore[no-any-return]


def keys_of(store: ObjectStore) -> list[str]:
    """All keys."""
    return [info.key for info in store.list("")]


def fail(*_: Any) -> Any:
    """In the place of a method of a store."""
    raise StoreUnavailableError("gone")


# ---- looking


def test_directories_are_what_keys_have_in_common(fs: StoreFileSystem) -> None:
    """They are listed, typed and walked as fsspec does, without having been made."""
    for key in ("a/b/one", "a/b/two", "a/three", "four"):
        fs.pipe_file(key, key.encode())
    assert fs.ls("", detail=False) == ["a", "four"]
    assert fs.ls("a", detail=False) == ["a/b", "a/three"]
    assert [(info["name"], info["type"], info["size"]) for info in fs.ls("a")] == [
        ("a/b", "directory", 0),
        ("a/three", "file", 7),
    ]
    assert fs.ls("four", detail=False) == ["four"]
    assert list(fs.walk("a")) == [("a", ["b"], ["three"]), ("a/b", [], ["one", "two"])]
    assert fs.find("a") == ["a/b/one", "a/b/two", "a/three"]
    assert fs.find("a", maxdepth=1, withdirs=True) == ["a", "a/b", "a/three"]
    assert fs.find("four") == ["four"]
    assert fs.glob("a/*/t*") == ["a/b/two"]
    assert fs.du("a") == 21
    assert (fs.isdir("a/b"), fs.isfile("a/b"), fs.isdir("a/b/one"), fs.isfile("a/b/one")) == (True, False, False, True)


def test_what_is_not_there(fs: StoreFileSystem) -> None:
    """It is FileNotFoundError, or "no", and never an empty file or directory."""
    fs.pipe_file("a/b", b"1")
    calls: list[Callable[[str], Any]] = [fs.info, fs.ls, fs.cat_file, fs.modified, fs.open, fs.rm]
    for call in calls:
        with pytest.raises(FileNotFoundError, match="absent"):
            call("absent")
    with pytest.raises(FileNotFoundError):
        fs.open("a", "rb")
    assert (fs.exists("absent"), fs.isfile("absent"), fs.isdir("absent")) == (False, False, False)
    assert fs.find("absent") == fs.glob("absent/*") == list(fs.walk("absent")) == []
    assert fs.ls("") != []


def test_the_root_of_an_empty_store_is_an_empty_directory(fs: StoreFileSystem) -> None:
    """Nothing needs to be made before the first file is written."""
    assert fs.isdir("")
    assert fs.ls("") == fs.find("") == []
    fs.makedirs("a/b", exist_ok=True)
    fs.mkdir("c")
    assert fs.ls("") == []


def test_what_another_one_wrote_is_seen_at_once(fs: StoreFileSystem, store: ObjectStore) -> None:
    """Nothing is remembered from an earlier look (G01)."""
    assert not fs.exists("a/b")
    assert fs.find("a") == []
    store.put("a/b", b"12")
    assert fs.exists("a/b")
    assert fs.ls("a", detail=False) == ["a/b"]
    store.put("a/b", b"123")
    assert fs.size("a/b") == 3
    store.delete(["a/b"])
    assert not fs.exists("a")


def test_times_have_a_zone(fs: StoreFileSystem) -> None:
    """`modified` and `info` tell the store's time."""
    fs.pipe_file("a", b"1")
    assert abs(fs.modified("a") - datetime.now(UTC)) < timedelta(hours=1)
    assert fs.info("a")["mtime"] == fs.modified("a") == fs.created("a")


@pytest.mark.parametrize("path", ["/a", "a//b", "../a", "a/../b", "a/part#1"])
def test_what_is_no_key_is_refused(fs: StoreFileSystem, path: str) -> None:
    """No path leaves the root, and none means another one."""
    for call in (fs.info, fs.ls, fs.exists, fs.cat_file, fs.rm, fs.rm_file, lambda p: fs.pipe_file(p, b"1")):
        with pytest.raises(ConfigurationError):
            call(path)


def test_a_path_may_carry_the_protocol_and_a_slash_at_its_end(fs: StoreFileSystem) -> None:
    """As other libraries spell it."""
    fs.pipe_file("resilient://a/b", b"1")
    assert fs.ls("resilient://a/") == fs.ls("a")
    assert fs.cat("resilient://a/b") == b"1"


class Refusing(ObjectStore):
    """Answers every read with one error."""

    url = "test://refusing"

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def _refuse(self, *_: Any) -> Any:
        raise self.error("refused", store=self.url, key=None)  # type: ignore[call-arg]

    get = get_ranges = head = list = put = create = delete = sidecar_config = _refuse


@pytest.mark.parametrize("error", [StoragePermissionError, StoreUnavailableError])
def test_a_store_that_refuses_is_never_an_empty_one(error: type[Exception]) -> None:
    """By its own rules fsspec would answer "no" and "nothing"."""
    fs = Refusing(error).filesystem()
    for call in (fs.exists, fs.isfile, fs.isdir, fs.ls, fs.find, fs.info, lambda p: list(fs.walk(p)), fs.rm):
        with pytest.raises(error):
            call("a")


# ---- reading


def test_parts_are_read_as_slices(fs: StoreFileSystem) -> None:
    """From the front, from the back, and beyond the end."""
    fs.pipe_file("a", b"0123456789")
    for start, end in [(2, 5), (None, 3), (7, None), (-3, None), (2, -2), (8, 20), (20, 30), (4, 4), (5, 2)]:
        assert fs.cat_file("a", start, end) == b"0123456789"[start:end]
    assert fs.head("a", 4) == b"0123"
    assert fs.tail("a", 4) == b"6789"
    assert fs.read_block("a", 2, 3) == b"234"


def test_ranges_of_several_objects(fs: StoreFileSystem) -> None:
    """Each in its place, also where one is missing or ends early."""
    fs.pipe({"a": b"0123456789", "b": b"abcdef"})
    assert fs.cat_ranges(["a", "b", "a"], [0, 1, 8], [2, 3, 99]) == [b"01", b"bc", b"89"]
    found = fs.cat_ranges(["a", "absent"], 0, 2)
    assert found[0] == b"01"
    assert isinstance(found[1], ObjectNotFoundError)
    with pytest.raises(ObjectNotFoundError):
        fs.cat_ranges(["absent"], 0, 2, on_error="raise")
    assert fs.cat(["a", "b"]) == {"a": b"0123456789", "b": b"abcdef"}


def test_a_file_is_read_like_any_other(fs: StoreFileSystem) -> None:
    """Seek, tell, lines, small blocks, text."""
    fs.pipe_file("a", b"one\ntwo\nthree")
    with fs.open("a", block_size=4) as file:
        assert file.readline() == b"one\n"
        assert (file.tell(), file.seek(-5, 2), file.read()) == (4, 8, b"three")
    with fs.open("a", "r") as text:
        assert text.read().split() == ["one", "two", "three"]
    fs.pipe_file("empty", b"")
    assert fs.open("empty").read() == b""


def test_a_download_is_whole_or_absent(fs: StoreFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local file that was there stays, and nothing is left beside it, where the store fails in the middle (G11)."""
    fs.pipe_file("a/b", b"1" * 1000)
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "file").write_bytes(b"before")
    monkeypatch.setattr(type(fs.store), "get_ranges", fail)
    with pytest.raises(StoreUnavailableError):
        fs.get_file("a/b", str(folder / "file"))
    assert [path.read_bytes() for path in folder.iterdir()] == [b"before"]
    monkeypatch.undo()
    fs.get_file("a/b", str(folder / "file"))
    assert [path.read_bytes() for path in folder.iterdir()] == [b"1" * 1000]
    assert (folder / "file").stat().st_mode & 0o777 == 0o644


def test_folders_are_copied_both_ways(fs: StoreFileSystem, tmp_path: Path) -> None:
    """`put` and `get` with whole trees."""
    (tmp_path / "here/sub").mkdir(parents=True)
    (tmp_path / "here/one").write_bytes(b"1")
    (tmp_path / "here/sub/two").write_bytes(b"22")
    fs.put(str(tmp_path / "here") + "/", "there/", recursive=True)
    assert fs.find("") == ["there/one", "there/sub/two"]
    fs.get("there/", str(tmp_path / "back") + "/", recursive=True)
    assert LocalFileSystem().find(str(tmp_path / "back")) == [
        str(tmp_path / "back/one"),
        str(tmp_path / "back/sub/two"),
    ]
    stream = io.BytesIO()
    fs.get_file("there/sub/two", stream)
    assert stream.getvalue() == b"22"
    with pytest.raises(ObjectExistsError):
        fs.put_file(str(tmp_path / "here/one"), "there/sub/two", mode="create")


# ---- writing


def test_nothing_is_there_before_a_file_is_closed(fs: StoreFileSystem, store: ObjectStore) -> None:
    """What was there before is read until then."""
    store.put("a", b"before")
    with fs.open("a", "wb") as file:
        assert (file.write(b"12"), file.write(bytearray(b"345")), file.tell()) == (2, 3, 5)
        file.flush()
        assert store.get("a") == b"before"
    assert store.get("a") == b"12345"
    with fs.open("text", "w", encoding="utf-8", newline="\n") as text:
        text.write("é\n")
    assert store.get("text") == "é\n".encode()
    fs.touch("empty")
    assert store.get("empty") == b""


def write_and_fail(file: Any) -> None:
    """Write a little, and come to no end."""
    with file:
        file.write("half" if isinstance(file, io.TextIOBase) else b"half")
        raise RuntimeError("in the middle")


def closing_in_finally(file: Any) -> None:
    """As many libraries do, whatever happened."""
    try:
        file.write(b"half")
        raise RuntimeError("in the middle")
    finally:
        file.close()


def through_arrow(fs: StoreFileSystem) -> None:
    """The writer of pyarrow finishes the file when its block is left by an exception."""
    table = pa.table({"n": [1]})
    arrow = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fs))
    with pa.parquet.ParquetWriter("a", table.schema, filesystem=arrow) as writer:
        writer.write_table(table)
        raise RuntimeError("in the middle")


def through_fsspec(fs: StoreFileSystem) -> None:
    """The `OpenFile` of fsspec closes its files, whatever happened."""
    with fsspec.core.OpenFile(fs, "a", "wb") as file:
        file.write(b"half")
        raise RuntimeError("in the middle")


BROKEN: dict[str, Callable[[StoreFileSystem], None]] = {
    "bytes": lambda fs: write_and_fail(fs.open("a", "wb")),
    "text": lambda fs: write_and_fail(fs.open("a", "w")),
    "exclusive": lambda fs: write_and_fail(fs.open("new", "xb")),
    "closed by fsspec": through_fsspec,
    "finally": lambda fs: closing_in_finally(fs.open("a", "wb")),
    "pyarrow": through_arrow,
}


@pytest.mark.parametrize("write", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_broken_off_is_never_published(
    fs: StoreFileSystem, store: ObjectStore, write: Callable[[StoreFileSystem], None]
) -> None:
    """By an exception inside the block, whoever closes the file then; and the exception is the one that is seen."""
    store.put("a", b"before")
    with pytest.raises(RuntimeError, match="in the middle"):
        write(fs)
    assert keys_of(store) == ["a"]
    assert store.get("a") == b"before"


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_a_forgotten_file_is_not_published(
    fs: StoreFileSystem, store: ObjectStore, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writer has not said that it is done. A warning names it, unless it was text: that passes quietly."""
    with caplog.at_level(logging.WARNING):
        fs.open("a", mode).write(b"1" if mode == "wb" else "1")
    assert keys_of(store) == []
    assert [record.getMessage() for record in caplog.records if "/a)" in record.getMessage()] or mode == "w"


def test_a_file_may_be_written_while_an_older_exception_is_handled(fs: StoreFileSystem, store: ObjectStore) -> None:
    """A report on a failure is published."""
    try:
        raise ValueError("older")  # noqa: TRY301 - it is what this is about
    except ValueError as error:
        with fs.open("report", "w") as file:
            file.write(str(error))
    assert store.get("report") == b"older"


def test_a_close_that_publishes_nothing_is_loud(fs: StoreFileSystem, store: ObjectStore) -> None:
    """In a handler of a newer exception a close raises it again, with a note: no one takes the file for saved."""
    file = fs.open("a", "wb")

    def exhaust() -> None:
        try:
            next(iter([]))
        except StopIteration:
            file.close()

    with pytest.raises(StopIteration) as caught:
        exhaust()
    assert "not published" in caught.value.__notes__[0]
    assert file.closed
    assert keys_of(store) == []


def test_a_store_that_fails_at_the_close_is_an_error() -> None:
    """The writer learns that nothing was published."""
    fs = Refusing(StoreUnavailableError).filesystem()
    file = fs.open("a", "wb")
    with pytest.raises(StoreUnavailableError):
        file.close()
    assert file.closed


def test_create_is_decided_by_the_store(fs: StoreFileSystem, store: ObjectStore) -> None:
    """`pipe_file` and `open` refuse to overwrite where they are asked to."""
    fs.pipe_file("a", b"first", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file("a", b"second", mode="create")
    with pytest.raises(FileExistsError), fs.open("a", "xb") as file:
        file.write(b"second")
    assert store.get("a") == b"first"


def test_a_transaction_publishes_at_its_end(fs: StoreFileSystem, store: ObjectStore) -> None:
    """Files are published at the end of fsspec's transaction, and discarded where it fails."""
    with fs.transaction:
        with fs.open("a", "wb") as file:
            file.write(b"1")
        assert keys_of(store) == []
    assert keys_of(store) == ["a"]

    def break_off() -> None:
        with fs.transaction:
            with fs.open("b", "wb") as file:
                file.write(b"1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert keys_of(store) == ["a"]


@pytest.mark.parametrize("mode", ["ab", "r+b"])
def test_objects_are_not_changed(fs: StoreFileSystem, mode: str) -> None:
    """They are replaced as a whole: there is no append."""
    fs.pipe_file("a", b"1")
    with pytest.raises(NotImplementedError, match="mode"):
        fs.open("a", mode)


def test_a_compressing_file_is_refused(fs: StoreFileSystem) -> None:
    """It would close before its file, and that never."""
    with pytest.raises(ConfigurationError, match="compress"):
        fs.open("a.gz", "wb", compression="gzip")


def test_rm_takes_exact_names(fs: StoreFileSystem, store: ObjectStore) -> None:
    """No patterns, as in fsspec's own. A directory goes only where that is said."""
    for key in ("a*b", "axb", "ab", "d/one", "d/two", "dd"):
        fs.pipe_file(key, b"1")
    fs.rm("a*b")
    with pytest.raises(FileNotFoundError):
        fs.rm("a*")
    with pytest.raises(OSError, match="recursive"):
        fs.rm("d")
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("d")
    fs.rm_file("absent")
    assert keys_of(store) == ["ab", "axb", "d/one", "d/two", "dd"]
    fs.rm(["d", "ab"], recursive=True)
    assert keys_of(store) == ["axb", "dd"]


def test_mv_copies_and_then_deletes(fs: StoreFileSystem, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move that fails between the two leaves the old one readable (G16). Names are exact here too."""
    for key in ("a*b", "axb", "d/one", "d/e/two"):
        fs.pipe_file(key, key.encode())
    fs.mv("a*b", "moved")
    fs.mv("d", "f", recursive=True)
    assert {key: store.get(key) for key in keys_of(store)} == {
        "axb": b"axb",
        "f/e/two": b"d/e/two",
        "f/one": b"d/one",
        "moved": b"a*b",
    }
    monkeypatch.setattr(type(store), "delete", fail)
    with pytest.raises(StoreUnavailableError):
        fs.mv("axb", "y")
    assert store.get("axb") == store.get("y") == b"axb"


def test_cp_copies(fs: StoreFileSystem, store: ObjectStore) -> None:
    """One object, or a tree."""
    fs.pipe({"d/one": b"1", "d/e/two": b"2"})
    fs.cp("d/one", "one")
    fs.cp("d/", "f/", recursive=True)
    assert keys_of(store) == ["d/e/two", "d/one", "f/e/two", "f/one", "one"]
    with pytest.raises(FileNotFoundError):
        fs.cp_file("absent", "x")


# ---- libraries


@pytest.fixture
def frame() -> pd.DataFrame:
    """A small table."""
    return pd.DataFrame({"n": range(1000), "part": ["a", "b"] * 500, "text": [f"row {n}" for n in range(1000)]})


def test_pandas(fs: StoreFileSystem, frame: pd.DataFrame) -> None:
    """Parquet to and from, and CSV through an open file."""
    frame.to_parquet("t/frame.parquet", filesystem=fs)
    pd.testing.assert_frame_equal(pd.read_parquet("t/frame.parquet", filesystem=fs), frame)
    with fs.open("t/frame.csv", "w") as file:
        frame.to_csv(file, index=False)
    with fs.open("t/frame.csv") as file:
        pd.testing.assert_frame_equal(pd.read_csv(file), frame)
    assert pd.read_parquet("t/frame.parquet", filesystem=fs, columns=["n"]).shape == (1000, 1)


def test_pyarrow(fs: StoreFileSystem, frame: pd.DataFrame) -> None:
    """A partitioned dataset is written, found, filtered and replaced."""
    arrow = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fs))
    options: dict[str, Any] = {"format": "parquet", "partitioning": ["part"], "partitioning_flavor": "hive"}
    for _ in range(2):
        pa.dataset.write_dataset(
            pa.Table.from_pandas(frame), "ds", filesystem=arrow, existing_data_behavior="delete_matching", **options
        )
    found = pa.dataset.dataset("ds", filesystem=arrow, format="parquet", partitioning="hive")
    assert sorted(found.files) == ["ds/part=a/part-0.parquet", "ds/part=b/part-0.parquet"]
    assert found.to_table(filter=pa.dataset.field("part") == "b").num_rows == 500
    info = arrow.get_file_info("ds/part=a/part-0.parquet")
    assert (info.type, info.size) == (pa.fs.FileType.File, fs.size("ds/part=a/part-0.parquet"))
    assert arrow.get_file_info("absent").type == pa.fs.FileType.NotFound
    arrow.delete_dir("ds")
    assert fs.find("") == []


def test_torch(fs: StoreFileSystem) -> None:
    """Tensors to and from an open file."""
    tensors = {"w": torch.arange(10_000, dtype=torch.float64), "b": torch.zeros(3)}
    with fs.open("model.pt", "wb") as file:
        torch.save(tensors, file)
    with fs.open("model.pt") as file:
        loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(tensors[name], loaded[name]) for name in tensors)


def test_polars(fs: StoreFileSystem, frame: pd.DataFrame) -> None:
    """Parquet through open files."""
    polars = pytest.importorskip("polars")
    with fs.open("p.parquet", "wb") as file:
        polars.DataFrame({"n": list(range(10))}).write_parquet(file)
    with fs.open("p.parquet") as file:
        assert polars.read_parquet(file)["n"].sum() == 45


def test_duckdb(fs: StoreFileSystem, frame: pd.DataFrame) -> None:
    """SQL over Parquet files, by pattern."""
    duckdb = pytest.importorskip("duckdb")
    frame.to_parquet("t/frame.parquet", filesystem=fs)
    connection = duckdb.connect()
    connection.register_filesystem(fs)
    assert connection.sql("SELECT sum(n) FROM 'resilient://t/*.parquet'").fetchall() == [(499_500,)]


# ---- pickles


def test_another_process_opens_it_by_its_url(tmp_path: Path, run_python: RunPython) -> None:
    """A pickle holds the URL alone."""
    store = open_store(tmp_path / "store")
    store.put("a", b"1")
    raw = pickle.dumps(store.filesystem())
    code = "import pickle; fs = pickle.loads(bytes.fromhex(given)); print(fs, fs.cat('a'), fs.open('a').read())"
    assert run_python(code, raw.hex()).strip() == f"StoreFileSystem('file://{tmp_path}/store') b'1' b'1'"
    file = pickle.loads(pickle.dumps(store.filesystem().open("a")))
    assert file.read() == b"1"


def test_credentials_are_never_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With options the pickle is refused; with an endpoint from the environment it holds no more than the URL."""
    options = {"key": "canary-key", "secret": "canary-secret", "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(ConfigurationError, match="environment") as caught:
        pickle.dumps(open_store("s3://bucket/prefix", options).filesystem())
    assert "canary" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    raw = pickle.dumps(open_store("s3://bucket/prefix").filesystem())
    assert b"canary" not in raw
    assert pickle.loads(raw).store.url == "s3://bucket/prefix"


def test_memory_is_not_pickled() -> None:
    """Another process would find nothing there."""
    with pytest.raises(ConfigurationError, match="memory://x"):
        pickle.dumps(open_store("memory://x").filesystem())


def test_two_views_of_one_store_are_equal_and_others_are_not() -> None:
    """Libraries compare filesystems to combine their files."""
    one, other = open_store("memory://one"), open_store("memory://other")
    assert one.filesystem() == one.filesystem()
    assert one.filesystem() != other.filesystem()
    assert "canary" not in repr(open_store("s3://b/p", {"secret": "canary", "key": "k"}).filesystem())
