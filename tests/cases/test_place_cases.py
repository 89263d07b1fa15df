"""The cases of ``shared/cases/object-store.md`` on places: G15 and G16."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from dagster_resilient import collect_garbage, list_tasks, open_task, task_history
from dagster_resilient.errors import StorageError
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.testing import Fault, FaultStore

# ---- G15: spellings


def spellings(kind: str, request: pytest.FixtureRequest) -> list[tuple[Any, dict[str, Any]]]:
    """Ways to name one place."""
    if kind == "local":
        path = request.getfixturevalue("tmp_path") / "a b%20"
        request.getfixturevalue("monkeypatch").chdir(path.parent)
        return [(one, {}) for one in (path, f"{path}/", f"file://{path}//", f"file:{path}", "a b%20", "./x/../a b%20/")]
    if kind == "memory":
        name = uuid.uuid4().hex
        return [(one.format(name), {}) for one in ("memory://{}", "memory://{}/", "memory:///{}", "MEMORY:{}")]
    url, options = request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
    bare = url.removeprefix("s3://").replace("/", "//")
    endpoint = options["endpoint_url"]
    keyed = {name: options[name] for name in ("key", "secret")}
    return [
        (url, options),
        (f"{url}/", {**options, "endpoint_url": f"{endpoint}/"}),
        (f"s3a://{bare}//", {**keyed, "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"}}),
        (f"S3://{bare}", {**options, "use_ssl": False, "region": "eu-west-1"}),
    ]


@pytest.mark.parametrize("kind", ["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def test_g15_one_place_in_many_spellings(kind: str, request: pytest.FixtureRequest) -> None:
    """G15: what is saved by one spelling, as URL, path, or with other options, is loaded and listed by all others."""
    ways = spellings(kind, request)
    for n, (url, options) in enumerate(ways):
        open_task(url, f"task {n}", storage_options=options).save(n)
    for url, options in ways:
        assert len(list_tasks(url, storage_options=options)) == len(ways)
        assert collect_garbage(url, storage_options=options).kept["young"] == len(ways)
        assert len(task_history(url, "task 0", storage_options=options)) == 1
        task = open_task(url, "reader", storage_options=options)
        assert [task.load(f"task {n}") for n in range(len(ways))] == list(range(len(ways)))
    assert len({open_store(url, options).url for url, options in ways}) == 1


# ---- G16: moves


def test_g16_no_commit_is_a_move() -> None:
    """G16: a store has no rename and no copy. To save is to write each object once, under its final name."""
    verbs = {name for name in dir(ObjectStore) if not name.startswith("_")}
    assert not [verb for verb in verbs if any(word in verb for word in ("rename", "copy", "move", "mv", "cp"))]
    store = FaultStore(open_store(f"memory://{uuid.uuid4().hex}"))
    open_task(store, "a").save({"n": 1})
    before = len(store.operations)
    open_task(store, "a").save({"n": 2})
    changes = [one for one in store.operations[before:] if one.verb not in {"get", "get_ranges", "head", "list"}]
    assert {one.verb for one in changes} <= {"put", "create"}
    assert len({one.key for one in changes}) == len(changes)
    assert changes[-1].verb == "create"


def test_g16_a_move_that_breaks_off_shows_old_or_new() -> None:
    """G16: `mv` of the fsspec view copies and then deletes; broken off between them, both are whole."""
    plan: Callable[..., Any] = lambda _, operation: Fault("fail") if operation.verb == "delete" else None  # noqa: E731
    store = FaultStore(open_store(f"memory://{uuid.uuid4().hex}"), plan)
    files = store.filesystem()
    files.pipe_file("old/a", b"1" * 1000)
    with pytest.raises(StorageError):
        files.mv("old/a", "new/a")
    assert files.cat_file("old/a") == files.cat_file("new/a") == b"1" * 1000
    assert "copies and then deletes" in (type(files).__doc__ or "")
