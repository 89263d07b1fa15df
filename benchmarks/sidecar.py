"""What the process beside a step costs: ``python -m benchmarks.sidecar``. With ``--quick`` a smoke test.

- The first heartbeat is timed from `Sidecar.start` until the store shows it. To compare: an interpreter that does
  nothing, or writes one object to S3 with obstore. The aim is less than 0.1 s.
- Memory is resident memory after some beats, with one log watched. The aim is less than 30 MB.
- A loop runs beside a sidecar, to which each step reports, and without one, in turns; compared is the time of the
  median step. The aim is no difference that stands out of the noise.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import obstore

from benchmarks import report
from benchmarks.protocol import wait_for
from benchmarks.remote import Place, s3_place
from benchmarks.rounds import OURS, Contender, Row, Run, duration
from dagster_resilient import open_store
from dagster_resilient.state.heartbeat import Sidecar, read_beat
from dagster_resilient.storage.object_store import ObjectStore

RESULTS = Path(__file__).parent / "results"
FIRST, MEMORY, DELAY = "first heartbeat", "memory of a sidecar", "time of a step"
LOG = "tasks/bench/log/%-/"
_SECONDS = 30.0
_LENGTH = 200_000  # sorted in about 2 ms, by one thread: a pool of threads measures who else is there
_ONE_PUT = """
import json, sys
told = json.load(sys.stdin)
sys.path.append(told["site"])
import obstore
from obstore.store import S3Store
settings = {
    "access_key_id": told["key"],
    "secret_access_key": told["secret"],
    "endpoint": told["endpoint_url"],
    "region": "us-east-1",
}
client = S3Store(told["bucket"], config=settings, client_options={"allow_http": True})
obstore.put(client, "bench/beat", b"{}", use_multipart=False)
"""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        starts: Rounds of the first heartbeat.
        beats: Beats before memory is read.
        rounds: Pairs of a loop with a sidecar and one without.
        steps: Steps of a loop.
    """

    starts: int = 20
    beats: int = 30
    rounds: int = 21
    steps: int = 150


QUICK = Scale(starts=2, beats=3, rounds=1, steps=20)


def measure(scale: Scale, folder: Path, run: Run) -> list[Row]:
    """Run all cases in a folder and return the rows of the table."""
    local = open_store(str(folder / "local"))
    with s3_place(folder / "s3") as place:
        remote = open_store(f"s3://{place.bucket}/sidecar", place.options)
        rows = first_local(local, folder / "local", scale, run) + first_s3(remote, place, scale, run)
        rows += [memory(store, case, scale, run) for store, case in ((local, "local directory"), (remote, "S3"))]
        return [*rows, delay(local, "local directory", scale, run), delay(remote, "S3", scale, run)]


def a_sidecar(store: ObjectStore, interval: float = 10.0) -> Sidecar:
    """Return a sidecar that is not started."""
    return Sidecar(
        store, run_id="bench", root="bench", role="step", instance_id="bench", interval=interval, ttl=4.5 * interval
    )


def first_local(store: ObjectStore, folder: Path, scale: Scale, run: Run) -> list[Row]:
    """Time the first heartbeat in a directory."""
    command = [sys.executable, "-I", "-S", "-c", ""]
    bare = Contender("bare python -I -S", lambda: subprocess.run(command, check=True))
    return _first(
        store, "local directory", lambda key: wait_for(folder / key), bare, partial(run.compare, rounds=scale.starts)
    )


def first_s3(store: ObjectStore, place: Place, scale: Scale, run: Run) -> list[Row]:
    """Time the first heartbeat on S3."""
    command = [sys.executable, "-I", "-S", "-c", _ONE_PUT]
    told = json.dumps({"site": str(Path(obstore.__file__).parents[1]), "bucket": place.bucket, **place.options})
    bare = Contender("one obstore PUT", lambda: subprocess.run(command, input=told, text=True, check=True))
    return _first(
        store, "S3", lambda key: _wait_for_object(store, key), bare, partial(run.compare, rounds=scale.starts)
    )


def _first(
    store: ObjectStore, case: str, wait: Callable[[str], None], bare: Contender, rounds: Callable[..., list[Row]]
) -> list[Row]:
    started: list[Sidecar] = []

    def first_beat() -> None:
        sidecar = a_sidecar(store)
        started.append(sidecar)
        sidecar.start()
        wait(sidecar.key)

    ours = Contender(OURS, first_beat, lambda: started.pop().close())
    return rounds(FIRST, case, [ours, bare])


