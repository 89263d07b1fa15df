"""`ResilientResource`: where state is kept, and `task(context)`, which makes a step's `Task`.

No postponed annotations here: Dagster reads the fields' types.
"""

import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

import dagster as dg
from pydantic import Field, PrivateAttr

from dagster_resilient.aws import options_from_s3_resource
from dagster_resilient.codecs import HEAD_ROWS
from dagster_resilient.dagster_compat import cancelled_by_user, instance_id, run_group
from dagster_resilient.errors import ConfigurationError
from dagster_resilient.metadata import value_metadata
from dagster_resilient.state.fences import fence_run
from dagster_resilient.state.heartbeat import ensure_sidecar
from dagster_resilient.state.records import ValueRef
from dagster_resilient.state.store import ObjectRecords, RecordStore, open_state
from dagster_resilient.storage.object_store import ObjectStore, open_store
from dagster_resilient.storage.retry import hasty
from dagster_resilient.task import (
    DEFAULT_TTL,
    AssetName,
    Attempt,
    CommitHooks,
    Task,
    asset_path,
    begin_attempt,
    heartbeat_interval,
)
from dagster_resilient.values import StoredValue, load_value

T = TypeVar("T")

RUN_WORKER_ENV = "DAGSTER_RESILIENT_RUN_WORKER"
RECOVERY_OF_TAG = "resilient/recovery_of"
RESUME_TAG = "resilient/resume"
REUSED = "resilient/reused"
# Dagster copies this one to "re-execute all". So when a run ends, its worker puts the parent's id in place of "true".
_ASSET_RESUME_TAG = "dagster/is_asset_resume_retry"
_RESUMING_TAGS = ("dagster/is_resume_retry", _ASSET_RESUME_TAG, RESUME_TAG)
_LONGEST_CHAIN = 1000
# Seconds that a run waits for the store at its start to take what recovery can do without.
_BRIEF_PATIENCE = 5.0

AttemptKey = tuple[int, str, str]
_attempts: dict[AttemptKey, Attempt] = {}
_users: Counter[AttemptKey] = Counter()
_attempts_lock = threading.Lock()


def resumes_parent(run: dg.DagsterRun) -> bool:
    """Whether a run continues its parent's work, rather than starting afresh.

    Dagster's "from failure" and our recovery continue. "Re-execute all" starts afresh: it copies the parent's tags, so
    our own tag counts only where it names this run's own parent.
    """
    if run.parent_run_id is None:
        return False
    if run.parent_run_id in (run.tags.get(RECOVERY_OF_TAG), run.tags.get(_ASSET_RESUME_TAG)):
        return True
    return any(run.tags.get(tag) == "true" for tag in _RESUMING_TAGS)


def series_of(run: dg.DagsterRun, get_run: Callable[[str], dg.DagsterRun | None]) -> str:
    """Return the id of the run with which the chain of resuming runs began."""
    for _ in range(_LONGEST_CHAIN):
        if not resumes_parent(run) or run.parent_run_id is None:
            return run.run_id
        parent = get_run(run.parent_run_id)
        if parent is None:
            return run.parent_run_id
        run = parent
    return run.run_id


