"""The cases of ``shared/cases/addressing.md`` (A01 to A14), through Dagster: materialize, then load.

Keys that other IO managers merge, nest, lose or let escape. A value is its own key, so that a mix-up shows.

No postponed annotations here: Dagster reads them.
"""

import uuid
from typing import Any

import dagster as dg
import pytest
from in_process import failure_of, run

from dagster_resilient import ResilientResource, list_tasks, open_task, retire_task
from dagster_resilient.errors import ValueNotFoundError
from dagster_resilient.storage import keys as store_keys
from dagster_resilient.storage.object_store import open_store

SINGLE_RUN = dg.BackfillPolicy.single_run()
BASE = "team/a%2Fb/base"  # nothing in it may be decoded


def of_range(texts: list[str]) -> dict[str, str]:
    """Tags of a run over all these partitions."""
    return {"dagster/asset_partition_range_start": texts[0], "dagster/asset_partition_range_end": texts[-1]}


def own_key(definition: dg.PartitionsDefinition, name: Any = "up") -> dg.AssetsDefinition:
    """An asset whose partitions each hold their own key."""

    @dg.asset(key=dg.AssetKey(name), partitions_def=definition)
    def up(context) -> str:
        return str(context.partition_key)

    return up


def materialized(resilient: ResilientResource, texts: list[str], instance: Any = None) -> dict[str, str]:
    """Materialize all partitions in one run, and return what a downstream asset of the same partitions was given."""
    dynamic = dg.DynamicPartitionsDefinition(name="texts")
    definition = dg.StaticPartitionsDefinition(texts) if instance is None else dynamic
    seen: dict[str, str] = {}

    @dg.asset(partitions_def=definition, backfill_policy=SINGLE_RUN)
    def up(context) -> dict:
        return {key: key for key in context.partition_keys}

    @dg.asset(partitions_def=definition, backfill_policy=SINGLE_RUN)
    def down(up: dict) -> None:
        seen.update(up)

    result = run([up, down], resilient, tags=of_range(texts), instance=instance)
    assert result.success, failure_of(result)
    return seen


def listed(resilient: ResilientResource, name: str = "up") -> list[str | None]:
    """The partition keys of an asset that the store itself tells."""
    return [task.partition_key for task in list_tasks(resilient.store) if task.asset == (name,)]


def loaded(resilient: ResilientResource, texts: list[str]) -> list[str]:
    """The values of these partitions, as a notebook loads them."""
    return [resilient.load("up", str, text) for text in texts]


def check_each_its_own(resilient: ResilientResource, texts: list[str], instance: Any = None) -> None:
    """Every partition holds its own key, to a downstream asset, to a notebook, and in a listing."""
    assert materialized(resilient, texts, instance) == {text: text for text in texts}
    assert loaded(resilient, texts) == texts
    assert sorted(listed(resilient)) == sorted(texts)


def test_a01_dots_and_separators(resilient):
    """A01: a key with a dot is no shorter key with an extension. Each read is the own key."""
    texts = ["0.94-to-0.95", "0.94-to-0.96", "a.parquet", "a"]
    up = own_key(dg.StaticPartitionsDefinition(texts))
    assert all(run([up], resilient, partition_key=text).success for text in texts)
    assert loaded(resilient, texts) == texts


@pytest.mark.parametrize("texts", [["a", "a/b"], ["a/b", "a"]], ids=["outer first", "inner first"])
def test_a02_a_key_below_another(resilient, texts):
    """A02: `a/b` does not replace `a` by a folder, whichever comes first: both values are intact."""
    up = own_key(dg.StaticPartitionsDefinition(texts))
    assert all(run([up], resilient, partition_key=text).success for text in texts)
    assert loaded(resilient, ["a", "a/b"]) == ["a", "a/b"]


def test_a03_leaving_the_base(place, tmp_path):
    """A03: absolute keys, `..` and their escaped forms are distinct objects, all under the base prefix."""
    url, options = place
    outside = tmp_path / "outside"
    texts = ["/x", "%2Fx", "..", "%2E%2E", "../../etc/x", "../../../../../../../x", str(outside)]
    resilient = ResilientResource(url=f"{url}/{BASE}", storage_options=options)
    check_each_its_own(resilient, texts)
    found = [info.key for info in resilient.store.list("tasks/")]
    assert len({store_keys.decode_task_key(key)[2] for key in found if "/log/" in key}) == len(texts)
    around = open_store(url, options)
    if around.is_shared:  # names of memory stores do not nest
        everything = [info.key for info in around.list("")]
        assert [key for key in everything if not key.startswith(f"{BASE}/")] == []
        assert {f"{BASE}/{key}" for key in found} <= set(everything)
    assert not outside.exists()
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")} <= {"store"}


