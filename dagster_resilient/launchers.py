"""Ways to launch a re-execution: from a code location's own definitions, or through Dagster's webserver.

Both make a true re-execution, with parent and root, so that Dagster shows one group of runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import dagster as dg
import requests

from dagster_resilient import dagster_compat as compat
from dagster_resilient.errors import ConfigurationError, LaunchError

LAUNCH_TAG = "resilient/launch"
_TIMEOUT = (5.0, 60.0)
_SHOWN = 300  # characters of what a webserver answers
# Seconds for which a request that got no answer may still be at work in the webserver.
IN_DOUBT = 90.0

_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRunReexecution(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
    ... on UnauthorizedError { message }
    ... on InvalidSubsetError { message }
    ... on PipelineNotFoundError { message }
    ... on ConflictingExecutionParamsError { message }
    ... on NoModeProvidedError { message }
    ... on RunConflict { message }
    ... on PresetNotFoundError { message }
  }
}
"""
# What the user's selection or deployment must change. All else, a webserver that is starting, say, passes.
_FINAL = frozenset({"RunConfigValidationInvalid", "InvalidSubsetError", "ConflictingExecutionParamsError"})


@dataclass(frozen=True)
class Relaunch:
    """A re-execution to be launched.

    Attributes:
        parent: The run that is re-executed; its config and selection are taken over.
        run_id: A UUID that is the same whenever this decision is come to again.
        assets: What to compute; None: the steps that the parent left undone.
        checks: Exactly these asset checks; None: those of the assets, as far as the parent had selected them.
        tags: All tags of the new run.
        in_doubt: Seconds since the decision was recorded by an earlier tick, which may have launched it; None: this
            tick recorded it.
    """

    parent: dg.DagsterRun
    run_id: str
    assets: Sequence[dg.AssetKey] | None
    checks: Sequence[dg.AssetCheckKey] | None
    tags: Mapping[str, str]
    in_doubt: float | None = None


class Launcher(Protocol):
    """Launches re-executions, each once."""

    def launch(self, wanted: Relaunch) -> bool:
        """Launch a re-execution. False: it was launched before, or may have been and is looked for again.

        Raises:
            ConfigurationError: It can never be launched this way.
            LaunchError: It could not be launched now.
        """


class OwnLocation:
    """Launches from the definitions of the code location in which the sensor runs. Decided by the run id: once."""

    def __init__(self, context: dg.SensorEvaluationContext) -> None:
        self._context = context

    def launch(self, wanted: Relaunch) -> bool:
        """Create the run, and queue it."""
        _, new = compat.launch_reexecution(
            self._context,
            wanted.parent,
            run_id=wanted.run_id,
            asset_keys=wanted.assets,
            check_keys=wanted.checks,
            tags=wanted.tags,
        )
        return new


class Webserver:
    """Launches through the GraphQL API of Dagster's webserver, which loads no user code and asks the right location.

    Dagster chooses the id of the new run, so the tag `resilient/launch` tells whether it is there. Where an earlier
    tick died over its request, a second one is sent only once that cannot be at work any more.

    Args:
        instance: The instance that the webserver serves.
        url: Its address, such as ``http://webserver:3000``, with its path prefix if it has one.
        headers: What it wants of its clients, such as a token. They are in no log or message.
    """

    def __init__(self, instance: dg.DagsterInstance, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._instance = instance
        self._url = url.rstrip("/").removesuffix("/graphql") + "/graphql"
        self._headers = dict(headers or {})

    def launch(self, wanted: Relaunch) -> bool:
        """Send one request, which is not repeated: a lost reply is cleared up by the next tick."""
        if wanted.in_doubt is not None and wanted.in_doubt < IN_DOUBT:
            return False
        there = self._instance.get_runs(dg.RunsFilter(tags={LAUNCH_TAG: wanted.run_id}), limit=1)
        if there:
            # A webserver that died between creating the run and queueing it left it not started.
            return compat.queue_once(self._instance, there[0])
        answer = self._post({"query": _LAUNCH, "variables": {"params": self._params(wanted)}})
        result = answer.get("launchRunReexecution") or {}
        kind = result.get("__typename", "no answer")
        if kind == "LaunchRunSuccess":
            return True
        text = _text_of(result)
        if kind in _FINAL:
            raise ConfigurationError(f"Dagster refuses to re-execute run {wanted.parent.run_id}: {kind}: {text}")
        raise LaunchError(f"The webserver at {self._url} did not launch run {wanted.parent.run_id}: {kind}: {text}")

    def _post(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            reply = requests.post(self._url, json=body, headers=self._headers, timeout=_TIMEOUT)
            if not reply.ok:
                text = " ".join(reply.text.split())[:_SHOWN]
                raise LaunchError(
                    f"The webserver at {self._url} answers {reply.status_code}: {text}; "
                    "the next tick tries again. Check that the run's code location is loaded there."
                )
            answer = reply.json()
        except (requests.RequestException, ValueError) as error:
            raise LaunchError(
                f"The webserver at {self._url} does not answer ({type(error).__name__}); the next tick tries again. "
                "Check `webserver_url` of the recovery sensor."
            ) from error
        if answer.get("errors"):
            messages = "; ".join(str(error.get("message")) for error in answer["errors"])
            raise LaunchError(f"The webserver at {self._url} refuses the request: {messages}")
        data: Mapping[str, Any] = answer.get("data") or {}
        return data

    def _params(self, wanted: Relaunch) -> dict[str, Any]:
        parent = wanted.parent
        location, repository = compat.location_of(parent)
        selector: dict[str, Any] = {
            "repositoryLocationName": location,
            "repositoryName": repository,
            "jobName": parent.job_name,
        }
        steps: Sequence[str] | None = None
        if wanted.assets is not None:
            selector["assetSelection"] = [{"path": list(key.path)} for key in wanted.assets]
            checks = compat.kept_checks(parent, wanted.assets) if wanted.checks is None else wanted.checks
            if checks is not None:
                selector["assetCheckSelection"] = [
                    {"assetKey": {"path": list(check.asset_key.path)}, "name": check.name} for check in checks
                ]
        else:
            selector |= _as_selected(parent)
            steps, _ = compat.steps_left(self._instance, parent)
        tags = {**wanted.tags, **compat.lineage_tags(parent), LAUNCH_TAG: wanted.run_id}
        return {
            "selector": selector,
            "runConfigData": parent.run_config,
            "stepKeys": list(steps) if steps is not None else None,
            "executionMetadata": {
                "parentRunId": parent.run_id,
                "rootRunId": parent.root_run_id or parent.run_id,
                "tags": [{"key": key, "value": value} for key, value in sorted(tags.items())],
            },
        }


def _as_selected(parent: dg.DagsterRun) -> dict[str, Any]:
    selected: dict[str, Any] = {}
    if parent.op_selection is not None:
        selected["solidSelection"] = list(parent.op_selection)
    if parent.asset_selection is not None:
        selected["assetSelection"] = [{"path": list(key.path)} for key in sorted(parent.asset_selection)]
    if parent.asset_check_selection is not None:
        selected["assetCheckSelection"] = [
            {"assetKey": {"path": list(check.asset_key.path)}, "name": check.name}
            for check in sorted(parent.asset_check_selection)
        ]
    return selected


def _text_of(result: Mapping[str, Any]) -> str:
    errors = [str(error.get("message")) for error in result.get("errors") or ()]
    return "; ".join(errors) or str(result.get("message") or "")