class ResilientResource(dg.ConfigurableResource[Any]):
    """The durable state of a code location's tasks.

    Attributes:
        url: ``s3://bucket/prefix``, a directory, or ``memory://name`` (one process only).
        storage_options: As fsspec spells them. Prefer the environment (``AWS_*``) for credentials: what stands in a
            resource's configuration is shown in the Dagster UI.
        s3: A dagster-aws `S3Resource` whose credentials and endpoint are used.
        state_url: A database that keeps the state (``postgresql://...``, ``sqlite:///path``) where the store cannot
            decide who creates an object first. By default the state lies beside the data. Give it by `EnvVar`.
        heartbeat_seconds: Seconds between heartbeats; None: in proportion to the TTL, 10 s for 45 s.
        ttl_seconds: Seconds without a heartbeat after which a process counts as lost.
        preview_rows: How many rows of a table its materialization shows, 5 at most. They go to Dagster's event log.
    """

    url: str
    storage_options: dict[str, Any] = Field(default={}, repr=False)
    s3: dg.ResourceDependency[Any] = None  # type: ignore[assignment]  # Dagster takes a default
    state_url: str | None = Field(default=None, repr=False)
    heartbeat_seconds: float | None = None
    ttl_seconds: float = DEFAULT_TTL
    preview_rows: int = HEAD_ROWS
    _attempt: Attempt | None = PrivateAttr(default=None)

    @property
    def interval(self) -> float:
        """Seconds between heartbeats."""
        return heartbeat_interval(self.heartbeat_seconds, self.ttl_seconds)

    @cached_property
    def store(self) -> ObjectStore:
        """The object store at `url`."""
        self.interval  # noqa: B018 - refused before anything is opened
        return open_store(self.url, self._options())

    def _options(self) -> dict[str, Any]:
        if self.s3 is None:
            return self.storage_options
        given = options_from_s3_resource(self.s3)
        twice = sorted(given.keys() & self.storage_options.keys())
        if twice:
            raise ConfigurationError(f"storage_options and the S3Resource both give {', '.join(twice)}; give it once.")
        return given | self.storage_options

    @cached_property
    def records(self) -> RecordStore:
        """Where the state is kept: logs, fences, tries, verdicts."""
        return open_state(self.state_url, self.store) or ObjectRecords(self.store)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Begin this process's try: heartbeat and claim, before any work of the step."""
        if context.run is not None and context.instance is not None:
            self._attempt = self._begin(context.run, context.instance)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """End this process's heartbeat for the run, once all copies of the resource are done with it."""
        if self._attempt is None or context.run is None:
            return
        key = self._attempt_key(context.run)
        with _attempts_lock:
            _users[key] -= 1
            last = _users[key] <= 0 and _attempts.pop(key, None) is not None
        if last and self._attempt.sidecar is not None:
            self._attempt.sidecar.close()
        self._attempt = None

    def task(self, context: dg.AssetExecutionContext, asset: AssetName | None = None) -> Task:
        """Return the task of the asset that a step computes.

        Args:
            context: The step's context.
            asset: Which asset, where the step computes several.

        Raises:
            ConfigurationError: The step computes several assets, and none was named; or the asset is partitioned, and
                the run targets no partition.
        """
        key = _asset_key(context, asset)
        keys = _partition_keys(context, key)
        code_version = context.assets_def.code_versions_by_key.get(key) if context.has_assets_def else None
        fingerprint = None if code_version is None else f"code:{code_version}"
        return Task(self.attempt(), tuple(key.path), keys, fingerprint, DagsterHooks(context, key, self.preview_rows))

    def load(self, asset: AssetName, expected: type[T] | None = None, partition: str | None = None) -> T:
        """Load the current value of an asset partition, also outside a run (a notebook, a service)."""
        return load_value(self.store, asset_path(asset), partition, expected, self.records)

    def attempt(self) -> Attempt:
        """Return this process's try; outside a run (a unit test that calls the asset), one of a lineage of its own."""
        if self._attempt is None:
            name = f"direct-{uuid.uuid4().hex}"
            self._attempt = begin_attempt(
                self.store, run_id=name, root=name, series=name, instance_id="direct", records=self._own_records
            )
        return self._attempt

    def _begin(self, run: dg.DagsterRun, instance: dg.DagsterInstance) -> Attempt:
        """The IO manager nests a copy of this resource: both share one try, or they would fence each other."""
        key = self._attempt_key(run)
        with _attempts_lock:
            if key not in _attempts:
                _attempts[key] = begin_attempt(
                    self.store,
                    run_id=run.run_id,
                    root=run.root_run_id or run.run_id,
                    series=series_of(run, instance.get_run_by_id),
                    instance_id=instance_id(instance),
                    interval=self.interval,
                    ttl=self.ttl_seconds,
                    worker=_run_worker(run.run_id),
                    records=self._own_records,
                    cancelled=partial(_is_cancelled, instance, run.run_id),
                )
            _users[key] += 1
            return _attempts[key]

    @property
    def _own_records(self) -> RecordStore | None:
        """The database, or None for the store, which then must show that it honours create-if-absent."""
        return None if self.state_url is None else self.records

    def _attempt_key(self, run: dg.DagsterRun) -> AttemptKey:
        return os.getpid(), self.store.url, run.run_id

    @contextmanager
    def run_worker(
        self,
        run: dg.DagsterRun,
        instance: dg.DagsterInstance,
        begun: Callable[[RecordStore], None] = lambda _: None,
    ) -> Iterator[None]:
        """Around a run in its worker: fence the earlier runs of its group, then keep a heartbeat for the run."""
        root = run.root_run_id or run.run_id
        if run.parent_run_id is not None:
            self._fence_earlier(run, root, instance)
        sidecar = ensure_sidecar(
            self.store,
            run_id=run.run_id,
            root=root,
            role="worker",
            instance_id=instance_id(instance),
            interval=self.interval,
            ttl=self.ttl_seconds,
        )
        try:
            begun(hasty(self.records, _BRIEF_PATIENCE))
            yield
        finally:
            if sidecar is not None:
                sidecar.close()

    def _fence_earlier(self, run: dg.DagsterRun, root: str, instance: dg.DagsterInstance) -> None:
        group = [other.run_id for other in run_group(instance, run)]
        earlier = {root, *group[: group.index(run.run_id)]} - {run.run_id}
        for run_id in sorted(earlier):
            fence_run(
                self.records,
                run_id,
                reason=f"Run {run.run_id} re-executes it.",
                failure_class="superseded",
                by=run.run_id,
            )


