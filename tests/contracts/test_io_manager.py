"""The IO manager and the resource inside Dagster, in one process, on every store."""

import dagster as dg
import pandas as pd
import pytest
import torch

from dagster_resilient import ResilientIOManager, ResilientResource, codecs
from dagster_resilient.errors import IntegrityError, UnsupportedValueError, ValueNotFoundError
from dagster_resilient.state import heartbeat, index
from dagster_resilient.storage.manifest import read_manifest
from dagster_resilient.values import find_value

LETTERS = dg.StaticPartitionsDefinition(["a", "a/b", "x" * 300, "ü", "c"])
SINGLE_RUN = dg.BackfillPolicy.single_run()


@pytest.fixture
def resilient(place) -> ResilientResource:
    """A resource on an empty store, one of each kind."""
    url, options = place
    return ResilientResource(url=url, storage_options=options)


@pytest.fixture(autouse=True)
def _no_heartbeat_outlives_its_store():
    """A call outside a run keeps its heartbeat until the process ends; end it with the test."""
    yield
    heartbeat._close_all()


def run(assets, resilient, **options) -> dg.ExecuteInProcessResult:
    """Materialize in this process."""
    resources = {"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)}
    return dg.materialize(assets, resources=resources, raise_on_error=False, **options)


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    """The error of the step that failed, as text."""
    return "\n".join(str(event.event_specific_data) for event in result.get_step_failure_events())


@pytest.mark.parametrize(
    "value",
    [pd.DataFrame({"n": [1, 2], "s": ["x", None]}), {"w": torch.arange(3.0)}, None, b"raw", {"k": [1, (2, 3.5)]}],
    ids=["frame", "tensors", "none", "bytes", "document"],
)
def test_a_value_comes_back_equal(resilient, value):
    """What an asset returns is what its downstream gets, in value and type."""
    seen = []

    @dg.asset
    def up():
        return value

    @dg.asset
    def down(up) -> None:
        seen.append(up)

    assert run([up, down], resilient).success
    assert type(seen[0]) is type(value)
    if isinstance(value, pd.DataFrame):
        pd.testing.assert_frame_equal(seen[0], value)
    elif isinstance(value, dict) and "w" in value:
        assert torch.equal(seen[0]["w"], value["w"])
    else:
        assert seen[0] == value


def test_awkward_partition_keys_stay_apart(resilient):
    """A key with a slash, one of 300 characters and one outside ASCII each hold their own value."""

    @dg.asset(partitions_def=LETTERS)
    def up(context) -> str:
        return context.partition_key

    for key in LETTERS.get_partition_keys():
        assert run([up], resilient, partition_key=key).success
    assert [resilient.load("up", str, key) for key in LETTERS.get_partition_keys()] == LETTERS.get_partition_keys()


@pytest.mark.parametrize("few", [1, 50], ids=["by listing", "one by one"])
def test_fan_in_keeps_partitions_whose_value_is_none(resilient, monkeypatch, few):
    """A dict of partitions has every partition, in order of definition, also those that hold None."""
    monkeypatch.setattr(index, "FEW", few)
    seen = {}

    @dg.asset(partitions_def=LETTERS)
    def up(context):
        return None if context.partition_key == "c" else context.partition_key

    @dg.asset
    def down(up) -> None:
        seen.update(up)

    for key in LETTERS.get_partition_keys():
        assert run([up], resilient, partition_key=key).success
    assert run([up, down], resilient, selection=[down]).success
    assert list(seen) == LETTERS.get_partition_keys()
    assert seen["c"] is None


def test_fan_in_names_the_partitions_that_are_missing(resilient):
    """All of them, in one error, before anything is loaded."""

    @dg.asset(partitions_def=LETTERS)
    def up(context) -> str:
        return context.partition_key

    @dg.asset
    def down(up) -> None:
        raise AssertionError("ran without its input")

    for key in ("a", "ü", "c"):
        assert run([up], resilient, partition_key=key).success
    error = failure_of(run([up, down], resilient, selection=[down]))
    assert "ValueNotFoundError" in error
    assert f"2 of 5 partitions are not materialized: a/b, {'x' * 300}. " in error


def test_a_refused_value_leaves_the_previous_one(resilient):
    """An output that no codec takes is refused with its path, and the value before it still loads."""

    @dg.asset
    def up() -> dict:
        return {"n": 1}

    assert run([up], resilient).success

    @dg.asset(name="up")
    def bad():
        return {"n": {"deep": object()}}

    result = run([bad], resilient)
    assert "UnsupportedValueError" in failure_of(result)
    assert "deep" in failure_of(result)
    assert resilient.load("up", dict) == {"n": 1}


def test_a_missing_upstream_is_named(resilient):
    """Loading what was never materialized says which asset and partition, and what to do."""
    with pytest.raises(ValueNotFoundError, match=r"nowhere\[c\] is not materialized.*Materialize it first"):
        resilient.load("nowhere", partition="c")


def test_a_damaged_object_is_an_error(resilient):
    """A flipped byte is never a value: the error names the asset and the object."""

    @dg.asset
    def up() -> bytes:
        return b"0123456789"

    assert run([up], resilient).success
    store = resilient.store
    stored = next(iter(read_manifest(store, find_value(store, ("up",), None).manifest).objects.values()))
    raw = bytearray(store.get(stored.key))
    raw[3] ^= 1
    store.put(stored.key, bytes(raw))
    with pytest.raises(IntegrityError, match=r"up: .*damaged"):
        resilient.load("up")


def test_a_range_commits_each_partition_of_a_dict(resilient):
    """A run over a range may return a dict with one value per partition."""

    @dg.asset(partitions_def=LETTERS, backfill_policy=SINGLE_RUN)
    def up(context) -> dict:
        return {key: key.upper() for key in context.partition_keys}

    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "c"}
    assert run([up], resilient, tags=tags).success
    assert [resilient.load("up", str, key) for key in LETTERS.get_partition_keys()] == [
        key.upper() for key in LETTERS.get_partition_keys()
    ]


