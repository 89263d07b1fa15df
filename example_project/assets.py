"""The assets: flights, features, a trained model, predictions, a report.

All are safe to lose at any instant. What differs from plain Dagster assets is one line each: `partitions()` around
the months, `training(...)` around the training loop. No postponed annotations here: Dagster reads the types.
"""

from typing import Any

import dagster as dg
import pandas as pd
import torch

from dagster_resilient import EverySteps, ResilientResource
from example_project import features, model, report

monthly = dg.MonthlyPartitionsDefinition(start_date="2013-01-01", end_date="2014-01-01")
# One run over a range of months, not one run per month: a process start costs more than a month's work here.
one_run = dg.BackfillPolicy.single_run()

# The split is by time, as in use: a model is trained on the past. A random split would put flights of the same storm
# on both sides, and promise more than the model can do.
TRAINING_MONTHS = [f"2013-{month:02d}-01" for month in range(1, 10)]
TEST_MONTHS = [f"2013-{month:02d}-01" for month in range(10, 13)]


def months(asset: str, wanted: list[str]) -> dg.AssetIn:
    """Return an input that is a dict of some months of a monthly asset."""
    return dg.AssetIn(asset, partition_mapping=dg.SpecificPartitionsPartitionMapping(wanted))


@dg.asset(partitions_def=monthly, backfill_policy=one_run, code_version="1")
def flights(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
    """The flights that were to leave New York, by month."""
    for month in resilient.task(context).partitions():
        month.save(features.flights_of(month.key))


@dg.asset(partitions_def=monthly, backfill_policy=one_run, code_version="1", deps=[flights])
def flight_features(context: dg.AssetExecutionContext, resilient: ResilientResource) -> None:
    """What is known of each flight an hour before its scheduled departure, and its arrival delay to learn from."""
    for month in resilient.task(context).partitions():
        month.save(features.build_features(month.load("flights", pd.DataFrame)))


class TrainingConfig(dg.Config):
    """How long to train.

    Attributes:
        steps: Training steps. The learning rate's schedule spans them, so another number is another training.
    """

    steps: int = model.STEPS


@dg.asset(code_version="1", ins={"flight_features": months("flight_features", TRAINING_MONTHS)})
def delay_model(
    context: dg.AssetExecutionContext,
    config: TrainingConfig,
    resilient: ResilientResource,
    flight_features: dict[str, pd.DataFrame],
) -> dict[str, torch.Tensor]:
    """A network that predicts the arrival delay, trained on January to September."""
    fit = model.build_training(pd.concat(flight_features.values(), ignore_index=True), config.steps)
    with resilient.task(context).training(
        model=fit.model, optimizer=fit.optimizer, scheduler=fit.scheduler, loader=fit.loader, save=EverySteps(100)
    ) as session:
        for _, batch in session.batches(config.steps):
            session.report(loss=fit.update(batch))
    return fit.model.state_dict()


@dg.asset(partitions_def=monthly, backfill_policy=one_run, code_version="1", deps=[flight_features])
def delay_predictions(
    context: dg.AssetExecutionContext, resilient: ResilientResource, delay_model: dict[str, torch.Tensor]
) -> None:
    """The predicted arrival delay of every flight, by month."""
    for month in resilient.task(context).partitions():
        month.save(model.predict(delay_model, month.load("flight_features", pd.DataFrame)))


@dg.asset(
    code_version="1",
    ins={
        "delay_predictions": months("delay_predictions", TEST_MONTHS),
        "flight_features": months("flight_features", TEST_MONTHS),
    },
)
def delay_report(
    context: dg.AssetExecutionContext,
    delay_model: dict[str, torch.Tensor],
    delay_predictions: dict[str, pd.DataFrame],
    flight_features: dict[str, pd.DataFrame],
) -> pd.DataFrame:
    """How far the predictions of October to December are off, against the median delay of the training months."""
    errors = report.absolute_errors(delay_predictions, flight_features, delay_model["median"].item())
    figures = report.mean_errors(errors)
    context.add_output_metadata(_shown(errors, figures))
    return figures


def _shown(errors: pd.DataFrame, figures: pd.DataFrame) -> dict[str, Any]:
    total = figures.to_dict("records")[-1]
    gain, deviation = report.daily_gain(errors)
    return {
        "mean absolute error": dg.MetadataValue.md(report.markdown_table(figures)),
        "by hour": dg.MetadataValue.md(report.markdown_plot(errors)),
        "model_mae": total["model"],
        "median_mae": total["constant"],
        "gain per day": f"{gain:.2f} min, standard error {deviation:.2f}",
    }
