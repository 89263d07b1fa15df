"""The buttons of Dagster's run page, clicked in a real browser: what a person re-executes is resumed, not redone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from deployment import Deployment
from playwright.sync_api import Page, sync_playwright

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60_000  # milliseconds
SUCCESS = dg.DagsterRunStatus.SUCCESS
# Root runs by what befalls them, each over partitions of its own.
RANGES = {"fail": "abcd", "hang": "efgh", "kill": "ijkl"}


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One for all tests; each has a root run of its own."""
    found = Deployment(tmp_path_factory.mktemp("dagster"), Path(__file__).with_name("browser_location.py"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def page(dagster: Deployment) -> Iterator[Page]:
    """A tab of a fresh browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        found = browser.new_page(viewport={"width": 1500, "height": 1000})
        found.set_default_timeout(PATIENCE)
        yield found
        browser.close()


@pytest.fixture(scope="module")
def roots(dagster: Deployment) -> dict[str, str]:
    """Root runs, begun at once: in the middle of the range one fails, one hangs, one is killed."""
    return {name: dagster.launch(partitions, name) for name, partitions in RANGES.items()}


def before(name: str) -> list[str]:
    """What a root run computes until its trouble."""
    return ["base", *(f"letters {key}" for key in RANGES[name][:2])]


def rest(name: str) -> list[str]:
    """What it leaves."""
    return [*(f"letters {key}" for key in RANGES[name][2:]), "words"]


def reexecute(dagster: Deployment, page: Page, run_id: str, button: str) -> dg.DagsterRun:
    """Choose from a run's menu of re-executions; return the new run when it has ended."""
    known = set(dagster.children(run_id))
    page.goto(f"{dagster.url}/runs/{run_id}")
    main = page.get_by_role("button", name=re.compile("^Re-execute"))
    main.locator("xpath=following::button[1]").click()
    page.get_by_role("menuitem").get_by_text(button, exact=True).click()
    (child,) = dagster.wait(lambda: set(dagster.children(run_id)) - known, f"a run by {button!r}")
    page.wait_for_url(f"**/runs/{child}")
    return dagster.ended(child)


def shows(page: Page, status: str) -> None:
    """Wait until the page of the run that it is at shows its status."""
    page.get_by_text(status, exact=True).first.wait_for()


def test_from_failure_computes_only_what_is_missing(dagster: Deployment, page: Page, roots: dict[str, str]) -> None:
    """Of the range, and below it. Dagster alone selects the step, and computes all of it again."""
    dagster.ended(roots["fail"])
    assert dagster.computed(roots["fail"]) == before("fail")
    child = reexecute(dagster, page, roots["fail"], "From failure")
    assert (child.status, dagster.computed(child.run_id)) == (SUCCESS, rest("fail"))
    shows(page, "Success")


def test_all_starts_afresh(dagster: Deployment, page: Page, roots: dict[str, str]) -> None:
    """Whatever the group has done: the person asked for all."""
    dagster.ended(roots["fail"])
    child = reexecute(dagster, page, roots["fail"], "All steps in root run")
    assert (child.status, dagster.computed(child.run_id)) == (SUCCESS, [*before("fail"), *rest("fail")])


def test_a_cancel_is_respected_until_a_person_goes_on(dagster: Deployment, page: Page, roots: dict[str, str]) -> None:
    """The recovery sensor leaves the run alone.

    "From asset failure" then drops no partition: Dagster alone takes the range for done after its first one.
    """
    root = roots["hang"]
    dagster.wait(lambda: dagster.computed(root) == before("hang"), "the hang")
    page.goto(f"{dagster.url}/runs/{root}")
    page.get_by_role("button", name="Terminate").click()
    page.get_by_role("dialog").get_by_role("button", name=re.compile("^Terminate")).click()
    assert dagster.ended(root).status == dg.DagsterRunStatus.CANCELED
    cancelled = time.time()
    dagster.wait(lambda: dagster.ticks_since(cancelled), "a look of the recovery sensor")
    assert dagster.children(root) == []
    child = reexecute(dagster, page, root, "From asset failure")
    assert (child.status, dagster.computed(child.run_id)) == (SUCCESS, rest("hang"))


@pytest.mark.parametrize("button", ["From failure", "From asset failure"])
def test_buttons_on_a_recovered_run_redo_nothing(
    dagster: Deployment, page: Page, roots: dict[str, str], button: str
) -> None:
    """Dagster selects what the root run left. The recovery did that; the new run says so, and succeeds at once."""
    root = roots["kill"]
    recovery = dagster.ended(dagster.wait(lambda: dagster.children(root), "the recovery")[-1])
    assert (recovery.status, dagster.computed(recovery.run_id)) == (SUCCESS, rest("kill"))
    child = reexecute(dagster, page, root, button)
    assert (child.status, dagster.computed(child.run_id)) == (SUCCESS, [])
    assert f"words[i..l: 4]: committed by run {recovery.run_id}; not computed again." in dagster.said(child.run_id)
    shows(page, "Success")