def test_a05_two_dimensions_with_slashes(resilient):
    """A05: (x/y, z) and (x, y/z) are two objects with two values, to a downstream asset too."""
    definition = dg.MultiPartitionsDefinition(
        {"c": dg.StaticPartitionsDefinition(["x/y", "x"]), "d": dg.StaticPartitionsDefinition(["z", "y/z"])}
    )
    seen = []

    @dg.asset(partitions_def=definition)
    def up(context) -> dict:
        return dict(context.partition_key.keys_by_dimension)

    @dg.asset(partitions_def=definition)
    def down(up: dict) -> None:
        seen.append(up)

    dimensions = [{"c": "x/y", "d": "z"}, {"c": "x", "d": "y/z"}]
    both = [dg.MultiPartitionKey(one) for one in dimensions]
    assert all(run([up, down], resilient, partition_key=key).success for key in both)
    assert seen == dimensions
    assert [resilient.load("up", dict, key) for key in both] == dimensions
    assert listed(resilient) == ["x/y|z", "x|y/z"]


def test_a05_a_dimension_with_the_separator_is_refused_by_dagster():
    """A05: (x|y, z) and (x, y|z) would be one text. Dagster makes no such definition, and runs no such partition."""
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="Invalid character in partition key"):
        dg.MultiPartitionsDefinition(
            {"c": dg.StaticPartitionsDefinition(["x|y", "x"]), "d": dg.StaticPartitionsDefinition(["z", "y|z"])}
        )
    resilient = ResilientResource(url=f"memory://{uuid.uuid4().hex}")
    dynamic = {name: dg.DynamicPartitionsDefinition(name=name) for name in ("c", "d")}
    up = own_key(dg.MultiPartitionsDefinition(dynamic))
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("c", ["x|y", "x"])
        instance.add_dynamic_partitions("d", ["z", "y|z"])
        for key in ({"c": "x|y", "d": "z"}, {"c": "x", "d": "y|z"}):
            with pytest.raises(dg.DagsterUnknownPartitionError):
                run([up], resilient, partition_key=dg.MultiPartitionKey(key), instance=instance)
    assert list_tasks(resilient.store) == []


@pytest.mark.parametrize("first", ["tag", "key"])
def test_a06_a_multi_partition_as_plain_text(resilient, first):
    """A06: written as the plain text of a tag, and as a MultiPartitionKey: the same object, no duplicate."""
    definition = dg.MultiPartitionsDefinition(
        {"c": dg.StaticPartitionsDefinition(["p"]), "d": dg.StaticPartitionsDefinition(["q"])}
    )
    counted = []

    @dg.asset(partitions_def=definition)
    def up() -> int:
        counted.append(1)
        return len(counted)

    key = dg.MultiPartitionKey({"c": "p", "d": "q"})
    ways = [{"tags": {"dagster/partition": "p|q"}}, {"partition_key": key}]
    for n, way in enumerate(ways if first == "tag" else ways[::-1], start=1):
        assert run([up], resilient, **way).success
        assert resilient.load("up", int, key) == resilient.load("up", int, "p|q") == n
    assert listed(resilient) == ["p|q"]


@pytest.mark.parametrize("order", [1, -1], ids=["shorter first", "longer first"])
def test_a08_partitions_and_longer_keys_that_come_later(resilient, order):
    """A08: an asset that becomes partitioned, and an asset key below another one: all succeed, no value is lost."""

    @dg.asset(key=["x"])
    def whole() -> str:
        return "x"

    @dg.asset(key=["x", "y"])
    def below() -> str:
        return "x/y"

    partitions = dg.StaticPartitionsDefinition(["a", "y"])
    acts = [
        ([whole], {}),
        ([own_key(partitions, ["x"])], {"partition_key": "a"}),
        ([own_key(partitions, ["x"])], {"partition_key": "y"}),
        ([below], {}),
    ]
    for assets, options in acts[::order]:
        result = run(assets, resilient, **options)
        assert result.success, failure_of(result)
    assert [resilient.load("x"), resilient.load("x", partition="a"), resilient.load("x", partition="y")] == [*"xay"]
    assert resilient.load("x/y") == "x/y"


def test_a09_long_keys(resilient):
    """A09: 300 ASCII and 300 CJK characters are written and read; keys that share their first 280 do not collide."""
    texts = ["k" * 300, "漢" * 300, "k" * 280 + "x" * 20, "k" * 280 + "y" * 20, "漢" * 280 + "字" * 20]
    check_each_its_own(resilient, texts)
    assert max(len(part) for info in resilient.store.list("") for part in info.key.split("/")) <= 255


