"""The example as users run it: the whole pipeline over the year, a month scored later, a training that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pandas as pd
import pytest
import torch

from dagster_resilient import EverySteps, open_store, open_task
from dagster_resilient.values import load_value
from example_project import features, model

MONTHS = [f"2013-{month:02d}-01" for month in range(1, 13)]
RANGE = {"dagster/asset_partition_range_start": MONTHS[0], "dagster/asset_partition_range_end": MONTHS[-1]}
CONFIG = {"ops": {"delay_model": {"config": {"steps": 200}}}}


@dataclass
class Finished:
    """A pipeline that ran to its end."""

    url: str
    instance: dg.DagsterInstance
    result: dg.ExecuteInProcessResult

    def value(self, asset: str, partition: str | None = None):
        """Load what is stored."""
        return load_value(open_store(self.url), (asset,), partition)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """The example trains on one thread; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dg.Definitions]]:
    """The example's definitions, with a store of this module."""
    url = str(tmp_path_factory.mktemp("example") / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESILIENT_URL", url)
        from example_project.definitions import defs  # noqa: PLC0415 - sets a default in the environment

        yield url, defs


@pytest.fixture(scope="module")
def finished(definitions: tuple[str, dg.Definitions]) -> Iterator[Finished]:
    """The pipeline after one run over the year, trained more shortly than usual."""
    url, defs = definitions
    with dg.DagsterInstance.ephemeral() as instance:
        job = defs.resolve_job_def("delay_pipeline")
        yield Finished(url, instance, job.execute_in_process(instance=instance, tags=RANGE, run_config=CONFIG))


class TestPipeline:
    def test_one_run_materializes_every_month_of_every_asset(self, finished: Finished):
        """Monthly assets end with twelve partitions, the others with one value."""
        assert finished.result.success
        for asset in ("flights", "flight_features", "delay_predictions"):
            assert finished.instance.get_materialized_partitions(dg.AssetKey(asset)) == set(MONTHS)
            assert sum(len(finished.value(asset, month)) for month in MONTHS) == 336_776
        assert set(finished.value("delay_model")) > {"median", "mean", "scale"}

    def test_the_report_shows_that_the_model_beats_the_median(self, finished: Finished):
        """From October to December the model's mean absolute error is the smaller one; table and plot are shown."""
        total = finished.value("delay_report").set_index("month").loc["all"]
        assert total["flights"] > 80_000
        assert total["model"] < 0.98 * total["constant"]
        (shown,) = finished.result.asset_materializations_for_node("delay_report")
        assert "| all |" in shown.metadata["mean absolute error"].value
        assert "image/png;base64" in shown.metadata["by hour"].value

    def test_a_month_scored_alone_equals_the_same_month_of_the_range(
        self, finished: Finished, definitions: tuple[str, dg.Definitions]
    ):
        """The scheduled job predicts a month with the stored model; what else ran in its process does not matter."""
        before = finished.value("delay_predictions", "2013-11-01")
        job = definitions[1].resolve_job_def("score_month")
        assert job.execute_in_process(instance=finished.instance, partition_key="2013-11-01").success
        pd.testing.assert_frame_equal(finished.value("delay_predictions", "2013-11-01"), before, check_exact=True)


class TestTraining:
    @pytest.mark.slow
    def test_a_killed_training_ends_with_the_same_weights(self, tmp_path: Path):
        """Killed in its second epoch between two saves and started again, training gives the same bits."""
        train(str(tmp_path / "whole"), kill_at=0)
        assert train_in_a_process(tmp_path / "killed", kill_at=34) == -signal.SIGKILL
        assert train_in_a_process(tmp_path / "killed", kill_at=0) == 0
        whole, resumed = (
            load_value(open_store(str(tmp_path / name)), ("script",), None) for name in ("whole", "killed")
        )
        assert (whole.pop("resumed_from").item(), resumed.pop("resumed_from").item()) == (-1, 30)
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def train_in_a_process(store: Path, kill_at: int) -> int:
    """Run this file as a script, and return its exit status."""
    command = [sys.executable, __file__, str(store), str(kill_at)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, env=environment, timeout=120, check=False).returncode


def train(url: str, kill_at: int) -> None:
    """Train on January with 25 batches per epoch; die at the given step, if there is one."""
    fit = model.build_training(features.build_features(features.flights_of(MONTHS[0])), steps=60)
    task = open_task(url, "script")
    with task.training(
        model=fit.model, optimizer=fit.optimizer, scheduler=fit.scheduler, loader=fit.loader, save=EverySteps(10)
    ) as session:
        for step, batch in session.batches(60):
            if kill_at and step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            fit.update(batch)
    resumed_from = torch.tensor(-1 if session.resumed_from is None else session.resumed_from)
    task.save({**fit.model.state_dict(), "resumed_from": resumed_from})


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
