"""What the run worker refuses before any step has started."""

import socket
from types import SimpleNamespace

import dagster as dg
import pandas as pd
import pytest

from dagster_resilient import ResilientIOManager, ResilientResource
from dagster_resilient.errors import UnsupportedValueError
from dagster_resilient.executor import _refuse_hints


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