def _wait_for_object(store: ObjectStore, key: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while read_beat(store, key) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"No heartbeat within {_SECONDS:g} s in {store.url}.")
        time.sleep(0.002)  # the server and the sidecar need the processors too


def memory(store: ObjectStore, case: str, scale: Scale, run: Run) -> Row:
    """Read the resident memory of a sidecar that has beaten for a while."""
    store.put(f"{LOG}0000000001.json", b'{"generation": 1}')
    sidecar = a_sidecar(store, interval=0.05)
    sidecar.start()
    sidecar.watch(LOG, 1)
    try:
        deadline = time.monotonic() + _SECONDS
        while (beat := read_beat(store, sidecar.key)) is None or beat.seq < scale.beats:
            if time.monotonic() > deadline:
                raise TimeoutError(f"Not {scale.beats} heartbeats within {_SECONDS:g} s in {store.url}.")
            time.sleep(0.01)
        megabytes = resident(sidecar.pid)
    finally:
        sidecar.close()
    run.note(section=MEMORY, case=case, megabytes=megabytes)
    return Row(MEMORY, case, f"{megabytes:.1f} MB", "the aim", "30.0 MB", megabytes / 30)


def resident(pid: int | None) -> float:
    """Return the resident memory of a process in megabytes, as the kernel counts it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6


def delay(store: ObjectStore, case: str, scale: Scale, run: Run) -> Row:
    """Time the steps of a loop beside a sidecar that beats 50 times as often as usual, and without one, in pairs.

    The ratio is the median of the pairs' ratios: other work on the machine hits both halves of a pair, or few pairs.
    """
    _steps(scale.steps, None)  # warms up
    pairs = []
    for number in range(scale.rounds):
        took = {beside: _half(store, scale.steps, beside) for beside in _order(number)}
        pairs.append((took[True], took[False]))
        for beside, seconds in took.items():
            run.note(section=DELAY, case=case, sidecar=beside, round=number, seconds=round(seconds, 7))
    ours, theirs = (statistics.median(half) for half in zip(*pairs, strict=True))
    ratio = statistics.median(mine / other for mine, other in pairs)
    return Row(DELAY, case, duration(ours), "no sidecar", duration(theirs), ratio)


def _order(number: int) -> tuple[bool, bool]:
    return (True, False) if number % 2 else (False, True)


def _half(store: ObjectStore, steps: int, beside: bool) -> float:
    return _beside(store, steps) if beside else _steps(steps, None)


def _beside(store: ObjectStore, steps: int) -> float:
    sidecar = a_sidecar(store, interval=0.2)
    sidecar.start()
    try:
        _wait_for_object(store, sidecar.key)
        return _steps(steps, sidecar)
    finally:
        sidecar.close()


def _steps(count: int, sidecar: Sidecar | None) -> float:
    """Return the seconds of the median step. Each asks for a fence and reports, as a training loop does."""
    values, seconds = np.random.default_rng(0).random(_LENGTH), []
    for step in range(count):
        begun = time.perf_counter()
        loss = float(np.sort(values)[0])
        if sidecar is not None and sidecar.fenced() is None:
            sidecar.progress(step=step, loss=loss)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def main() -> None:
    """Measure, keep the raw rounds, and print the table."""
    options = _options()
    results = options.results or (None if options.quick else RESULTS)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
    files = {suffix: None if results is None else results / f"sidecar{suffix}" for suffix in (".jsonl", ".txt")}
    logging.getLogger("dagster_resilient").setLevel(logging.ERROR)
    scale = QUICK if options.quick else Scale()
    with tempfile.TemporaryDirectory() as folder, Run(files[".jsonl"], settle=not options.quick) as run:
        about = report.machine(Path(folder))
        run.note(machine=about, quick=options.quick, rounds=scale.rounds)
        report.show(measure(scale, Path(folder), run), about, files[".txt"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sidecar", description="Measure what a sidecar costs.")
    parser.add_argument("--quick", action="store_true", help="a smoke test in seconds; its figures mean nothing")
    parser.add_argument(
        "--results",
        type=Path,
        help="where to keep raw rounds and table; default: benchmarks/results, none with --quick",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
