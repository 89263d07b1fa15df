"""What we test ourselves with, for others to test theirs: faults, a clock that waits, and suites for a backend.

`FaultStore` and `FakeClock` need nothing else. The suites need pytest, and load it when they are asked for; that of IO
managers also loads Dagster::

    from dagster_resilient.testing import ObjectStoreContract

    class TestMyStore(ObjectStoreContract):
        @pytest.fixture
        def opener(self, tmp_path):
            return lambda: MyStore(tmp_path)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagster_resilient.testing.clock import FakeClock
from dagster_resilient.testing.faults import Fault, FaultStore, Operation

if TYPE_CHECKING:
    from dagster_resilient.testing.io_managers import IOManagerContract
    from dagster_resilient.testing.records import RecordStoreContract
    from dagster_resilient.testing.stores import ObjectStoreContract

_SUITES = {"IOManagerContract": "io_managers", "ObjectStoreContract": "stores", "RecordStoreContract": "records"}

__all__ = [
    "FakeClock",
    "Fault",
    "FaultStore",
    "IOManagerContract",
    "ObjectStoreContract",
    "Operation",
    "RecordStoreContract",
]


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest  # noqa: PLC0415 - only the suites need it

    # Else a failed assert would not show its values.
    pytest.register_assert_rewrite(*(f"{__name__}.{home}" for home in ("reading", *_SUITES.values())))
    return getattr(import_module(f"{__name__}.{_SUITES[name]}"), name)
