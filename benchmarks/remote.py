"""The same questions on a real S3 server on loopback: one large object, against s3fs and bare obstore."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from benchmarks.rounds import OURS, Contender, Row, Run
from dagster_resilient.storage.manifest import put_object
from dagster_resilient.storage.object_store import open_store

PUT, S3FS = "put one object to S3", "s3fs pipe_file"
MIB = 1024 * 1024
_KEY = "bench/object"


@dataclass(frozen=True)
class Place:
    """A bucket on a server.

    Attributes:
        bucket: Its name.
        options: Storage options as `open_store` and fsspec take them.
    """

    bucket: str
    options: dict[str, Any]

    def client(self, **config: Any) -> S3Store:
        """Return a bare obstore client."""
        settings: Any = {
            "access_key_id": self.options["key"],
            "secret_access_key": self.options["secret"],
            "endpoint": self.options["endpoint_url"],
            "region": "us-east-1",
            **config,
        }
        return S3Store(self.bucket, config=settings, client_options={"allow_http": True})


@contextlib.contextmanager
def s3_place(folder: Path) -> Iterator[Place]:
    """Run the S3 server of the tests inside the block."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    servers = importlib.import_module("servers")
    server = servers.SeaweedServer(folder)
    try:
        server.start()
        yield Place(servers.BUCKET, server.options)
    finally:
        server.kill()


def remote_rows(place: Place, megabytes: int, rounds: int, run: Run) -> list[Row]:
    """Measure the put of one object; ours computes and keeps its BLAKE3 digest and asks the server for its size."""
    body = os.urandom(megabytes * 1_000_000)
    store = open_store(f"s3://{place.bucket}", place.options)

    def clean() -> None:
        store.delete([_KEY])

    ours = Contender(OURS, lambda: put_object(store, _KEY, body), clean)
    peers = through_s3fs(place, body, clean)
    bare = [
        *bare_obstore("obstore", place.client(), body, clean),
        *bare_obstore("obstore, unsigned body", place.client(unsigned_payload="true"), body, clean),
    ]
    case = f"{megabytes} MB"
    rows = run.compare(PUT, case, [ours, *peers, *bare], rounds)
    if not peers:
        rows.insert(0, Row(PUT, case, rows[0].ours, S3FS, "not installed"))
    return rows


def bare_obstore(peer: str, client: S3Store, body: bytes, clean: Callable[[], None]) -> list[Contender]:
    """Return obstore's own put of an object, in parts of two sizes."""

    def putter(part: int) -> Callable[[], object]:
        return lambda: obstore.put(client, _KEY, body, use_multipart=True, chunk_size=part * MIB)

    return [Contender(peer, putter(part), clean, f"{part} MiB parts") for part in (5, 32)]


def through_s3fs(place: Place, body: bytes, clean: Callable[[], None]) -> list[Contender]:
    """Return s3fs's put of an object, with and without its own checksum; nothing where it is not installed."""
    try:
        s3fs = importlib.import_module("s3fs")
    except ImportError:
        return []  # the table says so

    def putter(part: int, **config: Any) -> Callable[[], object]:
        files = s3fs.S3FileSystem(**place.options, config_kwargs=config, skip_instance_cache=True)
        return lambda: files.pipe_file(f"{place.bucket}/{_KEY}", body, chunksize=part * MIB)

    plain = {"request_checksum_calculation": "when_required"}
    return [
        Contender(S3FS, putter(50), clean, "default"),
        Contender(S3FS, putter(50, **plain), clean, "no CRC"),
        Contender(S3FS, putter(16, **plain), clean, "no CRC, 16 MiB parts"),
    ]
