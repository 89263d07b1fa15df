"""The cases of ``shared/cases/object-store.md`` (G01 to G16), where a user meets them: tasks, trainings, garbage.

`PROVEN_ELSEWHERE` names the tests of single parts which prove the rest of a row. Disks and clocks (G11 to G14), and
places (G15, G16), have files of their own.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import servers
import torch.utils.data
from durable import make_task
from proxy import S3Proxy
from proxy_rules import answer, expired_token, reset_before, slow_down

from dagster_resilient import EverySteps, list_tasks, open_task
from dagster_resilient.errors import StorageError, StoragePermissionError
from dagster_resilient.state import heartbeat, log
from dagster_resilient.state.beats import store_now
from dagster_resilient.state.garbage import Collector
from dagster_resilient.storage import breaker, keys, obstore_store, retry
from dagster_resilient.storage.manifest import write_manifest, write_objects
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.testing import FakeClock

Place = tuple[str, dict[str, Any]]
RunPython = Callable[..., str]
Saved = Callable[[ObjectStore, str], list[int]]

TESTS = Path(__file__).parent.parent
ROWS = [f"G{n:02}" for n in (1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16)]
PROVEN_ELSEWHERE = {
    "G01": [
        "contracts/test_object_store.py::test_another_process_sees_every_acknowledged_write",
        "contracts/test_filesystem.py::test_what_another_one_wrote_is_seen_at_once",
        "contracts/test_fsspec_store.py::test_s3_through_both_stores",
    ],
    "G02": ["contracts/test_forked_store.py::test_a_forked_child_goes_on_using_the_store"],
    "G03": [
        "contracts/test_s3_faults.py::test_a_read_is_exact",
        "contracts/test_s3_faults.py::test_a_write_is_there_once_and_whole",
        "contracts/test_s3_faults.py::test_retries_are_finite_and_spaced",
        "contracts/test_s3_refusals.py::test_a_refusal_is_asked_for_once",
        "contracts/test_s3_refusals.py::test_what_is_not_there_is_asked_for_once",
        "unit/test_retry.py::test_waits_grow_and_are_spread",
    ],
    "G05": [
        "contracts/test_s3_refusals.py::test_an_expired_token_is_named_and_nothing_is_lost",
        "unit/test_credentials.py::test_new_keys_in_the_environment_are_taken_up",
        "unit/test_credentials.py::test_a_function_is_asked_again_when_its_keys_are_refused",
        "unit/test_credentials.py::test_the_answer_says_that_credentials_have_expired",
    ],
    "G06": [
        "unit/test_obstore_errors.py::test_bodies_are_signed_and_carry_a_checksum_unless_told_otherwise",
        "unit/test_obstore_errors.py::test_a_server_that_rejects_checksums_is_told_how_to_be_served",
        "unit/test_obstore_errors.py::test_keys_are_deleted_one_by_one_where_that_is_asked_for",
        "unit/test_obstore_errors.py::test_a_delete_that_a_server_refuses_for_one_key_is_an_error",
    ],
    "G07": [
        "contracts/test_s3_store.py::test_folder_markers_of_other_tools_do_no_harm",
        "contracts/test_fsspec_store.py::test_folder_markers_and_an_object_of_the_prefix_name",
    ],
    "G08": ["contracts/test_s3_store.py::test_list_shows_more_than_one_page"],
    "G09": [
        "contracts/test_uploads.py::test_many_parts_under_a_smaller_limit",
        "contracts/test_uploads.py::test_parts_grow_with_the_object",
        "contracts/test_s3_store.py::test_a_small_object_is_one_request_and_a_large_one_has_growing_parts",
    ],
    "G11": [
        "contracts/test_local_store.py::test_local_files_have_the_usual_mode",
        "integration/test_write_kill.py::test_a_writer_killed_at_every_system_call",
    ],
    "G12": ["contracts/test_local_store.py::test_a_local_write_is_on_the_disk_before_it_is_visible"],
    "G13": [
        "contracts/test_local_store.py::test_a_file_that_grows_too_large_is_refused_whole",
        "contracts/test_local_store.py::test_a_local_write_that_fails_leaves_nothing",
    ],
    "G15": [
        "contracts/test_local_store.py::test_every_spelling_of_a_directory_is_the_same_place",
        "contracts/test_local_store.py::test_every_spelling_of_an_s3_prefix_is_the_same_place",
        "unit/test_urls.py::test_a_place_has_one_url",
    ],
    "G16": ["contracts/test_s3_faults.py::test_an_error_inside_a_success_is_an_error"],
}


def functions_of(file: Path) -> set[str]:
    """The names of the tests that a file holds."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_has_a_test(row: str) -> None:
    """One of this folder, or those named above; each of them is there."""
    named = [node.split("::") for node in PROVEN_ELSEWHERE.get(row, [])]
    assert [f"{file}::{name}" for file, name in named if name not in functions_of(TESTS / file)] == []
    here = {name for file in Path(__file__).parent.glob("test_*.py") for name in functions_of(file)}
    assert named or [name for name in here if name.startswith(f"test_{row.lower()}_")]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait a tenth of what they usually do, and no test finds a circuit open."""
    backoff = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=50), "base": 2}
    monkeypatch.setattr(obstore_store, "_RETRY", {**obstore_store._RETRY, "backoff": backoff})
    monkeypatch.setattr(retry, "_FIRST_WAIT", 0.01)
    for one in list(breaker._SHARED.values()):
        one.renew()


@pytest.fixture
def judge(s3_url: str, s3_options: dict[str, Any]) -> ObjectStore:
    """An empty store on S3."""
    return open_store(s3_url, s3_options)


@pytest.fixture
def faulty(s3_proxy: S3Proxy, judge: ObjectStore, s3_options: dict[str, Any], quick: None) -> Iterator[ObjectStore]:
    """The same, through the proxy."""
    yield open_store(judge.url, {**s3_options, "endpoint_url": s3_proxy.endpoint})
    s3_proxy.plan()
    heartbeat._close_all()  # while it can still say goodbye


def collect_later(store: ObjectStore) -> list[str]:
    """Collect garbage as if two days had passed; return what went."""
    now = store_now(store, "test") + timedelta(days=2)
    report = Collector(store, dry_run=False, now=lambda: now).run()
    return [one.name for one in report.garbage if one.kind == "write"]


# ---- G01: what another process wrote

TRAIN = """
from dagster_resilient import EverySteps, open_task
url, options = given
try:
    with open_task(url, "train", storage_options=options).training(save=EverySteps(1)) as session:
        for step in session.steps(10):
            if step == 5:
                raise InterruptedError
