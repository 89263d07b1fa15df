"""The shipped contract of IO managers, on ours and on broken ones."""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg
import pytest

from dagster_resilient import ResilientIOManager, ResilientResource
from dagster_resilient.state import heartbeat
from dagster_resilient.testing import IOManagerContract


class TestResilientIOManager(IOManagerContract):
    """Ours, in a directory."""

    @pytest.fixture
    def resources(self, local_url: str) -> Iterator[Mapping[str, Any]]:
        """The resource and the IO manager; a heartbeat must not outlive its store."""
        resilient = ResilientResource(url=local_url)
        yield {"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)}
        heartbeat._close_all()


class Forgetful(dg.IOManager):
    """Keeps one value for each asset, whatever the partition, and takes what it is given."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Keep it under the name of the asset."""
        self.kept[context.asset_key.to_user_string()] = obj

    def load_input(self, context: dg.InputContext) -> Any:
        """Return it, or None."""
        return self.kept.get(context.asset_key.to_user_string())


@pytest.mark.parametrize(
    "test",
    ["partitions_stay_apart", "a_missing_value_is_an_error_that_names_it", "a_refused_value_leaves_the_previous_one"],
)
def test_a_broken_io_manager_is_found(test: str) -> None:
    """Each rule that it breaks fails the test of that rule."""
    broken = {"io_manager": dg.IOManagerDefinition.hardcoded_io_manager(Forgetful())}
    suite = IOManagerContract()
    suite.test_values_come_back_equal(broken)
    with pytest.raises((AssertionError, AttributeError)):
        getattr(suite, f"test_{test}")(broken)
