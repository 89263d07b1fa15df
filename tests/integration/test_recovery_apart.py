"""Recovery in a code location of its own, which imports none of the user's code, and launches through the webserver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from deployment import Deployment

from dagster_resilient import ResilientResource, plan_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Webserver, daemon, the user's code location and the recovery's, all as real processes."""
    places = [Path(__file__).with_name(name) for name in ("apart_user.py", "apart_recovery.py")]
    found = Deployment(tmp_path_factory.mktemp("dagster"), *places)
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def roots(dagster: Deployment) -> tuple[str, str]:
    """A run over a range whose machine is gone, and one of plain ops one of whose steps is killed."""
    return dagster.launch("af", "", "everything"), dagster.launch("", "", "mapped")


def the_child(dagster: Deployment, root: str) -> dg.DagsterRun:
    """Wait for the re-execution, and for its end."""
    (child,) = dagster.wait(lambda: dagster.children(root), f"the re-execution of {root}", 120)
    return dagster.ended(child)


def test_a_lost_run_is_recovered_without_the_users_code(dagster: Deployment, roots: tuple[str, str]) -> None:
    """Exactly what is missing is launched: four letters of six, and the asset below; `base` and its check stand."""
    child = the_child(dagster, roots[0])
    assert child.status == SUCCESS, dagster.said(child.run_id)
    root = dagster.ended(roots[0])
    assert root.status == FAILURE
    assert "after a failure of class lost" in dagster.said(root.run_id)
    assert child.asset_selection == {dg.AssetKey("letters"), dg.AssetKey("below")}
    assert (child.parent_run_id, child.root_run_id) == (root.run_id, root.run_id)
    ends = [child.tags[f"dagster/asset_partition_range_{end}"] for end in ("start", "end")]
    assert ends == ["c", "f"]
    assert Counter(dagster.computed(root.run_id)) == Counter(["base", "check", "a", "b"])
    assert dagster.computed(child.run_id) == ["c", "d", "e", "f", "below"]


def test_ops_go_on_from_the_step_that_failed(dagster: Deployment, roots: tuple[str, str]) -> None:
    """Mapped steps that succeeded are left out one by one; nothing is computed twice."""
    child = the_child(dagster, roots[1])
    assert child.status == SUCCESS, dagster.said(child.run_id)
    done = [*dagster.computed(roots[1]), *dagster.computed(child.run_id)]
    assert Counter(done) == Counter(["pieces", "work 0", "work 1", "work 2", "together 3"])
    assert child.tags["resilient/recovery_of"] == roots[1]


def test_a_dry_run_needs_no_users_code_either(dagster: Deployment, roots: tuple[str, str], tmp_path: Path) -> None:
    """After the recovery nothing is left of the lost run; what it had to do, its worker stored at its start."""
    the_child(dagster, roots[0])
    store = dagster.folder / "store"
    found = plan_run(roots[0], dagster.instance, ResilientResource(url=str(store)))
    assert found.is_empty, found.words()
    assert found.partitions_saved == 8
