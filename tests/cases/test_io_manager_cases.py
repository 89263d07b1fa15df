"""The cases of ``shared/cases/io-manager.md`` (B01 to B10), through Dagster: materialize, then load.

No postponed annotations here: Dagster reads them.
"""

import sys
import threading
import types
from typing import Any

import dagster as dg
import pandas as pd
import pytest
from in_process import failure_of, run

from dagster_resilient import ResilientResource, load, open_task
from dagster_resilient.errors import IntegrityError, UnsupportedValueError, ValueNotFoundError
from dagster_resilient.storage import manifest
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.values import find_value, load_values

LETTERS = dg.StaticPartitionsDefinition(["a", "b", "c"])
SINGLE_RUN = dg.BackfillPolicy.single_run()
RANGE = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "c"}


def asset_of(value: Any, **options: Any) -> dg.AssetsDefinition:
    """An asset `up` without an annotation, which returns a value, or what a function makes of the context."""

    @dg.asset(name="up", **options)
    def up(context):
        return value(context) if callable(value) else value

    return up


def data_of(resilient: ResilientResource) -> list[str]:
    """The keys of all data objects, committed or not."""
    return [info.key for info in resilient.store.list("tasks/") if "/data/" in info.key]


def test_b01_a_partition_of_none_stays_in_the_fan_in(resilient):
    """All three partitions are in the dict, in order of definition; the one that returned None holds it."""
    seen: dict[str, Any] = {}

    @dg.asset
    def down(up) -> None:
        seen.update(up)

    up = asset_of(
        lambda context: None if context.partition_key == "b" else context.partition_key, partitions_def=LETTERS
    )
    for key in LETTERS.get_partition_keys():
        assert run([up], resilient, partition_key=key).success
    assert run([up, down], resilient, selection=[down]).success
    assert list(seen.items()) == [("a", "a"), ("b", None), ("c", "c")]


def test_b02_none_comes_back_where_it_was_returned(resilient):
    """An asset without an annotation stores its None; the downstream gets it."""
    seen: list[Any] = []

    @dg.asset
    def down(up) -> None:
        seen.append(up)

    assert run([asset_of(None), down], resilient).success
    assert seen == [None]


def test_b02_an_asset_of_nothing_writes_nothing(resilient):
    """With the annotation None there is no value: no object, and no commit."""

    @dg.asset
    def up() -> None:
        return None

    assert run([up], resilient).success
    assert data_of(resilient) == []
    with pytest.raises(ValueNotFoundError):
        resilient.load("up")


@pytest.mark.parametrize("damage", ["never", "deleted"])
def test_b03_a_missing_value_is_named(resilient, damage):
    """Asset, partition and URI, and what to do: for one never materialized, and for one whose object is gone."""
    up = asset_of("text", partitions_def=LETTERS)

    @dg.asset(partitions_def=LETTERS)
    def down(up) -> None:
        raise AssertionError("ran without its input")

    if damage == "deleted":
        assert run([up], resilient, partition_key="b").success
        resilient.store.delete(data_of(resilient))
    failure = failure_of(run([up, down], resilient, selection=[down], partition_key="b"))
    assert "up[b]" in failure
    assert resilient.store.url in failure
    assert ("is not materialized" if damage == "never" else "the object is missing") in failure
    assert "aterialize it" in failure


class Explosive:
    """What cannot be reduced to bytes."""

    def __reduce__(self):
        raise RuntimeError("no")


def test_b04_a_value_that_fails_in_the_middle_leaves_the_one_before(resilient):
    """5 MB, and behind them what cannot be stored: the run fails, the first value loads, nothing new lies there."""
    assert run([asset_of("good")], resilient).success
    before = data_of(resilient)
    result = run([asset_of([b"x" * 5_000_000, Explosive()])], resilient)
    assert "$[1]" in failure_of(result)
    assert resilient.load("up") == "good"
    assert data_of(resilient) == before


def test_b06_a_run_over_a_range_keeps_one_object_for_each_partition(resilient):
    """A dict by partition key."""
    up = asset_of(
        lambda context: {key: key * 2 for key in context.partition_keys},
        partitions_def=LETTERS,
        backfill_policy=SINGLE_RUN,
    )
    assert run([up], resilient, tags=RANGE).success
    locations = {find_value(resilient.store, ("up",), key).location for key in "abc"}
    assert len(locations) == 3
    assert [resilient.load("up", str, key) for key in "abc"] == ["aa", "bb", "cc"]


