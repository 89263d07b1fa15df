"""What the code location of the calm runs and their test both know: names, and how long everything takes."""

import os
from dataclasses import dataclass

SOAK = os.environ.get("RESILIENT_SOAK") == "1"
STORY = "chaos/story"
# Each is a run that lives, however it may look from afar; and one that is lost, and must be found by the same sensor.
BUSY, PAUSED, SLOW, WAITING, IMPORTING = "busy", "paused", "slow", "waiting", "importing"
DOOMED = "doomed"
STANDING, SEATED = "standing", "seated"
# Files by which the processes and the test tell each other what has happened.
IMPORT, IMPORTED, HELD = "import-takes-long", "import-took-long-{}", "held-by-{}"


@dataclass(frozen=True)
class Times:
    """How long everything takes, in seconds.

    Attributes:
        interval: Between heartbeats.
        ttl: Without a heartbeat, until a run counts as lost.
        held: That a worker and its step hold their GIL.
        imported: That an import takes, in the worker and again in the step.
        paused: That a run's processes are stopped, each time.
        latency: That each request of the slow run takes, and each of a sensor that looks for heartbeats.
        waited: That a run waits for its slot of a pool, before the outage.
        outage: That the store is down.
        patience: That a test waits for what should happen.
        lanes: How many more tasks live through the outage; a count.
        pauses: How often a run's processes are stopped; a count.
    """

    interval: float
    ttl: float
    held: float
    imported: float
    paused: float
    latency: float
    waited: float
    outage: float
    patience: float
    lanes: int
    pauses: int


# The full form has the heartbeats that a deployment has by default.
TIMES = (
    Times(10, 45, 240, 90, 25, 5, 420, 180, 900, lanes=15, pauses=6)
    if SOAK
    else Times(1, 5, 10, 7, 2, 1, 0, 15, 240, lanes=0, pauses=3)
)
LANES = [f"lane{n:02}" for n in range(TIMES.lanes)]
CALM = [BUSY, PAUSED, SLOW, WAITING, IMPORTING, *LANES]
