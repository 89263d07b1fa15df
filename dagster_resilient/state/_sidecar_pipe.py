"""The parent's end of the pipes to its sidecar: what is written so that nothing blocks, tears or is lost unnoticed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import numbers
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

LONGEST_LINE = 4096  # PIPE_BUF on Linux: up to here a write to a pipe is whole or refused, from any thread
_PIECE = 2000  # letters; as text within JSON they become twice as many at most


def plain(value: Any) -> Any:
    """Return the value as strict JSON. What is not finite is spelt as pydantic spells it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(number)]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


def as_lines(message: Mapping[str, Any]) -> list[bytes]:
    """Return a message as lines that a pipe takes whole. A long one comes in pieces, with lines of others between."""
    text = json.dumps(message)
    if len(text) < LONGEST_LINE:
        return [text.encode() + b"\n"]
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    numbered = zip(pieces, reversed(range(len(pieces))), strict=True)
    return [json.dumps({"piece": piece, "left": left}).encode() + b"\n" for piece, left in numbered]


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, however long that takes: to a process that has just been started."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def lines(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what the sidecar says until it ends. Raw reads: a buffered reader in a daemon thread can abort the exit."""
    assert child.stdout is not None
    rest = b""
    while chunk := os.read(child.stdout.fileno(), 65536):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (json.loads(line) for line in whole)


def site_of_obstore() -> str:
    """Return the folder that the sidecar, which starts without any, must look into."""
    spec = importlib.util.find_spec("obstore")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parents[1])


def let_go(child: subprocess.Popen[bytes], reader: threading.Thread) -> None:
    """Reap the process and close the pipes, but no pipe that the reader still waits at: its number could be reused."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1.0)
    reader.join(timeout=1.0)
    close_pipes(child.stdin, None if reader.is_alive() else child.stdout)


def close_pipes(*pipes: IO[bytes] | None) -> None:
    """Close what is there to close."""
    for pipe in pipes:
        if pipe is not None:
            pipe.close()


def write_within(child: subprocess.Popen[bytes], line: bytes, deadline: float) -> bool:
    """Write one line, whole, to a process that may be slow to read. False where it did not take it until the deadline.

    The line is none that a pipe would tear; see `as_lines`. One that has died already needs no line.
    """
    assert child.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        while child.stdin.write(line) is None:
            if time.monotonic() >= deadline:
                return False
            writable = select.poll()  # `select` refuses descriptors from 1024 on
            writable.register(child.stdin, select.POLLOUT)
            writable.poll(max(0.0, deadline - time.monotonic()) * 1000)
    return True