@pytest.mark.parametrize(("keys", "named"), [("ab", "['c']"), ("abcd", "['d']")], ids=["missing", "extra"])
def test_b06_wrong_keys_are_named_and_nothing_is_kept(resilient, keys, named):
    """Keys that are missing, and keys that are not of the run."""
    up = asset_of(dict.fromkeys(keys, 1), partitions_def=LETTERS, backfill_policy=SINGLE_RUN)
    assert named in failure_of(run([up], resilient, tags=RANGE))
    assert data_of(resilient) == []


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "raises at the third"])
def test_b07_an_iterator_is_refused_by_its_type(resilient, fails):
    """It is not consumed and half kept: the error names the type, and the value before it stands."""
    taken: list[int] = []

    def frames():
        for n in range(3):
            if fails and n == 2:
                raise RuntimeError("third")
            taken.append(n)
            yield pd.DataFrame({"n": [n]})

    assert run([asset_of("good")], resilient).success
    before = data_of(resilient)
    assert "generator" in failure_of(run([asset_of(lambda _: dg.Output(frames()))], resilient))
    assert taken == []
    assert resilient.load("up") == "good"
    assert data_of(resilient) == before


def test_b08_what_of_several_outputs_was_kept_is_recorded_and_no_more(resilient, monkeypatch):
    """The second of three cannot be written: the first is there and recorded, the others are neither."""
    put_object = manifest.put_object

    def refuse(store, key, buffers):
        if key.startswith("tasks/two/"):
            raise OSError("no space left on device")
        return put_object(store, key, buffers)

    monkeypatch.setattr(manifest, "put_object", refuse)

    @dg.multi_asset(outs={name: dg.AssetOut(dagster_type=str) for name in ("one", "two", "three")})
    def three():
        for name in ("one", "two", "three"):
            yield dg.Output(name, output_name=name)

    with dg.DagsterInstance.ephemeral() as instance:
        assert not run([three], resilient, instance=instance).success
        names = ("one", "two", "three")
        recorded = [instance.get_latest_materialization_event(dg.AssetKey(name)) is not None for name in names]
    assert recorded == [True, False, False]
    assert resilient.load("one", str) == "one"
    for name in ("two", "three"):
        with pytest.raises(ValueNotFoundError):
            resilient.load(name)


def _instance_of_a_module_that_goes() -> Any:
    module = types.ModuleType("gone_module")
    sys.modules["gone_module"] = module
    exec("class Thing:\n    def __init__(self): self.n = 1", module.__dict__)
    thing = module.Thing()
    del sys.modules["gone_module"]
    return thing


def _deep() -> Any:
    value: Any = 1
    for _ in range(10_000):
        value = [value]
    return value


def _local() -> Any:
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (_instance_of_a_module_that_goes, "gone_module.Thing"),
        (lambda: lambda: 1, "function"),
        (_local, "Local"),
        (_deep, "deep"),
    ],
    ids=["class of a module that goes", "lambda", "local class", "ten thousand levels"],
)
def test_b09_what_could_not_be_loaded_later_is_refused_with_its_path(place, make, named):
    """Nothing is pickled, so nothing depends on a class that may go: the refusal names the object's path and class."""
    url, options = place
    store = open_store(url, options)
    task = open_task(store, "up")
    with pytest.raises(UnsupportedValueError) as caught:
        task.save({"model": {"layer": make()}})
    assert str(caught.value).startswith("up: $.model.layer")
    assert named in str(caught.value)
    assert list(store.list("tasks/")) == []


def test_b09_a_damaged_object_is_named_and_left_as_it_is(place):
    """The error of the load names the asset and the object, which stays as it is."""
    url, options = place
    store = open_store(url, options)
    open_task(store, "up").save(b"0123456789")
    (key,) = [info.key for info in store.list("tasks/") if "/data/" in info.key]
    store.put(key, b"0123x56789")
    with pytest.raises(IntegrityError, match=r"up: .*damaged"):
        load(store, "up")
    assert store.get(key) == b"0123x56789"


def test_b10_a_fan_in_loads_many_at_a_time_in_order_of_the_partitions(monkeypatch):
    """Sixteen reads meet: none of them would go on if they came one after the other."""
    store = open_store("memory://b10")
    names = [f"p{n:03d}" for n in reversed(range(32))]
    for name in names:
        open_task(store, "up", name).save(name)
    together = threading.Barrier(16, timeout=30)
    get = type(store).get

    def slow(self, key):
        if "/data/" in key:
            together.wait()
        return get(self, key)

    monkeypatch.setattr(type(store), "get", slow)
    assert list(load_values(store, ("up",), names).items()) == [(name, name) for name in names]
