"""What the run worker refuses before any step has started."""

import socket
from types import SimpleNamespace

import dagster as dg
import pandas as pd
import pytest

from dagster_resilient import ResilientIOManager, ResilientResource, build_recovery_sensor
from dagster_resilient.errors import ConfigurationError, UnsupportedValueError
from dagster_resilient.executor import _refuse_hints, _say_if_unprotected


def plan_of(*assets: dg.AssetsDefinition, io_manager: object | None = None) -> SimpleNamespace:
    """The part of a run worker's context that names the job."""
    ours = ResilientIOManager(resilient=ResilientResource(url="/nowhere"))
    resources = {"io_manager": io_manager or ours}
    job = dg.Definitions(assets=assets, resources=resources, jobs=[dg.define_asset_job("all")]).resolve_job_def("all")
    return SimpleNamespace(job=SimpleNamespace(get_definition=lambda: job))


@dg.asset
def connection() -> socket.socket:
    """Annotated with a class that no codec takes."""
    raise AssertionError("never computed")


@dg.asset
def frame() -> pd.DataFrame:
    """Annotated with a class that a codec takes."""
    raise AssertionError("never computed")


def test_an_output_that_no_codec_takes_is_refused_before_its_compute():
    """The error names the asset and the class, and says what to do."""
    with pytest.raises(UnsupportedValueError, match=r"connection is annotated to return socket\.socket.*Return a"):
        _refuse_hints(plan_of(connection, frame))


def test_what_can_be_stored_passes():
    """A job whose outputs have codecs starts."""
    _refuse_hints(plan_of(frame))


def test_another_io_manager_may_take_anything():
    """We judge only what we store."""
    _refuse_hints(plan_of(connection, io_manager=dg.FilesystemIOManager()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"code_locations": ["a"]}, "give webserver_url"),
        ({"webserver_headers": {"token": "t"}}, "give webserver_url"),
        ({"webserver_url": "localhost:3000"}, "http://"),
        ({"webserver_url": "http://localhost:3000", "code_locations": "a"}, r"\['a'\]"),
    ],
)
def test_a_sensor_whose_settings_cannot_be_meant_is_refused(given, said):
    """When it is built, and not at its first tick."""
    with pytest.raises(ConfigurationError, match=said):
        build_recovery_sensor(**given)


def test_a_run_that_cannot_be_recovered_says_so():
    """Its job has the executor, and nothing that uses a store: there is no place for a heartbeat."""
    said = []
    context = SimpleNamespace(log=SimpleNamespace(warning=said.append))
    _say_if_unprotected(context, [ResilientResource(url="/nowhere")])
    assert said == []
    _say_if_unprotected(context, [])
    assert "uses a ResilientResource" in said[0]