@pytest.mark.parametrize("value", [{"a": 1}, {"a": 1, "zzz": 2}, [1]], ids=["missing", "extra", "no dict"])
def test_a_range_with_the_wrong_partitions_is_refused(resilient, value):
    """Missing or extra keys, or no dict at all, are errors that name them; nothing is committed."""

    @dg.asset(partitions_def=LETTERS, backfill_policy=SINGLE_RUN)
    def up():
        return value

    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "c"}
    result = run([up], resilient, tags=tags)
    assert "ConfigurationError" in failure_of(result)
    with pytest.raises(ValueNotFoundError):
        resilient.load("up", partition="a")


def test_a_partition_loop_commits_and_records_as_it_goes(resilient):
    """What was saved before an error stands, in the store and in Dagster's events; what came after does not."""

    @dg.asset(partitions_def=LETTERS, backfill_policy=SINGLE_RUN)
    def up(context, resilient: ResilientResource) -> None:
        for done, part in enumerate(resilient.task(context).partitions()):
            if done == 2:
                raise RuntimeError("lost")
            part.save(part.key)

    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "c"}
    with dg.DagsterInstance.ephemeral() as instance:
        assert not run([up], resilient, tags=tags, instance=instance).success
        assert instance.get_materialized_partitions(dg.AssetKey("up")) == {"a", "a/b"}
    assert resilient.load("up", str, "a/b") == "a/b"
    with pytest.raises(ValueNotFoundError):
        resilient.load("up", partition="c")


def test_a_loop_that_forgets_to_save_is_an_error(resilient):
    """Going on without save() names the partition: silence would look like success."""

    @dg.asset(partitions_def=LETTERS, backfill_policy=SINGLE_RUN)
    def up(context, resilient: ResilientResource) -> None:
        for _ in resilient.task(context).partitions():
            pass

    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "c"}
    assert "up[a]: the loop went on without save()" in failure_of(run([up], resilient, tags=tags))


def test_op_outputs_are_stored_under_their_run_group(resilient):
    """Plain ops pass values through the same IO manager."""
    seen = []

    @dg.op
    def one():
        return {"n": 1}

    @dg.op
    def two(value) -> None:
        seen.append(value)

    @dg.job(resource_defs={"io_manager": ResilientIOManager(resilient=resilient)})
    def plain():
        two(one())

    assert plain.execute_in_process().success
    assert seen == [{"n": 1}]


def test_an_asset_can_be_called_directly(resilient):
    """A unit test that calls the asset with a built context gets a working task."""

    @dg.asset
    def up(context: dg.AssetExecutionContext, resilient: ResilientResource) -> int:
        return len(resilient.task(context).name)

    assert up(dg.build_asset_context(), resilient=resilient) == 2


def test_credentials_are_in_no_repr():
    """A canary secret in the options shows neither in the resource's nor in the store's repr."""
    resource = ResilientResource(url="s3://bucket/x", storage_options={"key": "k", "secret": "canary-secret"})
    assert "canary-secret" not in repr(resource) + str(resource) + repr(resource.store)


def test_an_unknown_type_in_the_error_says_what_to_do(resilient):
    """The refusal of a type names the type."""
    with pytest.raises(UnsupportedValueError, match="object"):
        codecs.encode(object())
