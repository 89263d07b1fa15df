"""Launching through the webserver: what it is asked, and what becomes of every kind of answer."""

import json
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import dagster as dg
import pytest
from dagster._core.code_pointer import FileCodePointer
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from dagster_resilient.errors import ConfigurationError, LaunchError
from dagster_resilient.launchers import IN_DOUBT, LAUNCH_TAG, Relaunch, Webserver

QUEUE = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}}
SECRET = "canary-4711"
LAUNCHED = {"data": {"launchRunReexecution": {"__typename": "LaunchRunSuccess", "run": {"runId": "x"}}}}


class Answers:
    """A webserver that says what it is told to."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, json.dumps(LAUNCHED), list[tuple[dict[str, Any], dict[str, str]]]()
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answers.asked.append((body, dict(self.headers)))
                self.send_response(answers.status)
                self.end_headers()
                self.wfile.write(answers.body.encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, kind: str, **fields: Any) -> None:
        """Answer with a type of GraphQL."""
        self.body = json.dumps({"data": {"launchRunReexecution": {"__typename": kind, **fields}}})


@pytest.fixture
def answers() -> Iterator[Answers]:
    """Launches everything, until told otherwise."""
    found = Answers()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """An instance with a queue that nobody empties."""
    with dg.instance_for_test(overrides=QUEUE) as found:
        yield found


def a_run(instance: dg.DagsterInstance, **fields: Any) -> dg.DagsterRun:
    """A failed run of another code location."""
    location = GrpcServerCodeLocationOrigin(host="nowhere", port=1, location_name="theirs")
    origin = RemoteJobOrigin(RemoteRepositoryOrigin(location, "__repository__"), "job")
    code = JobPythonOrigin("job", RepositoryPythonOrigin(sys.executable, FileCodePointer(__file__, "theirs")))
    fields = {"status": dg.DagsterRunStatus.FAILURE, "remote_job_origin": origin, "job_code_origin": code} | fields
    return instance.add_run(dg.DagsterRun(job_name="job", run_id=str(uuid.uuid4()), **fields))


def wanted(parent: dg.DagsterRun, **fields: Any) -> Relaunch:
    """A re-execution of one asset."""
    fields = {"assets": [dg.AssetKey(["a", "b"])], "checks": None, "tags": {"team": "x"}} | fields
    return Relaunch(parent=parent, run_id="11111111-0000-0000-0000-000000000000", **fields)


def test_the_request_is_a_true_re_execution_of_the_selection(instance: dg.DagsterInstance, answers: Answers) -> None:
    """Location, job, config, assets and tags; parent and root; and the tag by which it is found again."""
    run = a_run(instance, run_config={"ops": {"x": {"config": 1}}})
    assert Webserver(instance, answers.url).launch(wanted(run))
    ((body, _),) = answers.asked
    params = body["variables"]["params"]
    assert params["selector"] == {
        "repositoryLocationName": "theirs",
        "repositoryName": "__repository__",
        "jobName": "job",
        "assetSelection": [{"path": ["a", "b"]}],
    }
    assert params["runConfigData"] == {"ops": {"x": {"config": 1}}}
    metadata = params["executionMetadata"]
    assert (metadata["parentRunId"], metadata["rootRunId"]) == (run.run_id, run.run_id)
    tags = {tag["key"]: tag["value"] for tag in metadata["tags"]}
    assert tags == {
        "team": "x",
        "dagster/parent_run_id": run.run_id,
        "dagster/root_run_id": run.run_id,
        LAUNCH_TAG: "11111111-0000-0000-0000-000000000000",
    }


def test_checks_are_named_one_by_one(instance: dg.DagsterInstance, answers: Answers) -> None:
    """Where only some of them are wanted."""
    check = dg.AssetCheckKey(dg.AssetKey("a"), "good")
    Webserver(instance, answers.url + "/graphql").launch(wanted(a_run(instance), assets=[], checks=[check]))
    selector = answers.asked[0][0]["variables"]["params"]["selector"]
    assert selector["assetSelection"] == []
    assert selector["assetCheckSelection"] == [{"assetKey": {"path": ["a"]}, "name": "good"}]


def test_a_run_that_is_there_is_not_launched_again(instance: dg.DagsterInstance, answers: Answers) -> None:
    """The reply was lost, or the tick died after the request; the run itself tells."""
    run = a_run(instance)
    instance.add_run(a_run(instance).with_tags({LAUNCH_TAG: wanted(run).run_id})._replace(run_id=str(uuid.uuid4())))
    assert not Webserver(instance, answers.url).launch(wanted(run))
    assert answers.asked == []


def test_a_request_that_may_be_at_work_is_not_repeated(instance: dg.DagsterInstance, answers: Answers) -> None:
    """A tick died over it: only after the webserver's own time for it is another one sent."""
    run = a_run(instance)
    assert not Webserver(instance, answers.url).launch(wanted(run, in_doubt=IN_DOUBT - 1))
    assert answers.asked == []
    assert Webserver(instance, answers.url).launch(wanted(run, in_doubt=IN_DOUBT + 1))