SPECIAL = [
    *"#?%+&=,;[]*",
    *(" ", "\n", "\t", "\x00", "", "😀"),
    *("a\nb", "a\x00", "[x]", "a*b", "a b", "a", "b", "ab", "...", "\u202e", "\r\n", "'\""),
]


def test_a10_special_characters(resilient):
    """A10: every key that Dagster lets through comes back. What is given up is exactly what was named."""
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("texts", SPECIAL)
        check_each_its_own(resilient, SPECIAL, instance)
    gone, kept = SPECIAL[::2], SPECIAL[1::2]
    assert all(retire_task(resilient.store, "up", text) for text in gone)
    assert loaded(resilient, kept) == kept
    for text in gone:
        with pytest.raises(ValueNotFoundError):
            resilient.load("up", partition=text)


def test_a10_a_key_alone_in_its_run(resilient):
    """A10: the same where each run targets one partition, by its tag."""
    texts = ["a\nb", "a\x00", " ", "[x]", "a*b"]
    up = own_key(dg.DynamicPartitionsDefinition(name="texts"))
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("texts", texts)
        assert all(run([up], resilient, partition_key=text, instance=instance).success for text in texts)
    assert loaded(resilient, texts) == texts


@pytest.mark.parametrize("text", ["a\nb", "a\tb", "a\x00", "a...b"])
def test_a10_what_dagster_refuses_is_kept_one_level_below(resilient, text):
    """A10: static definitions with such keys are refused by Dagster; a script's task of that name works."""
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="invalid substrings"):
        dg.StaticPartitionsDefinition([text])
    open_task(resilient.store, "up", text).save(text)
    assert loaded(resilient, [text]) == listed(resilient) == [text]


def test_a10_an_empty_key_in_a_tag(resilient):
    """A10: a run whose tag is "" writes the partition "", beside the unpartitioned value of that asset."""
    open_task(resilient.store, "up").save("unpartitioned")
    up = own_key(dg.DynamicPartitionsDefinition(name="texts"))
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("texts", [""])
        assert run([up], resilient, tags={"dagster/partition": ""}, instance=instance).success
    assert [resilient.load("up", partition=""), resilient.load("up")] == ["", "unpartitioned"]


def test_a10_an_empty_key_in_a_range_of_one_fails_in_dagster(resilient):
    """A10: Dagster finds no partition there; nothing is stored under any name."""
    assert not run([own_key(dg.StaticPartitionsDefinition([""]))], resilient, tags=of_range([""])).success
    assert list_tasks(resilient.store) == []


@pytest.mark.parametrize("asks", [True, False], ids=["asks for its task", "returns a value"])
@pytest.mark.parametrize("options", [{"partition_key": ""}, {}], ids=["empty key", "no key"])
def test_a10_a_run_that_targets_no_partition_is_refused(asks, options):
    """A10: Dagster takes the argument "" for no partition. The unpartitioned value of that asset is not replaced."""
    resilient = ResilientResource(url=f"memory://{uuid.uuid4().hex}")
    open_task(resilient.store, "up").save("unpartitioned")

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["", "b"]))
    def up(context: dg.AssetExecutionContext, resilient: ResilientResource) -> str:
        if asks:
            resilient.task(context)
        return "of the empty key"

    result = run([up], resilient, **options)
    assert resilient.load("up") == "unpartitioned"
    assert "targets no partition" in failure_of(result)


def test_a12_upper_and_lower_case(resilient):
    """A12: two values, and no two objects whose names differ in case alone: a case-folding folder keeps both too."""
    check_each_its_own(resilient, ["A", "a", "Aa", "aA"])
    names = [info.key for info in resilient.store.list("")]
    assert len({name.casefold() for name in names}) == len(names)


def test_a14_a_listing_gives_the_keys_back(resilient):
    """A14: the partitions found in storage are those of the definition, un-escaped; asset keys too."""
    texts = ["a%b=1", "partition/", "b=2", "a%25b=1", "a=1/b=2", "ü", "k" * 300]
    check_each_its_own(resilient, texts)
    for asset in (["up", "b=2"], ["up/b=2"], ["漢" * 100, "x"]):
        open_task(resilient.store, asset).save(1)
    names = {(task.asset, task.partition_key) for task in list_tasks(resilient.store)}
    others = {(("up", "b=2"), None), (("up/b=2",), None), (("漢" * 100, "x"), None)}
    assert names == {(("up",), text) for text in texts} | others
