"""What the code location and its tests both know: names of partitions, and tags of runs."""

import itertools
from collections.abc import Sequence

# Tags of a run, which its re-executions keep. A story is a run with all that comes of it; it has a journal and a gate.
STORY, GATE_AT, GATE_FOR = "chaos/story", "chaos/gate_at", "chaos/gate_for"
# Cells of the kill table: what is hit.
CELLS = ["step", "worker", "server", "server_and_worker", "everything", "frozen", "late", "torn"]
# The cell that has an asset below, which an IO manager stores: each step more costs as much as a whole range.
WITH_TOTAL = "everything"
FEW = [f"n{n:03}" for n in range(4)]
RIGHT = [f"r{n}" for n in range(5)]


def a_range(keys: Sequence[str]) -> dict[str, str]:
    """The tags of a run over a range of partitions."""
    return {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}


def numbers(size: int) -> list[str]:
    """The keys of a long range."""
    return [f"n{n:03}" for n in range(size)]


def left(size: int) -> list[str]:
    """One side of a box of so many partitions; `RIGHT` is the other."""
    return [f"l{n:02}" for n in range(size // len(RIGHT))]


def box(size: int) -> list[str]:
    """The keys of a box, in order."""
    return ["|".join(sides) for sides in itertools.product(left(size), RIGHT)]


def many(size: int) -> list[str]:
    """The keys of the asset with one run for each partition, which are costly."""
    return numbers(max(3, size // 5))
