"""Run the measurements of the stores: ``python -m benchmarks.storage``. With ``--quick`` a smoke test.

Ratios of medians, measured in turns in one run: below 1, ours takes less time. What each side does:

- Ours is `put_object`: it computes a BLAKE3 digest, writes, and asks the store for the size. "put alone" is the bare
  write, for the small objects, where the second request is half of the time.
- For the large object each side is at the best of its settings: ours with the body in the signature and its CRC, or
  (`unsigned_payload`) with the CRC alone, as boto3 and s3fs send it; bare obstore with the body in the signature.
- The discarding endpoint throws away what it is sent, so that the client is what is measured. On the real server, which
  shares these cores and writes to this disk, all clients wait for it most of the time.
- In a directory, the peer writes and syncs a file; a small one it also renames, and syncs the folder, as ours does.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import obstore

from benchmarks import report
from benchmarks.discard import discarding
from benchmarks.remote import MIB, S3FS, Place, bare_obstore, s3_place, through_s3fs
from benchmarks.rounds import OURS, Contender, Row, Run
from dagster_resilient.storage.manifest import put_object
from dagster_resilient.storage.object_store import ObjectStore, open_store

RESULTS = Path(__file__).parent / "results"
NAME = "storage"
DISCARD, REAL, LOCAL = "put to S3, discarding endpoint", "put to S3, real server", "put in a directory"
_KEY, _SMALL = "bench/object", 1024


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        large: Size of the large object, in megabytes.
        small: Small objects in one round.
        rounds: Rounds of each case.
    """

    large: int = 400
    small: int = 200
    rounds: int = 7


QUICK = Scale(large=12, small=5, rounds=1)


def measure(scale: Scale, folder: Path, run: Run) -> list[Row]:
    """Run all cases and return the rows of the table."""
    keys = {"key": "resilient-test", "secret": "resilient-test-secret"}
    with discarding() as endpoint:
        rows = s3_rows(DISCARD, Place("discard", {**keys, "endpoint_url": endpoint}), scale, run)
    with s3_place(folder / "s3") as place:
        rows += s3_rows(REAL, place, scale, run)
    return rows + local_rows(folder / "local", scale, run)


# ---- S3


def s3_rows(section: str, place: Place, scale: Scale, run: Run) -> list[Row]:
    """Measure one large object and many small ones."""
    store = open_store(f"s3://{place.bucket}", place.options)
    return [*_large_s3(section, place, store, scale, run), *_small_s3(section, place, store, scale, run)]


def _large_s3(section: str, place: Place, store: ObjectStore, scale: Scale, run: Run) -> list[Row]:
    body = os.urandom(scale.large * 1_000_000)

    def clean() -> None:
        store.delete([_KEY])

    fast = open_store(store.url, {**place.options, "unsigned_payload": True})
    ours = [
        Contender(OURS, lambda: put_object(store, _KEY, body), clean, "signed and CRC"),
        Contender(OURS, lambda: put_object(fast, _KEY, body), clean, "CRC"),
    ]
    peers = [*through_s3fs(place, body, clean), *bare_obstore("obstore", place.client(), body, clean)]
    return run.compare(section, f"{scale.large} MB", [*ours, *peers], scale.rounds)


def _small_s3(section: str, place: Place, store: ObjectStore, scale: Scale, run: Run) -> list[Row]:
    body, client = os.urandom(_SMALL), place.client()
    keys = [f"bench/small/{n}" for n in range(scale.small)]

    def each(write: Callable[[str], object]) -> Callable[[], None]:
        return lambda: [write(key) for key in keys] and None

    def clean() -> None:
        store.delete(keys)

    peers = [
        Contender("obstore", each(lambda key: obstore.put(client, key, body)), clean),
        *_small_s3fs(place, each, body, clean),
    ]
    alone = Contender(OURS, each(lambda key: store.put(key, body)), clean)
    whole = Contender(OURS, each(lambda key: put_object(store, key, body)), clean)
    case = f"{scale.small} x 1 KiB"
    return [
        *run.compare(section, f"{case}, put alone", [alone, *peers], scale.rounds),
        *run.compare(section, f"{case}, checked", [whole, *peers[:1]], scale.rounds),
    ]


def _small_s3fs(
    place: Place, each: Callable[..., Callable[[], None]], body: bytes, clean: Callable[[], None]
) -> list[Contender]:
    try:
        s3fs = importlib.import_module("s3fs")
    except ImportError:
        return []
    files = s3fs.S3FileSystem(**place.options, skip_instance_cache=True)
    return [Contender(S3FS, each(lambda key: files.pipe_file(f"{place.bucket}/{key}", body)), clean)]


# ---- a directory


def local_rows(folder: Path, scale: Scale, run: Run) -> list[Row]:
    """Measure the same in a directory."""
    folder.mkdir(parents=True)
    store, file, body = open_store(folder / "ours"), folder / "file", os.urandom(scale.large * MIB)
    large = [
        Contender(OURS, lambda: put_object(store, "object", body), lambda: store.delete(["object"])),
        Contender("write, fsync", lambda: _write(file, body), file.unlink),
    ]
    names, small = itertools.count(), body[:_SMALL]

    def ours() -> None:
        for _ in range(scale.small):
            store.put(f"small/{next(names)}", small)

    def peer() -> None:
        for _ in range(scale.small):
            _write(file, small)
            file.rename(folder / f"small-{next(names)}")
            _sync(folder)

    few = [Contender(OURS, ours), Contender("write, fsync, rename, fsync", peer)]
    return [
        *run.compare(LOCAL, f"{scale.large} MB", large, scale.rounds),
        *run.compare(LOCAL, f"{scale.small} x 1 KiB, put alone", few, scale.rounds),
    ]


def _write(file: Path, body: bytes) -> None:
    with file.open("wb", buffering=0) as opened:
        rest = memoryview(body)
        while rest:
            rest = rest[opened.write(rest) :]
        os.fsync(opened.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


# ---- the command


def main() -> None:
    """Measure, keep the raw rounds, and print the table."""
    options = _options()
    results = options.results or (None if options.quick else RESULTS)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
    scale = QUICK if options.quick else Scale()
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        Run(_in(results, ".jsonl"), settle=not options.quick) as run,
    ):
        about = report.machine(Path(folder))
        run.note(machine=about, quick=options.quick, rounds=scale.rounds)
        report.show(measure(scale, Path(folder), run), about, _in(results, ".txt"))


def _in(results: Path | None, suffix: str) -> Path | None:
    return None if results is None else results / f"{NAME}{suffix}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description="Measure the stores as ratios.")
    parser.add_argument("--quick", action="store_true", help="a smoke test in seconds; its figures mean nothing")
    parser.add_argument("--folder", type=Path, help="where to write what is measured; default: the temporary folder")
    parser.add_argument(
        "--results",
        type=Path,
        help="where to keep raw rounds and table; default: benchmarks/results, none with --quick",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
