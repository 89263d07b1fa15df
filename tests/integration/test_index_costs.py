"""What a plan and a fan-in over 10,000 partitions cost, in pages of listings and in reads."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from blake3 import blake3

from dagster_resilient import ResilientIOManager, ResilientResource, codecs
from dagster_resilient.briefs import LiveBriefs
from dagster_resilient.errors import ValueNotFoundError
from dagster_resilient.facts import RunFacts
from dagster_resilient.state.log import NumberedLog
from dagster_resilient.state.records import Entry, ValueRef
from dagster_resilient.state.store import ObjectRecords
from dagster_resilient.storage import keys
from dagster_resilient.storage.manifest import Manifest, StoredObject
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore, open_store
from dagster_resilient.testing import FaultStore
from dagster_resilient.values import load_values

COUNT, PAGE = 10_000, 1000
PARTS = [f"{n:05d}" for n in range(COUNT)]
RANGE = {"dagster/asset_partition_range_start": PARTS[0], "dagster/asset_partition_range_end": PARTS[-1]}
MOST_LISTS, MOST_READS = 30, 200
READS = {"get", "get_ranges", "head"}


class Counting(FaultStore):
    """A store that counts what it would be paid for: pages of 1,000 keys, and reads."""

    pages = 0

    def list(self, prefix: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects under a prefix."""
        found = [*super().list(prefix, start_after)]
        self.pages += max(1, -(-len(found) // PAGE))
        return iter(found)

    def reads(self, part: str = "") -> int:
        """How many reads there were of keys that contain a text."""
        return sum(operation.verb in READS and part in operation.key for operation in self.operations)


class Flights:
    """An asset of 10,000 partitions, one small object each, and the run that computed them."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.store: ObjectStore = open_store(f"memory://{uuid.uuid4().hex}")
        self.instance = instance
        self.run = instance.add_run(
            dg.DagsterRun(job_name="all", run_id=str(uuid.uuid4()), status=dg.DagsterRunStatus.FAILURE, tags=RANGE)
        )

        @dg.asset(partitions_def=dg.StaticPartitionsDefinition(PARTS), code_version="1")
        def flights() -> str:
            return ""

        manager = ResilientIOManager(resilient=ResilientResource(url=self.store.url))
        self.repository = dg.Definitions(
            assets=[flights], jobs=[dg.define_asset_job("all")], resources={"io_manager": manager}
        ).get_repository_def()

    def commit(self, part: str, n: int = 1, **more: Any) -> None:
        """Commit a value as a step of the run does."""
        location = f"{keys.task_prefix(('flights',), part, 'data')}/{keys.write_name(0, 1, self.run.run_id)}"
        encoded = codecs.encode(f"flights of {part}")
        ((role, buffers),) = encoded.parts.items()
        body = b"".join(buffers)
        stored = StoredObject(key=f"{location}/{role}", size=len(body), blake3=blake3(body).hexdigest())
        if "value" not in more:
            self.store.put(stored.key, body)
        manifest = Manifest(codec=encoded.codec, objects={role: stored})
        series = self.run.run_id
        value = ValueRef(
            manifest=manifest, location=location, series=series, run_id=series, attempt=1, fingerprint="code:1"
        )
        fields = {"kind": "value", "run_id": series, "value": value, "committed_by": (series,)} | more
        log = NumberedLog(ObjectRecords(self.store), keys.task_prefix(("flights",), part, "log"))
        assert log.append(Entry(n=n, op=uuid.uuid4().hex, asset=("flights",), partition_key=part, **fields))

    def plan(self) -> tuple[Counting, list[str]]:
        """Read the facts of the run; return what that cost, and what is missing."""
        store = Counting(self.store)
        resource: Any = SimpleNamespace(store=store, records=ObjectRecords(store))
        briefs = LiveBriefs(self.repository, self.instance)
        (facts,) = RunFacts(self.instance, resource, briefs, self.run, [self.run]).assets
        return store, [part for part in PARTS if part not in facts.done]

    def fan_in(self) -> tuple[Counting, dict[str, Any]]:
        """Load all partitions; return what that cost, and their values."""
        store = Counting(self.store)
        return store, load_values(store, ("flights",), PARTS)


@pytest.fixture
def flights() -> Iterator[Flights]:
    """The asset, and nothing committed yet."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield Flights(instance)


def test_a_plan_and_a_fan_in_read_what_moved(flights: Flights) -> None:
    """The first plan reads every head, and folds. Later ones stay within 30 pages of listings and 200 reads."""
    for part in PARTS:
        flights.commit(part)
    first, missing = flights.plan()
    assert (first.pages, first.reads(), missing) == (20, COUNT + 1, [])
    assert flights.store.head(keys.index_key(("flights",))).size < 4_000_000

    for part in PARTS[:50]:
        flights.commit(part, 2)
    for part in PARTS[-20:]:
        flights.commit(part, 2, kind="release", value=None, committed_by=())
    for part in PARTS[100:110]:
        flights.store.delete([info.key for info in flights.store.list(f"tasks/flights/data/{part}/")])
    then, missing = flights.plan()
    assert missing == [*PARTS[100:110], *PARTS[-20:]]
    assert then.pages <= MOST_LISTS
    assert then.reads() <= MOST_READS

    for part in [*PARTS[-20:], *PARTS[100:110]]:
        flights.commit(part, 3)
    loading, values = flights.fan_in()
    assert list(values.items()) == [(part, f"flights of {part}") for part in PARTS]
    assert loading.pages <= MOST_LISTS
    assert loading.reads() - loading.reads("/data/") <= MOST_READS
    assert loading.reads("/data/") == COUNT


def test_a_plan_over_an_asset_that_is_hardly_begun(flights: Flights) -> None:
    """Partitions that were never begun cost no request each: most of an asset is missing after a lost run."""
    for part in PARTS[: COUNT // 5]:
        flights.commit(part)
    flights.plan()
    store, missing = flights.plan()
    assert missing == PARTS[COUNT // 5 :]
    assert store.pages <= MOST_LISTS
    assert store.reads() <= MOST_READS


def test_a_fan_in_names_what_is_missing_before_it_loads(flights: Flights) -> None:
    """The first ten of them, and how many there are; not one object was read in vain."""
    for part in PARTS[:100]:
        flights.commit(part)
    store = Counting(flights.store)
    wanted = [*PARTS[:100], *PARTS[200:212]]
    with pytest.raises(ValueNotFoundError, match=r"flights: 12 of 112 .* 00200, .*00209 and 2 more.*Materialize them"):
        load_values(store, ("flights",), wanted)
    assert store.reads("/data/") == 0
