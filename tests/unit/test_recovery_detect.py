"""What counts as lost, by the store's clock."""

from dagster_resilient.recovery import Look, Observation, Sighting, observe

TTL = 45.0
INTERVAL = 10.0
ALLOWANCE = 300.0


def watch(looks: list[tuple[float, dict[str, float | None]]], memory: Observation | None = None) -> Look:
    """Feed a sequence of (store time, last beat of each run) and return the last look."""
    look = Look(memory or Observation(), {})
    for now, beats in looks:
        runs = [Sighting(run_id, beat) for run_id, beat in beats.items()]
        look = observe(look.observation, now, runs, ttl=TTL, interval=INTERVAL, start_allowance=ALLOWANCE)
    return look


def every(
    seconds: float, start: float, end: float, beats: dict[str, float | None]
) -> list[tuple[float, dict[str, float | None]]]:
    """Look in even steps while the beats stand still."""
    count = int((end - start) / seconds)
    return [(start + n * seconds, beats) for n in range(count + 1)]


def test_a_silent_worker_is_lost_after_its_ttl():
    """Watched for as long, it is lost at the first look after its TTL, and the reason says since when."""
    assert watch(every(5, 1000, 1045, {"r": 1000.0})).lost == {}
    look = watch(every(5, 1000, 1050, {"r": 1000.0}))
    assert "no heartbeat for 50 s" in look.lost["r"]


def test_a_beating_worker_is_never_lost():
    """Beats that are younger than the TTL keep a run alive however long it is watched."""
    look = watch([(1000 + n * 30.0, {"r": 1000 + n * 30.0 - 20}) for n in range(50)])
    assert look.lost == {}


def test_one_stale_look_is_not_enough():
    """The look that first finds a run stale only makes it a suspect."""
    first_stale = watch([(1000.0, {"r": 1000.0}), (1055.0, {"r": 1000.0})])
    assert first_stale.lost == {}
    assert first_stale.observation.suspects == {"r": 1055.0}


def test_missed_beats_make_a_suspect_before_the_ttl():
    """So that the second look need not wait for two intervals more."""
    assert watch(every(10, 1000, 1010, {"r": 1000.0})).observation.suspects == {}
    assert watch(every(10, 1000, 1020, {"r": 1000.0})).observation.suspects == {"r": 1020.0}


def test_a_short_outage_between_two_looks_convicts_nobody():
    """Beats that an unseen outage stopped look stale once; a live worker has beaten again before it is judged."""
    suspect = watch([(1000.0, {"r": 1000.0}), (1046.0, {"r": 1000.0}), (1056.0, {"r": 1000.0})])
    assert suspect.lost == {}
    assert watch([(1066.0, {"r": 1065.0})], suspect.observation).lost == {}


def test_an_old_beat_is_not_believed_at_the_first_look():
    """A sensor that starts, or was switched off, watches for a TTL before it judges what it finds."""
    assert watch([(5000.0, {"r": 1000.0}), (5010.0, {"r": 1000.0})]).lost == {}


def test_nobody_is_lost_when_an_outage_ends():
    """After a failed probe every beat is old; the workers get a whole TTL to beat again."""
    before = watch(every(10, 1000, 1030, {"a": 1000.0, "b": 1029.0})).observation
    after = watch(every(10, 1240, 1280, {"a": 1000.0, "b": 1029.0}), before.outage())
    assert after.lost == {}
    assert watch([(1281.0, {"a": 1280.0, "b": 1279.0})], after.observation).observation.suspects == {}


def test_a_gap_between_looks_starts_the_watch_anew():
    """A daemon that slept longer than a TTL has not watched the workers, however old their beats are."""
    awake = watch(every(10, 1000, 1030, {"r": 1029.0})).observation
    assert watch([(4000.0, {"r": 1029.0}), (4010.0, {"r": 1029.0})], awake).lost == {}


def test_a_worker_that_comes_back_is_acquitted():
    """A suspect that beats again starts with a clean record."""
    suspect = watch([*every(10, 1000, 1040, {"r": 1000.0}), (1046.0, {"r": 1000.0})]).observation
    assert watch([(1050.0, {"r": 1049.0}), (1060.0, {"r": 1049.0})], suspect).observation.suspects == {}


def test_a_suspicion_ends_with_the_next_beat():
    """Also where no look came between that beat and an outage that nobody saw: the second look starts anew."""
    suspect = watch(every(13, 974, 1000, {"r": 974.0}))
    assert suspect.observation.suspects == {"r": 1000.0}
    after = watch([(1048.5, {"r": 1001.0})], suspect.observation)
    assert (after.lost, after.observation.suspects) == ({}, {"r": 1048.5})


def test_a_suspicion_from_before_a_nap_of_the_observer_counts_no_more():
    """It has not watched in between."""
    suspect = watch(every(10, 1000, 1040, {"r": 1000.0}))
    assert watch([(1140.0, {"r": 1000.0})], suspect.observation).observation.suspects == {}


def test_one_late_beat_makes_no_suspect():
    """A store that answers slowly delays beats; one that is half an interval late is missing."""
    late = watch([(1000.0, {"r": 1000.0}), (1014.0, {"r": 1000.0})])
    assert late.observation.suspects == {}
    assert watch([(1065.0, {"r": 1000.0})], late.observation).lost == {}


def test_a_short_ttl_is_not_prolonged_by_the_second_look():
    """A TTL of 15 s, and a daemon that looks every 5 s: the look after the TTL convicts."""
    look = Look(Observation(), {})
    for now in (999.0, 1000.0, 1005.0, 1010.0, 1015.0):
        assert look.lost == {}
        runs = [Sighting("r", 999.0)]
        look = observe(look.observation, now, runs, ttl=15.0, interval=10 / 3, start_allowance=ALLOWANCE)
    assert set(look.lost) == {"r"}


def test_a_run_without_any_beat_gets_the_start_allowance():
    """Imports and images take time: only after the allowance does a run that never beat count as lost."""
    assert watch(every(30, 1000, 1290, {"r": None})).lost == {}
    assert "never sent" in watch(every(30, 1000, 1390, {"r": None})).lost["r"]


def test_many_stale_runs_together_make_the_observer_wait():
    """A common cause is more likely than four machines at once: say so, and judge only when it lasts."""
    beats: dict[str, float | None] = dict.fromkeys("abcd", 1000.0)
    assert "stopped beating together" in str(watch(every(10, 1000, 1100, beats)).paused)
    assert set(watch(every(10, 1000, 1200, beats)).lost) == set("abcd")


def test_two_runs_on_one_machine_are_no_mass():
    """A machine that held all runs of a small deployment is lost like any other."""
    assert set(watch(every(10, 1000, 1070, {"a": 1000.0, "b": 1000.0})).lost) == {"a", "b"}
