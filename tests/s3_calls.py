"""Calls on a store, faults of the proxy, and what may be seen of an object meanwhile: for tests of S3 under faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from proxy import S3Proxy
from proxy_rules import (
    Rule,
    cut_upload,
    internal_error,
    latency,
    lose_reply,
    never_answer,
    reset_before,
    slow_down,
    stall_body,
    truncate_body,
)

from dagster_resilient.errors import ObjectNotFoundError
from dagster_resilient.storage.object_store import ObjectStore

T = TypeVar("T")

NOISE = random.Random(7).randbytes(12_000_000)
SMALL, BIG = NOISE[:1024], NOISE
RANGES = [(6_000_000, 6_002_000), (0, 2_000), (5, 10)]
BLOCKS = 2  # which are read at the same time
OLD = b"what was there before"

Make = Callable[..., Rule]
REQUEST_FAULTS = ["slow_down", "internal_error", "reset_before", "lose_reply", "never_answer"]
UPLOAD_FAULTS = ["cut_upload"]
DOWNLOAD_FAULTS = ["truncate_body", "stall_body"]
FAULTS: dict[str, Make] = {
    "latency": partial(latency, 0.02),
    "slow_down": slow_down,
    "internal_error": internal_error,
    "reset_before": reset_before,
    "lose_reply": lose_reply,
    "never_answer": never_answer,
    "cut_upload": partial(cut_upload, 100),
    "truncate_body": partial(truncate_body, 100),
    "stall_body": partial(stall_body, 100),
}
TRIES = {"latency": 1, "never_answer": 1, "stall_body": 1}  # in place of 3: these cost a timeout each

READS: dict[str, Callable[[ObjectStore], Any]] = {
    "get": lambda store: store.get("small"),
    "get of 12 MB": lambda store: store.get("big"),
    "get_ranges": lambda store: store.get_ranges("big", RANGES),
    "head": lambda store: store.head("small").size,
    "list": lambda store: [(info.key, info.size) for info in store.list("")],
}
BODIES_READ = ["get", "get of 12 MB", "get_ranges", "list"]
WRITES: dict[str, tuple[bytes | None, bytes | None, Callable[[ObjectStore], None]]] = {
    "put": (OLD, SMALL, lambda store: store.put("a", SMALL)),
    "put of 12 MB": (OLD, BIG, lambda store: store.put("a", [BIG[:7_000_000], BIG[7_000_000:]])),
    "create": (None, SMALL, lambda store: store.create("a", SMALL)),
    "delete": (OLD, None, lambda store: store.delete(["a", "absent"])),
}
BODIES_WRITTEN = ["put", "put of 12 MB", "create"]
CALLS = {**READS, **{name: call for name, (_, _, call) in WRITES.items()}}

STEPS: dict[str, dict[str, str]] = {
    "begin": {"method": "POST", "key": "?uploads"},
    "part": {"method": "PUT", "key": "partNumber=2"},
    "complete": {"method": "POST", "key": "?uploadId"},
}


def body(store: ObjectStore) -> bytes | None:
    """What is stored as "a"; None where nothing is."""
    try:
        return store.get("a")
    except ObjectNotFoundError:
        return None


def size(store: ObjectStore) -> int | None:
    """Bytes of what is stored as "a". All bodies here differ in size, so a part of one is found by it."""
    try:
        return store.head("a").size
    except ObjectNotFoundError:
        return None


def watch(proxy: S3Proxy, look: Callable[[ObjectStore], T], store: ObjectStore) -> list[T]:
    """Collect what everybody sees after each request through the proxy, before its reply arrives."""
    visible: list[T] = []
    proxy.on_request = lambda _: visible.append(look(store))
    return visible


def sizes(*bodies: bytes | None) -> set[int | None]:
    """What `size` may see."""
    return {None if one is None else len(one) for one in bodies}


def prepare(store: ObjectStore, before: bytes | None) -> None:
    """Store an object "a" to begin with."""
    if before is not None:
        store.put("a", before)


def names(store: ObjectStore) -> list[str]:
    """All keys."""
    return [info.key for info in store.list("")]