def test_a_run_that_the_webserver_created_and_did_not_queue_is_queued(
    instance: dg.DagsterInstance, answers: Answers
) -> None:
    """The webserver died in between."""
    run = a_run(instance)
    tags = {LAUNCH_TAG: wanted(run).run_id}
    left = a_run(instance, status=dg.DagsterRunStatus.NOT_STARTED, tags=tags)
    assert Webserver(instance, answers.url).launch(wanted(run, in_doubt=IN_DOUBT + 1))
    queued = instance.get_run_by_id(left.run_id)
    assert queued is not None
    assert queued.status == dg.DagsterRunStatus.QUEUED


@pytest.mark.parametrize(
    "kind", ["RunConfigValidationInvalid", "InvalidSubsetError", "ConflictingExecutionParamsError"]
)
def test_what_only_a_person_can_mend_is_final(instance: dg.DagsterInstance, answers: Answers, kind: str) -> None:
    """The message is Dagster's."""
    answers.say(kind, message="no such asset", errors=[{"message": "no such asset"}])
    with pytest.raises(ConfigurationError, match=f"{kind}: no such asset"):
        Webserver(instance, answers.url).launch(wanted(a_run(instance)))


@pytest.mark.parametrize("kind", ["PythonError", "PipelineNotFoundError", "UnauthorizedError"])
def test_what_may_pass_is_tried_again(instance: dg.DagsterInstance, answers: Answers, kind: str) -> None:
    """A code location that is starting knows no job yet."""
    answers.say(kind, message="not now")
    with pytest.raises(LaunchError, match="not now"):
        Webserver(instance, answers.url).launch(wanted(a_run(instance)))


def test_a_server_that_is_down_broken_or_no_graphql_is_named(instance: dg.DagsterInstance, answers: Answers) -> None:
    """By its address and without what was sent to it."""
    server = Webserver(instance, answers.url, {"Authorization": SECRET})
    answers.status = 502
    with pytest.raises(LaunchError, match=f"{answers.url}/graphql answers 502: ") as first:
        server.launch(wanted(a_run(instance)))
    answers.status, answers.body = 200, "<html>"
    with pytest.raises(LaunchError, match="webserver_url"):
        server.launch(wanted(a_run(instance)))
    answers.body = json.dumps({"errors": [{"message": "Unknown type"}]})
    with pytest.raises(LaunchError, match="Unknown type"):
        server.launch(wanted(a_run(instance)))
    assert answers.asked[0][1]["Authorization"] == SECRET
    assert SECRET not in f"{first.value}{first.value.__cause__}{server!r}"


def test_a_run_without_a_code_location_is_refused(instance: dg.DagsterInstance, answers: Answers) -> None:
    """Nothing tells where its job is; nothing is sent."""
    with pytest.raises(ConfigurationError, match="without a code location"):
        Webserver(instance, answers.url).launch(wanted(a_run(instance, remote_job_origin=None)))
    assert answers.asked == []
