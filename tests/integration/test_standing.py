"""How recovery stands with Dagster's own retries, monitoring, pools, queue and failure sensors: one owner for each."""

import time
import uuid
from collections.abc import Iterator

import dagster as dg
import pytest
from standing import FAILURE, QUEUED, STARTED, STARTING, SUCCESS, Standing, stand
from standing_launcher import Launcher

ALERTS = "resilient_gave_up"
SETTINGS = """
run_retries: {enabled: true, max_retries: 0}
run_monitoring: {enabled: true, start_timeout_seconds: 1, max_resume_run_attempts: 1}
concurrency:
  runs:
    max_concurrent_runs: 20
    tag_concurrency_limits: [{key: team, value: x, limit: 1}]
"""


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """One instance with every feature switched on; each test has runs of its own."""
    with stand(tmp_path_factory.mktemp("standing"), SETTINGS) as standing:
        standing.tick(ALERTS, "every_failure")
        standing.retry()  # the first look of each only remembers where the log ends
        yield standing


@pytest.fixture
def here(dagster: Standing) -> Iterator[Standing]:
    """The instance, left quiet at the end."""
    yield dagster
    dagster.end_all()


# ---- run retries: one owner


def test_recovery_takes_over_when_dagsters_retries_are_exhausted(here: Standing) -> None:
    """Dagster retries once, as its tag says; then recovery counts its own attempts from one."""
    here.fail_next("value", times=2)
    run = here.work(here.launch("values", **{"dagster/max_retries": "1"}))
    assert here.tick() == "Nothing to recover."
    here.retry()
    retried = here.only_child(run)
    assert here.tick() == "Nothing to recover."
    assert here.work_all()[0].status is FAILURE
    here.tick()
    ours = here.only_child(retried)
    assert ours.tags["resilient/attempt"] == "1"
    for _ in range(2):
        here.retry()
        here.tick()
    assert [here.now(r).status for r in here.work_all()] == [SUCCESS]
    assert len(here.instance.get_runs(dg.RunsFilter(tags={"dagster/root_run_id": run.run_id}))) == 2


def test_a_lost_run_that_dagster_retries_is_not_re_executed_twice(here: Standing) -> None:
    """Recovery closes the run; the retry that Dagster owes it comes from Dagster, and from nobody else."""
    run = here.lose(here.launch("values", **{"dagster/max_retries": "1"}))
    here.tick()
    assert here.children(run) == []
    here.retry()
    here.tick()
    child = here.only_child(run)
    assert child.tags["dagster/retry_number"] == "1"
    here.work_all()
    assert here.now(child).status is SUCCESS


def test_a_lost_run_without_retries_is_re_executed_by_recovery_alone(here: Standing) -> None:
    """Dagster's retries look at the failure that recovery reported, and leave it."""
    run = here.lose(here.launch("values"))
    here.tick()
    here.retry()
    here.tick()
    assert here.only_child(run).tags["resilient/attempt"] == "1"


def test_what_recovery_launches_is_not_retried_by_dagster(here: Standing) -> None:
    """Dagster does not retry this failure, so the group is recovery's; nor does Dagster come back for the next one."""
    tags = {"dagster/max_retries": "3", "dagster/retry_on_asset_or_op_failure": "false"}
    here.fail_next("value")
    run = here.work(here.launch("values", **tags))
    here.retry()
    here.tick()
    child = here.only_child(run)
    here.queue()
    here.lose(child)
    here.retry()
    here.tick()
    assert "resilient/recovery_of" in here.only_child(child).tags
    assert "dagster/retry_number" not in here.only_child(child).tags


