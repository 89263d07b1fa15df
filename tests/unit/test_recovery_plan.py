"""What is missing, and what must therefore be selected."""

from dagster_resilient.recovery import AssetFacts, plan

MONTHS = tuple(f"2013-{m:02d}-01" for m in range(1, 13))


def facts(key: str, partitions=(None,), done=(), upstream=(), together=()) -> AssetFacts:
    """One asset with short names."""
    return AssetFacts(
        key=(key,),
        partitions=tuple(partitions),
        done=frozenset(done),
        upstream=frozenset((u,) for u in upstream),
        together=frozenset((t,) for t in together),
    )


def test_what_is_done_is_not_selected():
    """A good, B failed, C not run: exactly B and C."""
    planned = plan([facts("a", done=[None]), facts("b", upstream=["a"]), facts("c", upstream=["b"])])
    assert list(planned.missing) == [("b",), ("c",)]
    assert planned.hull is None


def test_a_range_is_continued_where_it_stopped():
    """Two of twelve partitions are stored: the rest is missing, and the hull covers just that."""
    planned = plan([facts("p", MONTHS, done=MONTHS[:2])])
    assert planned.missing[("p",)] == MONTHS[2:]
    assert planned.hull == (MONTHS[2], MONTHS[-1])


def test_a_hole_lies_in_the_hull_and_counts_as_reused():
    """A run holds one contiguous range; what is done inside it is not missing."""
    done = {MONTHS[4], MONTHS[5]}
    planned = plan([facts("p", MONTHS, done=done)])
    assert planned.hull == (MONTHS[0], MONTHS[-1])
    assert set(planned.reused[("p",)]) == done
    assert not done & set(planned.missing[("p",)])


def test_the_hull_covers_all_assets():
    """Assets that stopped at different partitions share one run: the hull spans them."""
    planned = plan([facts("f", MONTHS, done=MONTHS[:8]), facts("p", MONTHS, done=MONTHS[:3], upstream=["f"])])
    assert planned.hull == (MONTHS[3], MONTHS[-1])


def test_below_a_redone_partition_everything_is_redone():
    """A value that was made from something lost does not stand."""
    planned = plan([facts("f", MONTHS, done=MONTHS[1:]), facts("p", MONTHS, done=MONTHS, upstream=["f"])])
    assert planned.missing == {("f",): MONTHS[:1], ("p",): MONTHS[:1]}


def test_an_unpartitioned_asset_below_a_redone_partition_is_redone():
    """Across different partitions, everything depends on everything."""
    planned = plan([facts("f", MONTHS, done=MONTHS[1:]), facts("m", done=[None], upstream=["f"])])
    assert ("m",) in planned.missing


def test_a_multi_asset_that_cannot_subset_runs_whole():
    """One missing output brings its siblings with it."""
    planned = plan([facts("x", done=[None], together=["x", "y"]), facts("y", together=["x", "y"])])
    assert set(planned.missing) == {("x",), ("y",)}


def test_nothing_missing_selects_nothing():
    """A run that died after its last commit needs no re-execution."""
    planned = plan([facts("a", done=[None]), facts("p", MONTHS, done=MONTHS)])
    assert planned.missing == {}
    assert planned.words() == "redo nothing; reuse a, p[2013-01-01..2013-12-01: 12]"


def test_the_plan_says_why():
    """Each missing partition has its reason; where they differ, they are counted."""
    lost = AssetFacts(("f",), MONTHS, frozenset(MONTHS[2:]), reasons={MONTHS[0]: "its objects are gone"})
    planned = plan([lost, facts("p", MONTHS, done=MONTHS, upstream=["f"]), facts("x", together=["x", "y"]),
                    facts("y", done=[None], together=["x", "y"])])  # fmt: skip
    assert planned.reasons[("p",)] == dict.fromkeys(MONTHS[:2], "below f")
    assert planned.words() == (
        "redo f[2013-01-01..2013-02-01: 2] (1 its objects are gone, 1 not committed), "
        "p[2013-01-01..2013-02-01: 2] (below f), x (not committed), y (in one step with x); "
        "reuse f[2013-03-01..2013-12-01: 10], p[2013-03-01..2013-12-01: 10]"
    )
