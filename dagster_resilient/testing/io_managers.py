"""What an IO manager must do that keeps every value, as tests that a subclass runs on its own one."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

_KEYS = ["a", "a/b", "A", "..", "%2E%2E", "x" * 300, "é", "c"]
_PARTITIONS = dg.StaticPartitionsDefinition(_KEYS)


def _run(assets: Sequence[dg.AssetsDefinition], resources: Mapping[str, Any], **options: Any) -> str:
    """Materialize in this process; return the errors of the steps that failed, or an empty text."""
    done = dg.materialize(assets, resources=dict(resources), raise_on_error=False, **options)
    return "\n".join(str(event.event_specific_data) for event in done.get_step_failure_events())


def _keeps(value: Any) -> dg.AssetsDefinition:
    @dg.asset(name="kept")
    def kept() -> Any:
        return value

    return kept


def _reads(into: list[Any]) -> dg.AssetsDefinition:
    @dg.asset(name="reader", ins={"kept": dg.AssetIn()})
    def reader(kept: Any) -> None:
        into.append(kept)

    return reader


class IOManagerContract:
    """Subclass it in a test module, and give the fixture `resources`.

    `resources` are those of a run, with the IO manager under ``io_manager``, on a store that is empty when a test
    begins. They must keep values from one run to the next::

        class TestMyIOManager(IOManagerContract):
            @pytest.fixture
            def resources(self, tmp_path):
                return {"io_manager": MyIOManager(folder=str(tmp_path))}

    Attributes:
        values: Values that must come back equal and of the same type.
        refused: A value that cannot be kept exactly.
    """

    values: Sequence[Any] = ("text", b"raw", 7, 0.1, None, {"k": [1, 2.5, None]}, {1: "one", "1": "text"}, (1, 2))
    refused: Any = object()

    def test_values_come_back_equal(self, resources: Mapping[str, Any]) -> None:
        """What an asset returns is what its downstream gets, in value and type; the last one is what is there."""
        for value in self.values:
            seen: list[Any] = []
            assert not _run([_keeps(value), _reads(seen)], resources)
            assert (type(seen[0]), seen[0]) == (type(value), value)

    def test_partitions_stay_apart(self, resources: Mapping[str, Any]) -> None:
        """Each keeps its own value, whatever it is called; a fan-in has all of them in order of definition."""
        seen: list[Any] = []

        @dg.asset(name="kept", partitions_def=_PARTITIONS)
        def kept(context: dg.AssetExecutionContext) -> Any:
            return context.partition_key

        for key in _KEYS:
            assert not _run([kept], resources, partition_key=key)
        reader = _reads(seen)
        assert not _run([kept, reader], resources, selection=[reader])
        assert list(seen[0].items()) == [(key, key) for key in _KEYS]

    def test_a_missing_value_is_an_error_that_names_it(self, resources: Mapping[str, Any]) -> None:
        """Never None or an empty value; the message has the asset and the partition."""
        seen: list[Any] = []

        @dg.asset(name="kept", partitions_def=_PARTITIONS)
        def kept() -> Any:
            return 1

        @dg.asset(name="reader", ins={"kept": dg.AssetIn()}, partitions_def=_PARTITIONS)
        def reader(kept: Any) -> None:
            seen.append(kept)

        failure = _run([kept, reader], resources, selection=[reader], partition_key="a/b")
        assert "kept" in failure
        assert "a/b" in failure
        assert seen == []

    def test_a_refused_value_leaves_the_previous_one(self, resources: Mapping[str, Any]) -> None:
        """The step fails, and what was there before it still loads."""
        seen: list[Any] = []
        assert not _run([_keeps("before")], resources)
        assert _run([_keeps(self.refused)], resources)
        reader = _reads(seen)
        assert not _run([_keeps("after"), reader], resources, selection=[reader])
        assert seen == ["before"]

    def test_a_step_that_fails_leaves_the_previous_value(self, resources: Mapping[str, Any]) -> None:
        """Nothing of a step that raised is kept."""
        seen: list[Any] = []

        @dg.asset(name="kept")
        def failing() -> Any:
            raise RuntimeError("the step failed")

        assert not _run([_keeps("before")], resources)
        assert "the step failed" in _run([failing], resources)
        reader = _reads(seen)
        assert not _run([failing, reader], resources, selection=[reader])
        assert seen == ["before"]