except InterruptedError:
    pass
"""


def test_g01_another_process_commits_a_step(shared_place: Place, run_python: RunPython, saved: Saved) -> None:
    """G01: this process has looked before, through the store and through fsspec; it sees the step at once."""
    store = open_store(*shared_place)
    files = store.filesystem()
    assert (list_tasks(store), saved(store, "train"), files.exists("tasks")) == ([], [], False)
    run_python(TRAIN, shared_place)
    assert [str(one) for one in list_tasks(store)] == ["train"]
    assert files.isdir("tasks/train/log")
    assert saved(store, "train") == [3, 4, 5]
    with open_task(store, "train").training() as session:
        assert session.resumed_from == 5


# ---- G02: forked workers


class Calls(torch.utils.data.Dataset[int]):
    """Items whose loading calls a function."""

    def __init__(self, work: Callable[[str], None]) -> None:
        self.work = work

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> int:
        self.work(f"child {n}")
        return n


def by_fork(work: Callable[[str], None]) -> None:
    """`os.fork`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work("child 0")
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 50
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.01)
    assert ended[1] == 0


def by_multiprocessing(work: Callable[[str], None]) -> None:
    """`multiprocessing` with the start method fork."""
    child = multiprocessing.get_context("fork").Process(target=work, args=["child 0"])
    child.start()
    child.join(50)
    assert child.exitcode == 0


def by_data_loader(work: Callable[[str], None]) -> None:
    """Workers of a DataLoader."""
    loader = torch.utils.data.DataLoader(
        Calls(work), batch_size=None, num_workers=2, timeout=50, multiprocessing_context="fork"
    )
    assert list(loader) == [0, 1, 2, 3]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fork", [by_fork, by_multiprocessing, by_data_loader])
