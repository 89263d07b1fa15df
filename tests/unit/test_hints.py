"""What an annotation tells before the value is computed."""

import socket
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from dagster_resilient.codecs.hints import unsupported_hint


class Row(NamedTuple):
    """A subclass of tuple."""

    a: int


class Opaque:
    """Nothing that a codec knows."""


@pytest.mark.parametrize(
    "hint",
    [Any, object, int, dict[str, torch.Tensor], pd.DataFrame, np.float64, OrderedDict, Row, Mapping, None, torch.Tensor,
     pd.DataFrame | None, Opaque | int, "a string", type(None)],
)  # fmt: skip
def test_what_may_fit_is_not_refused(hint):
    """A hint under which some value could be stored says nothing against the value."""
    assert unsupported_hint(hint) is None


@pytest.mark.parametrize("hint", [Opaque, socket.socket, Opaque | None, Opaque | socket.socket, pd.Series])
def test_what_cannot_fit_is_named(hint):
    """A class outside of everything that can be stored is named."""
    name = unsupported_hint(hint)
    assert name is not None
    assert any(part in name for part in ("Opaque", "socket", "Series"))
