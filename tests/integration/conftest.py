"""What the tests with real processes share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
from sidecar_parent import Parent, start


@pytest.fixture
def start_parent() -> Iterator[Callable[..., Parent]]:
    """Start parents; what is left of them and their children is killed at the end."""
    with contextlib.ExitStack() as stack:
        yield functools.partial(start, stack)
