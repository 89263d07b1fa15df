"""Reading ranges through obstore: many small ones in one call, a large one by several requests at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore

_PIECE = 16 * 1024 * 1024  # what one request of a large range asks for
_LARGE = 2 * _PIECE
_CHUNK = 4 * 1024 * 1024  # smallest chunk that is copied at once: each costs a call


def ranges_of(client: Any, path: str, blocks: Sequence[tuple[int, int]], at_once: int) -> list[memoryview]:
    """Return the bytes of each block, fewer where the object ends before."""
    small = [block for block in blocks if block[1] - block[0] <= _LARGE]
    starts, ends = [start for start, _ in small], [end for _, end in small]
    bodies = dict(zip(small, obstore.get_ranges(client, path, starts=starts, ends=ends), strict=True))
    return [memoryview(bodies[one]) if one in bodies else _large(client, path, one, at_once) for one in blocks]


def _large(client: Any, path: str, block: tuple[int, int], at_once: int) -> memoryview:
    """Read a block by several requests: one connection to S3 carries a fraction of what the machine could take.

    All pieces are of the version that the first one found.
    """
    start, end = block
    view = memoryview(bytearray(end - start))
    first = obstore.get(client, path, options={"range": (start, start + _PIECE)})
    missing = _copied(first, view[:_PIECE])
    same: Any = {"if_match": first.meta["e_tag"]}

    def one(offset: int) -> int:
        return fill(client, path, view[offset : offset + _PIECE], start + offset, same)

    if not missing:
        with ThreadPoolExecutor(at_once, "range") as pool:
            missing = sum(pool.map(one, range(_PIECE, view.nbytes, _PIECE)))
    return view[:0] if missing else view


def fill(client: Any, path: str, view: memoryview, start: int, condition: Mapping[str, Any] | None = None) -> int:
    """Copy the bytes from `start` on into a view as they arrive; return how many are missing."""
    options: Any = {"range": (start, start + view.nbytes), **(condition or {})}
    return _copied(obstore.get(client, path, options=options), view)


def _copied(answer: Any, view: memoryview) -> int:
    at = 0
    for chunk in answer.stream(min_chunk_size=_CHUNK):
        piece = memoryview(chunk)
        view[at : at + piece.nbytes] = piece
        at += piece.nbytes
    return view.nbytes - at
