"""How good the predictions are, against the best constant guess. Imports no Dagster.

The bar is the median arrival delay of the training months: of all constants, it has the smallest mean absolute error
there. It knows no month that the model did not know.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from example_project.features import KEYS, TARGET


def absolute_errors(
    predictions: Mapping[str, pd.DataFrame], features: Mapping[str, pd.DataFrame], median: float
) -> pd.DataFrame:
    """Return, per flight that arrived, the absolute error of the model and that of the constant, in minutes."""
    months = [
        predictions[month].merge(features[month], on=KEYS, validate="1:1").assign(month=month)
        for month in sorted(features)
    ]
    flights = pd.concat(months, ignore_index=True).dropna(subset=[TARGET])
    flights["model"] = (flights[TARGET] - flights["predicted_delay"]).abs()
    flights["constant"] = (flights[TARGET] - median).abs()
    return flights[["month", "scheduled", "minute_of_day", "model", "constant"]]


def mean_errors(errors: pd.DataFrame) -> pd.DataFrame:
    """Return flights and mean absolute errors per month, and over all months in the last row."""
    columns = {"flights": ("model", "size"), "model": ("model", "mean"), "constant": ("constant", "mean")}
    months = errors.groupby("month").agg(**columns).reset_index()
    total = errors.assign(month="all").groupby("month").agg(**columns).reset_index()
    return pd.concat([months, total], ignore_index=True)


def daily_gain(errors: pd.DataFrame) -> tuple[float, float]:
    """Return by how many minutes a day's mean error is smaller with the model, on average, and the standard error.

    Flights of one day share its weather and its queues, so days, not flights, count as independent trials.
    """
    days = errors.groupby(errors["scheduled"].dt.date)[["model", "constant"]].mean()
    gain = (days["constant"] - days["model"]).to_numpy()
    return float(gain.mean()), float(gain.std(ddof=1) / len(gain) ** 0.5)


def markdown_table(figures: pd.DataFrame) -> str:
    """Return the mean errors as a Markdown table."""
    lines = ["| month | flights | constant median | model | better by |", "|---|---:|---:|---:|---:|"]
    for row in figures.to_dict("records"):
        gain = 1 - row["model"] / row["constant"]
        lines.append(
            f"| {row['month']} | {row['flights']:,} | {row['constant']:.2f} min | {row['model']:.2f} min | {gain:.1%} |"
        )
    return "\n".join(lines)


def markdown_plot(errors: pd.DataFrame) -> str:
    """Return a plot of the mean errors by scheduled hour, as a PNG inside Markdown."""
    hours = errors.groupby(errors["minute_of_day"] // 60)[["constant", "model"]].mean()
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    hours.plot(ax=axes, xlabel="scheduled hour of departure", ylabel="mean absolute error, minutes")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=90)
    return f"![errors by hour](data:image/png;base64,{base64.b64encode(image.getvalue()).decode()})"
