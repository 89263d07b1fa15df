"""The example's pure functions: what the features may know, what the model's state holds, how errors are counted."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import pytest
import torch

from example_project import features, model, report

FORBIDDEN = ["dep_time", "dep_delay", "arr_time", "air_time"]


@pytest.fixture(scope="module")
def march() -> pd.DataFrame:
    """The flights of the month in which the clocks go forward."""
    return features.flights_of("2013-03-01")


@pytest.fixture(scope="module")
def table(march: pd.DataFrame) -> pd.DataFrame:
    """Their features."""
    return features.build_features(march)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The example trains on one thread; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class TestFeatures:
    def test_the_months_make_up_the_year(self):
        """Twelve months hold every flight of the data set once."""
        assert sum(len(features.flights_of(f"2013-{month:02d}-01")) for month in range(1, 13)) == 336_776

    def test_each_scheduled_flight_has_one_row(self, march: pd.DataFrame, table: pd.DataFrame):
        """Cancelled flights stay, without a target; the keys are unique."""
        assert len(table) == len(march)
        assert not table.duplicated(features.KEYS).any()
        assert table[features.TARGET].isna().sum() == march["arr_delay"].isna().sum() > 0

    def test_nothing_that_the_flight_itself_produces_goes_in(self, march: pd.DataFrame, table: pd.DataFrame):
        """The features are the same when everything known only after departure is something else."""
        later = march.assign(**{name: march[name] * 7 + 1 for name in [*FORBIDDEN, features.TARGET]})
        known = table.drop(columns=features.TARGET)
        pd.testing.assert_frame_equal(features.build_features(later).drop(columns=features.TARGET), known)
        assert not set(FORBIDDEN) & set(table.columns)

    def test_weather_is_at_least_an_hour_older_than_the_departure(self, march: pd.DataFrame, monkeypatch):
        """Weather of the hour of departure and later does not change a feature of that hour; the hour before does."""
        hour = pd.Timestamp("2013-03-15 12:00", tz="America/New_York")
        noon = march[march["time_hour"] == hour].reset_index(drop=True)
        before = features.build_features(noon)
        weather = features.hourly_weather()
        for newest, same in [(hour, True), (hour - pd.Timedelta(hours=1), False)]:
            changed = weather.assign(temp=weather["temp"].where(weather["observed"] < newest, -100.0))
            monkeypatch.setattr(features, "hourly_weather", lambda changed=changed: changed)
            assert features.build_features(noon).equals(before) is same

    def test_a_gap_in_the_weather_is_bridged_for_six_hours_at_most(self, march: pd.DataFrame, monkeypatch):
        """An observation of six hours before the one wanted still counts, an older one is unknown."""
        hour = pd.Timestamp("2013-03-15 12:00", tz="America/New_York")
        noon = march[march["time_hour"] == hour].reset_index(drop=True)
        weather = features.hourly_weather()
        for age, known in [(7, True), (8, False)]:
            old = weather[weather["observed"] <= hour - pd.Timedelta(hours=age)]
            monkeypatch.setattr(features, "hourly_weather", lambda old=old: old)
            assert features.build_features(noon)["temp"].notna().all() == known


class TestModel:
    def test_the_same_data_gives_the_same_weights(self, table: pd.DataFrame):
        """Order of batches, dropout and start weights all follow from the seed."""
        first, second = (trained(table, steps=12).model.state_dict() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_predictions_need_nothing_but_the_state(self, table: pd.DataFrame):
        """A model rebuilt from the state dict predicts what the trained one does, whatever the size of the chunks."""
        fit = trained(table, steps=12)
        rows = table.head(1_000)
        with torch.inference_mode():
            expected = fit.model.eval()(*model.encode(rows)).numpy()
        for chunk in (100, 1_000):
            predicted = model.predict(fit.model.state_dict(), rows, chunk)["predicted_delay"].to_numpy()
            assert predicted == pytest.approx(expected, abs=1e-4)

    def test_unknown_categories_and_missing_weather_are_predicted_too(self, table: pd.DataFrame):
        """An airport that training did not see, and a broken weather station, still give a number."""
        state = trained(table, steps=2).model.state_dict()
        rows = table.head(3).assign(dest="XYZ", temp=float("nan"))
        assert model.predict(state, rows)["predicted_delay"].notna().all()

    def test_training_lowers_the_error(self, table: pd.DataFrame):
        """After some steps the model is better on its month than the median it starts from."""
        state = trained(table, steps=150).model.state_dict()
        errors = report.absolute_errors({"m": model.predict(state, table)}, {"m": table}, state["median"].item())
        assert errors["model"].mean() < errors["constant"].mean()


class TestReport:
    def test_errors_are_counted_over_the_flights_that_arrived(self):
        """A cancelled flight has no error; the last row sums up all months."""
        figures = report.mean_errors(report.absolute_errors(*two_months(), median=-5.0))
        assert figures["month"].tolist() == ["2013-10-01", "2013-11-01", "all"]
        assert figures["flights"].tolist() == [2, 1, 3]
        assert figures["model"].tolist() == [2.0, 5.0, 3.0]
        assert figures["constant"].tolist() == [10.0, 20.0, pytest.approx(40 / 3)]

    def test_the_table_says_how_much_better(self):
        """Each row of the Markdown table compares the model with the constant."""
        figures = report.mean_errors(report.absolute_errors(*two_months(), median=-5.0))
        assert "| 2013-11-01 | 1 | 20.00 min | 5.00 min | 75.0% |" in report.markdown_table(figures)

    def test_the_gain_is_averaged_over_days(self):
        """A day with many flights counts as one day."""
        gain, deviation = report.daily_gain(report.absolute_errors(*two_months(), median=-5.0))
        assert (gain, deviation) == (pytest.approx((8 + 15) / 2), pytest.approx(3.5))

    def test_the_plot_is_a_png_inside_markdown(self):
        """The plot needs no file beside it."""
        plot = report.markdown_plot(report.absolute_errors(*two_months(), median=-5.0))
        assert plot.startswith("![errors by hour](data:image/png;base64,iVBOR")


def trained(table: pd.DataFrame, steps: int) -> model.Training:
    """Train for some steps, within the first epoch or beyond it."""
    fit = model.build_training(table, steps)
    done = 0
    while done < steps:
        for batch in fit.loader:
            fit.update(batch)
            done += 1
            if done == steps:
                break
    return fit


def two_months() -> tuple[dict[str, pd.DataFrame], dict[str, pd.DataFrame]]:
    """Predictions and features of three flights that arrived and one that did not."""
    rows = [
        ("2013-10-01", "2013-10-01 08:00", 1, 5.0, 7.0),
        ("2013-10-01", "2013-10-01 09:00", 2, 5.0, 3.0),
        ("2013-10-01", "2013-10-01 09:00", 3, float("nan"), 50.0),
        ("2013-11-01", "2013-11-02 08:00", 1, 15.0, 10.0),
    ]
    table = pd.DataFrame(rows, columns=["month", "scheduled", "flight", features.TARGET, "predicted_delay"])
    table["scheduled"] = pd.to_datetime(table["scheduled"]).dt.tz_localize("America/New_York")
    table = table.assign(carrier="UA", origin="EWR", dest="IAH", minute_of_day=table["scheduled"].dt.hour * 60)
    months = dict(list(table.groupby("month")))
    predictions = {month: rows[[*features.KEYS, "predicted_delay"]] for month, rows in months.items()}
    known = {month: rows[[*features.KEYS, "minute_of_day", features.TARGET]] for month, rows in months.items()}
    return predictions, known