def test_g02_a_forked_worker_saves_and_loads(shared_place: Place, fork: Callable[..., None]) -> None:
    """G02: with a store and its fsspec view that the parent has used; neither hangs, and the parent goes on too."""
    store = open_store(*shared_place)
    files = store.filesystem()
    files.pipe_file("files/parent", b"parent")
    open_task(store, "parent").save({"by": "parent"})

    def work(name: str) -> None:
        task = open_task(store, name)
        task.save({"by": name})
        assert [task.load("parent"), task.load(name)] == [{"by": "parent"}, {"by": name}]
        assert files.cat_file("files/parent") == b"parent"
        with files.open(f"files/{name}", "wb") as file:
            file.write(name.encode())

    fork(work)
    assert open_task(store, "parent").load("child 0") == {"by": "child 0"}
    assert files.cat_file("files/child 0") == b"child 0"


# ---- G03, G05, G14: what S3 answers


@pytest.mark.s3
@pytest.mark.parametrize("fault", [slow_down, reset_before])
def test_g03_three_of_five_requests_fail(s3_proxy: S3Proxy, faulty: ObjectStore, fault: Callable[..., Any]) -> None:
    """G03: a value and a training are saved and loaded as if nothing had happened."""
    s3_proxy.plan(*(fault(None, first=n, every=5) for n in (1, 2, 3)))
    task = open_task(faulty, "a")
    task.save({"n": 1})
    assert task.load("a") == {"n": 1}
    with open_task(faulty, "train").training(save=EverySteps(1)) as session:
        assert list(session.steps(3)) == [0, 1, 2]
    with open_task(faulty, "train").training() as session:
        assert session.resumed_from == 3
    assert sum(seen.fault is not None for seen in s3_proxy.seen) > 10


@pytest.mark.s3
def test_g05_credentials_expire_in_the_middle_of_a_training(
    s3_proxy: S3Proxy, faulty: ObjectStore, judge: ObjectStore, caplog: pytest.LogCaptureFixture, saved: Saved
) -> None:
    """G05: the training goes on and says why nothing is saved; no checkpoint is lost, and the next save works."""
    clock, durable = FakeClock(), []
    with open_task(faulty, "train").training(save=EverySteps(1), clock=clock) as session:
        for step in session.steps(8):
            if step == 2:
                s3_proxy.plan(expired_token(None))
            if step == 5:
                s3_proxy.plan()
                clock.sleep(60.0)
            durable.append(saved(judge, "train"))
    assert durable == [[], [1], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2, 6], [2, 6, 7]]
    assert "ExpiredToken" in caplog.text


@pytest.mark.s3
def test_g06_a_server_that_cannot_delete_many(
    s3_proxy: S3Proxy, faulty: ObjectStore, s3_options: dict[str, Any], saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """G06: what should go and stays is told, with the option that helps; with it, everything goes."""
    s3_proxy.plan(answer(400, "MissingContentMD5", None, method="POST", key="?delete"))
    with open_task(faulty, "train").training(save=EverySteps(1), keep=1) as session:
        assert list(session.steps(3)) == [0, 1, 2]
    assert saved(faulty, "train") == [3]
    assert "stay in the store" in caplog.text
    assert "bulk_delete=False" in caplog.text
    open_task(faulty, "train").save("later")  # a newer try: the older ones can commit nothing more
    with pytest.raises(StorageError, match="bulk_delete=False"):
        collect_later(faulty)
    served = open_store(faulty.url, {**s3_options, "endpoint_url": s3_proxy.endpoint, "bulk_delete": False})
    assert len(collect_later(served)) == 2
    assert collect_later(served) == []
    assert saved(served, "train") == [3]


@pytest.mark.s3
def test_g14_a_server_that_finds_our_clock_wrong(s3_proxy: S3Proxy, faulty: ObjectStore) -> None:
    """G14: it is a refusal with that name, asked for once, and never "not there"."""
    s3_proxy.plan(answer(403, "RequestTimeTooSkewed", None))
    with pytest.raises(StoragePermissionError, match="RequestTimeTooSkewed"):
        faulty.get("a")
    assert s3_proxy.count() == 1


# ---- G07, G08: listings


@pytest.fixture
def marked(judge: ObjectStore, s3_url: str, s3_server: servers.SeaweedServer) -> ObjectStore:
    """A store with a training, and an empty object for each folder, as consoles and other tools make them."""
    bucket, prefix = s3_url.removeprefix("s3://").split("/")
    with open_task(judge, "ckpt").training(save=EverySteps(1), keep=1) as session:
        assert list(session.steps(5)) == [0, 1, 2, 3, 4]
    folders = ["", "tasks/", "tasks/ckpt/", "tasks/ckpt/log/", "tasks/ckpt/log/%-/", "tasks/ckpt/data/%-/step-5/"]
    for key in [*folders, "live/", "fences/", "lineage/", "probes/"]:
        servers.client(s3_server).put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=b"")
    return judge


