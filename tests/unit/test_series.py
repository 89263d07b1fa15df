"""Which runs continue which: lineage orders tries, the series decides what may be reused."""

import dagster as dg
import pytest

from dagster_resilient.resources import RECOVERY_OF_TAG, resumes_parent, series_of


def a_run(run_id: str, parent: str | None = None, **tags: str) -> dg.DagsterRun:
    """One run of the group of run a."""
    return dg.DagsterRun(
        job_name="j", run_id=run_id, parent_run_id=parent, root_run_id="a" if parent else None, tags=tags
    )


def series(*runs: dg.DagsterRun) -> str:
    """The series of the last run."""
    return series_of(runs[-1], {run.run_id: run for run in runs}.get)


def test_a_first_run_begins_a_series():
    """A run without a parent continues nothing."""
    assert series(a_run("a")) == "a"


@pytest.mark.parametrize("tag", ["dagster/is_resume_retry", "dagster/is_asset_resume_retry", "resilient/resume"])
def test_from_failure_stays_in_the_series(tag):
    """Dagster's "from failure", and a user's wish, continue the parent's work."""
    assert series(a_run("a"), a_run("b", "a", **{tag: "true"})) == "a"


def test_re_execute_all_begins_a_series_of_its_own():
    """Without any wish to resume, a re-execution starts afresh."""
    assert series(a_run("a"), a_run("b", "a")) == "b"


def test_recovery_continues_what_was_started_afresh():
    """The fresh run is lost in its turn: its recovery resumes the fresh state, not the old one."""
    fresh = a_run("b", "a")
    assert series(a_run("a"), fresh, a_run("c", "b", **{RECOVERY_OF_TAG: "b"})) == "b"


def test_a_copied_recovery_tag_does_not_resume():
    """The UI copies tags to a re-execution; ours counts only where it names the run's own parent."""
    recovered = a_run("b", "a", **{RECOVERY_OF_TAG: "a"})
    assert not resumes_parent(a_run("c", "b", **{RECOVERY_OF_TAG: "a"}))
    assert series(a_run("a"), recovered, a_run("c", "b", **{RECOVERY_OF_TAG: "a"})) == "c"


def test_the_whole_chain_counts():
    """A re-execution of a re-execution of a re-execution finds the first run's work."""
    chain = [a_run("a"), *(a_run(n, p, **{RECOVERY_OF_TAG: p}) for p, n in zip("abc", "bcd", strict=True))]
    assert series(*chain) == "a"


def test_a_deleted_parent_still_names_the_series():
    """Where the parent run was deleted from the instance, its id is all that is needed."""
    assert series(a_run("b", "a", **{RECOVERY_OF_TAG: "a"})) == "a"