class DagsterHooks(CommitHooks):
    """Records each committed partition of a range in Dagster's event log as it comes."""

    def __init__(self, context: dg.AssetExecutionContext, key: dg.AssetKey, preview_rows: int) -> None:
        self._context, self._key, self._preview_rows = context, key, preview_rows

    def committed(self, partition_key: str, stored: StoredValue) -> None:
        """Log a materialization at once: an event that waits for the end of the step dies with it."""
        metadata = value_metadata(stored, partitioned=True, preview_rows=self._preview_rows)
        self._context.log_event(
            dg.AssetMaterialization(asset_key=self._key, partition=partition_key, metadata=metadata)
        )
        self._mark(partition_key)

    def reused(self, partition_key: str, value: ValueRef) -> None:
        """Say in the log what is not computed again, and why."""
        self._context.log.info(
            f"{self._key.to_user_string()}[{partition_key}]: committed by run {value.run_id}; not computed again."
        )
        self._mark(partition_key)

    def _mark(self, partition_key: str) -> None:
        """At the end of a range Dagster logs one more event per partition; mark it: nothing was computed for it."""
        self._context.add_asset_metadata({REUSED: True}, asset_key=self._key, partition_key=partition_key)


def _asset_key(context: dg.AssetExecutionContext, asset: AssetName | None) -> dg.AssetKey:
    keys = context.assets_def.keys if context.has_assets_def else {context.asset_key}
    if asset is not None:
        key = dg.AssetKey(list(asset_path(asset)))
        if key not in keys:
            raise ConfigurationError(f"This step does not compute the asset {key.to_user_string()}.")
        return key
    if len(keys) != 1:
        names = ", ".join(sorted(key.to_user_string() for key in keys))
        raise ConfigurationError(
            f"This step computes several assets ({names}); name one: resilient.task(context, asset=...)."
        )
    only: dg.AssetKey = next(iter(keys))
    return only


def _partition_keys(context: dg.AssetExecutionContext, key: dg.AssetKey) -> tuple[str, ...]:
    """Return the targeted partitions; none for an unpartitioned asset in a run over a range of others' partitions."""
    partitioned = context.has_assets_def and context.assets_def.specs_by_key[key].partitions_def is not None
    if context.has_assets_def and not partitioned:
        return ()
    if context.has_partition_key or context.has_partition_key_range:
        return tuple(str(key) for key in context.partition_keys)
    if partitioned:
        raise ConfigurationError(
            f"{key.to_user_string()}: this run targets no partition of the asset, which is partitioned. Choose one "
            'by its name; Dagster takes the key "" for none.'
        )
    return ()


def _is_cancelled(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a user asked to end the run. It is read anew: the answer is that of the moment."""
    run = instance.get_run_by_id(run_id)
    return run is not None and cancelled_by_user(instance, run)


def _run_worker(run_id: str) -> tuple[int, int] | None:
    """Return the run worker that the executor named in the environment, unless this process is it.

    Also where it is dead already: a step that began as an orphan must end like any other. The run tells it from the
    worker of another run, of which this process was started by a step.
    """
    pid, started, of_run = (os.environ.get(RUN_WORKER_ENV) or "0:0:").split(":", 2)
    return (int(pid), int(started)) if of_run == run_id and int(pid) != os.getpid() else None