@pytest.mark.s3
def test_g07_folder_markers_between_our_objects(marked: ObjectStore, saved: Saved) -> None:
    """G07: tasks are listed, trainings resume, and garbage is collected as without them."""
    assert [str(one) for one in list_tasks(marked)] == ["ckpt"]
    with open_task(marked, "ckpt").training(save=EverySteps(1), keep=1) as session:
        assert session.resumed_from == 5
        assert list(session.steps(6)) == [5]
    files = marked.filesystem()
    assert (files.isdir("tasks/ckpt"), files.isfile("tasks/ckpt")) == (True, False)
    collect_later(marked)
    assert saved(marked, "ckpt") == [6]
    with open_task(marked, "ckpt").training() as session:
        assert session.resumed_from == 6


@pytest.mark.s3
def test_g07_folder_markers_are_in_no_listing(marked: ObjectStore) -> None:
    """G07: every key that is listed lies under the prefix and is an object; what fsspec calls a file is one."""
    for prefix in ("", "tasks/", "tasks/ckpt/"):
        listed = [info.key for info in marked.list(prefix)]
        assert [key for key in listed if not key.startswith(prefix)] == []
        assert [marked.head(key).key for key in listed] == listed
    files = marked.filesystem()
    assert {one["name"]: one["type"] for one in files.ls("tasks/ckpt")} == {
        "tasks/ckpt/data": "directory",
        "tasks/ckpt/log": "directory",
    }
    files.rm("tasks/ckpt/data", recursive=True)
    assert not files.exists("tasks/ckpt/data")


def test_g07_an_object_named_like_a_prefix() -> None:
    """G07: an object `ckpt` beside objects below `ckpt/` is in nobody's way, where a store can hold both."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    open_task(store, "ckpt").save("old")
    for key in ("tasks", "tasks/ckpt", "tasks/ckpt/log", "tasks/ckpt/log/%-", "tasks/ckpt/data/%-"):
        store.put(key, b"")
    task = open_task(store, "ckpt")
    task.save("new")
    assert task.load("ckpt") == "new"
    assert [str(one) for one in list_tasks(store)] == ["ckpt"]
    files = store.filesystem()
    assert files.isfile("tasks/ckpt")
    assert "tasks/ckpt/log" in files.ls("tasks/ckpt", detail=False)
    collect_later(store)
    assert task.load("ckpt") == "new"


@pytest.mark.s3
def test_g08_more_steps_than_a_page(judge: ObjectStore, monkeypatch: pytest.MonkeyPatch, saved: Saved) -> None:
    """G08: of 1,105 steps the latest is found, the log is trimmed, and the data of all that nobody needs goes."""
    task = make_task(judge)
    task.acquire()
    prefix = task.data_prefix()
    task.commit_checkpoint(1, write_manifest(judge, prefix, write_objects(judge, prefix, "t/1", {}, {})), keep=1)
    first = task.log.head()
    assert first is not None

    def write(step: int) -> None:
        """As 1,105 commits would, but several at once; and the data of a step that no log refers to."""
        last = first.checkpoints[0].model_copy(update={"step": step})
        entry = {"n": step + 1, "op": f"op {step}", "parent_op": f"op {step - 1}", "checkpoints": (last,)}
        assert step == 1 or task.log.append(first.model_copy(update=entry))
        judge.put(f"{keys.task_prefix(task.asset, None, 'data')}/{keys.write_name(0, 0, 'root')}/w", b"1")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(1, 1106)))
    assert saved(judge, "a") == [1105]
    monkeypatch.setattr(log, "KEEP_FOR", timedelta(0))
    head = task.log.head()
    assert head is not None
    assert task.log.trim(head) == list(range(2, 1106 - log.KEEP_ENTRIES + 1))
    assert len(collect_later(judge)) == 1105
    assert saved(judge, "a") == [1105]
    assert next(iter(judge.list(f"{prefix}/"))).size > 0