def test_a_failure_that_dagster_has_not_yet_marked_is_left_to_it(here: Standing) -> None:
    """The mark is written after the status: in between, recovery works out what Dagster will do."""
    run = here.launch("values", **{"dagster/max_retries": "1"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(here.instance), "add_run_tags", lambda *_: None)
        here.fail(run)
    assert "dagster/will_retry" not in here.now(run).tags
    here.tick()
    assert here.children(run) == []
    here.retry()
    assert here.only_child(run).tags["dagster/retry_number"] == "1"


def test_a_retry_that_dagster_does_not_make_is_recoverys(here: Standing) -> None:
    """Dagster marks a run of the command line for a retry, and then has no code location to launch it from."""
    like = here.launch("values", **{"dagster/max_retries": "1"})
    run = here.fail(here.instance.add_run(like._replace(run_id=str(uuid.uuid4()), remote_job_origin=None)))
    assert run.tags["dagster/will_retry"] == "true"
    here.retry()
    here.tick()
    assert here.children(run) == []
    here.age(run, 400)
    here.tick()
    assert here.only_child(run).tags["resilient/recovery_of"] == run.run_id
    assert here.now(run).tags["dagster/will_retry"] == "false"


def test_tags_that_were_copied_are_no_attempt(here: Standing) -> None:
    """Dagster's retries and the UI copy the tags of what they launch again; only what recovery launched counts."""
    here.fail_next("value", times=2)
    run = here.work(here.launch("values"))
    here.tick()
    here.queue()
    ours = here.work(here.only_child(run))
    lineage = {"parent_run_id": ours.run_id, "root_run_id": run.run_id, "run_id": str(uuid.uuid4())}
    tags = {**ours.tags, "dagster/parent_run_id": ours.run_id, "dagster/root_run_id": run.run_id}
    copy = here.fail(here.instance.add_run(ours._replace(**lineage, tags=tags, status=STARTED)))
    here.tick()
    assert here.only_child(copy).tags["resilient/attempt"] == "2"


# ---- run monitoring


def test_a_run_that_never_started_is_recovered_once(here: Standing) -> None:
    """Dagster's monitoring fails it; recovery re-executes it, and its waiting re-execution is not timed out."""
    run = here.launch("values")
    here.wait(lambda: here.monitored(run).status is FAILURE)
    for _ in range(2):
        here.tick()
        here.monitor()
    assert here.only_child(run).status is QUEUED


def test_a_worker_that_dagster_resumes_is_not_doubled(here: Standing) -> None:
    """Monitoring resumes the dead worker's run; once recovery has closed it, nobody resumes it any more."""
    run = here.start(here.launch("values"))
    Launcher.dead.add(run.run_id)
    here.monitor()
    assert Launcher.resumed.count(run.run_id) == 1
    here.tick_until(lambda: here.children(run))
    here.monitor()
    here.tick()
    assert Launcher.resumed.count(run.run_id) == 1
    assert here.fence(run) is not None
    assert len(here.children(run)) == 1


def test_a_live_run_that_monitoring_failed_commits_no_more(here: Standing) -> None:
    """One unknown health check fails a run that may well be alive: it is fenced before its re-execution is queued."""
    run = here.start(here.launch("values"))
    Launcher.dead.add(run.run_id)
    here.monitor()
    here.monitor()
    assert here.now(run).status is FAILURE
    here.tick()
    assert here.fence(run) is not None
    assert here.only_child(run).status is QUEUED


# ---- pools and queue


def test_the_slot_of_a_lost_run_is_freed(here: Standing) -> None:
    """The pool has one slot, and the dead run's step holds it: its re-execution must not wait for it for ever."""
    here.instance.event_log_storage.set_concurrency_slots("gpu", 1)
    run = here.start(here.launch("pooled_job"))
    assert here.instance.event_log_storage.claim_concurrency_slot("gpu", run.run_id, "pooled").is_claimed
    here.tick_until(lambda: here.children(run))
    info = here.instance.event_log_storage.get_concurrency_info("gpu")
    assert info.active_slot_count == 0
    here.queue()
    assert here.now(here.only_child(run)).status is STARTING


def test_the_slot_of_a_crashed_run_is_freed(here: Standing) -> None:
    """Dagster reports a crashed worker itself, and leaves the slots of its steps taken."""
    here.instance.event_log_storage.set_concurrency_slots("gpu", 1)
    run = here.start(here.launch("pooled_job"))
    here.instance.event_log_storage.claim_concurrency_slot("gpu", run.run_id, "pooled")
    here.instance.report_run_failed(run, "Run worker crashed.")
    here.tick()
    assert here.instance.event_log_storage.get_concurrency_info("gpu").active_slot_count == 0
    assert here.only_child(run).status is QUEUED


def test_a_re_execution_is_queued_like_any_other_run(here: Standing) -> None:
    """Its priority and limits are kept; while it waits it is neither lost nor launched a second time."""
    tags = {"team": "x", "dagster/priority": "7"}
    here.fail_next("value")
    run = here.work(here.launch("values", **tags))
    other = here.launch("unwatched", team="x")  # nobody expects heartbeats of it, however slow the ticks are
    for _ in range(3):
        here.tick()
        here.queue()
    child = here.only_child(run)
    assert (here.now(other).status, child.status) == (STARTING, QUEUED)
    assert child.tags.items() >= tags.items()
    here.work(other)
    here.queue()
    assert here.now(child).status is STARTING


# ---- alerts


def until_given_up(here: Standing) -> list[str]:
    """Let a run fail until recovery gives it up; return its run and all its re-executions, oldest first."""
    here.fail_next("value", times=3)
    group = [here.work(here.launch("values", team="y"))]
    while here.tick() and (children := here.children(group[-1])):
        here.queue()
        group.append(here.work(children[0]))
    return [run.run_id for run in group]


def test_people_are_told_once_at_the_end_of_the_attempts(here: Standing) -> None:
    """Dagster's failure sensor fires for each of the three runs; ours once, with the reason, for the last."""
    first, second, third = until_given_up(here)
    here.wait(lambda: here.tick("every_failure") and {first, second, third} <= set(here.noted("failures")))
    for _ in range(2):
        here.tick(ALERTS)
    told = [line for line in here.noted("given-up") if line.split("|")[0] in {first, second, third}]
    assert told == [f"{third}|user_error|2|below,value"]


def test_an_alert_that_cannot_be_sent_is_sent_later(here: Standing) -> None:
    """The pager is down: the sensor goes on, and tells when it is up again, once."""
    (here.folder / "pager-is-down").touch()
    last = until_given_up(here)[-1]
    here.tick(ALERTS)
    assert not any(line.startswith(last) for line in here.noted("given-up"))
    (here.folder / "pager-is-down").unlink()
    for _ in range(2):
        here.tick(ALERTS, "every_failure")
    assert sum(line.startswith(last) for line in here.noted("given-up")) == 1


def test_a_tag_that_a_user_copied_alerts_nobody(here: Standing) -> None:
    """Re-executing in the UI copies the tags of a run that was given up; its new failure is not yet the last word."""
    last = until_given_up(here)[-1]
    given_up = here.instance.get_run_by_id(last)
    assert given_up is not None
    again = here.fail(here.launch("values", **given_up.tags))
    assert again.tags["resilient/verdict"] == "gave up"
    here.tick(ALERTS)
    assert here.children(again)
    assert not any(line.startswith(again.run_id) for line in here.noted("given-up"))


# ---- real workers


@pytest.mark.slow
def test_a_step_is_retried_in_its_run_before_the_run_is_recovered(here: Standing) -> None:
    """A RetryPolicy's try goes on from the checkpoint of the try before; recovery goes on when the run has failed."""
    run = here.launch("trained_job")
    with here.worker(run):
        while not here.now(run).is_finished:
            assert here.tick() == "Nothing to recover." or here.now(run).is_finished
    here.tick()
    child = here.only_child(run)
    here.queue()
    assert here.work(child).status is SUCCESS
    assert here.noted("tried") == ["0:None", "1:1", "0:2", "1:3"]


@pytest.mark.slow
def test_a_run_that_waits_for_a_pool_is_not_lost(here: Standing) -> None:
    """Its worker beats while no step of it runs, for longer than the TTL; it goes on when the slot is free."""
    storage = here.instance.event_log_storage
    storage.set_concurrency_slots("gpu", 1)
    run = here.launch("pooled_job")
    assert storage.claim_concurrency_slot("gpu", "somebody", "else").is_claimed
    with here.worker(run):
        here.wait(lambda: storage.get_concurrency_info("gpu").pending_step_count)
        waited = time.monotonic() + 4.0
        while time.monotonic() < waited:
            assert here.tick() == "Nothing to recover."
        storage.free_concurrency_slots_for_run("somebody")
        here.wait(lambda: here.now(run).is_finished)
    assert here.now(run).status is SUCCESS
