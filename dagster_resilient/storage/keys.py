"""The only place that builds and decodes keys.

An asset key, a partition key, a run id: each becomes one *segment*, reversible, free of collisions and at most
`MAX_SEGMENT` bytes long. Lower-case letters, digits and ``-_.=`` stand for themselves; every other byte of the UTF-8
form is ``%XX``. Upper case is escaped too, so that names stay distinct on file systems that fold case, and all
non-ASCII, so that they stay distinct where Unicode is normalised. A dot at the start is escaped (``..`` is no path).
A text that would grow too long keeps its beginning and ends in ``%~`` and 32 hex digits of its BLAKE3 hash; the whole
text then stands in the records under that key.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Literal, cast
from urllib.parse import unquote_to_bytes

from blake3 import blake3

from dagster_resilient.errors import ConfigurationError

MAX_SEGMENT = 120
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.=")
_EMPTY = "%_"
_NO_PARTITION = "%-"
_ASSET_CONTEXT = "dagster_resilient 2026 asset key"
_PIECES = re.compile(r"%[0-9A-F]{2}|.")
_TASK = re.compile(r"tasks/([^/]+)/(log|data|items)/([^/]+)/(.+)")
_WRITE = re.compile(r"(?:([0-9a-f]{8})\.)?g(\d{6,})-a(\d{6,})-[0-9a-f]{32}-([^/]+)")
_HASHED = re.compile(r"%~[0-9a-f]{32}$")


def encode_segment(text: str) -> str:
    """Return the segment for any text. Distinct texts have distinct segments.

    Raises:
        ConfigurationError: The text holds a lone surrogate, which has no UTF-8 form.
    """
    if not text:
        return _EMPTY
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"The name {text!r} is not valid Unicode (a lone surrogate); rename it.") from error
    pieces = [chr(b) if b in _SAFE else f"%{b:02X}" for b in raw]
    if raw[0] == ord("."):
        pieces[0] = "%2E"
    whole = "".join(pieces)
    return whole if len(whole) <= MAX_SEGMENT else _shortened(pieces, blake3(raw))


def _shortened(pieces: list[str], digest: blake3) -> str:
    """Keep whole escapes only, so that what is left of the name can still be read."""
    tail = "%~" + digest.hexdigest(length=16)
    head = ""
    for piece in pieces:
        if len(head) + len(piece) + len(tail) > MAX_SEGMENT:
            break
        head += piece
    return head + tail


def decode_segment(segment: str) -> str | None:
    """Return the text of a segment, or None where it holds only a hash (ask the records) or is none of ours."""
    if segment == _EMPTY:
        return ""
    if _HASHED.search(segment):
        return None
    try:
        text = unquote_to_bytes(segment).decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if encode_segment(text) == segment else None


def asset_segment(path: Sequence[str]) -> str:
    """Return one segment for an asset key: its parts, each escaped, joined by ``+``, which no part contains."""
    joined = "+".join(encode_segment(part) for part in path)
    if len(joined) <= MAX_SEGMENT:
        return joined
    # A hash of another kind than a single part's: ("a", "b") joined reads like the one part "a+b".
    return _shortened(_PIECES.findall(joined), blake3(joined.encode(), derive_key_context=_ASSET_CONTEXT))


def decode_asset_segment(segment: str) -> tuple[str, ...] | None:
    """Return the parts of an asset key, or None where only a hash is left of it."""
    parts = [decode_segment(part) for part in segment.split("+")]
    return None if any(part is None for part in parts) else tuple(part for part in parts if part is not None)


def partition_segment(partition_key: str | None) -> str:
    """Return the segment of a partition key; None, for an unpartitioned asset, differs from every text."""
    return _NO_PARTITION if partition_key is None else encode_segment(str(partition_key))


def decode_partition_segment(segment: str) -> tuple[bool, str | None]:
    """Return whether the segment could be decoded, and the partition key (None: unpartitioned)."""
    if segment == _NO_PARTITION:
        return True, None
    text = decode_segment(segment)
    return text is not None, text


TaskPart = Literal["log", "data", "items"]


def asset_prefix(asset: Sequence[str]) -> str:
    """Return the prefix of all that is kept of an asset."""
    return f"tasks/{asset_segment(asset)}/"


def task_prefix(asset: Sequence[str], partition_key: str | None, part: TaskPart) -> str:
    """Return the prefix under which a task keeps its log, its data or its items.

    The kind stands before the partition, so that one listing shows the logs of all partitions, and no data.
    """
    return f"{asset_prefix(asset)}{part}/{partition_segment(partition_key)}"


def index_key(asset: Sequence[str]) -> str:
    """Return the key of the folded index of an asset's logs."""
    return f"{asset_prefix(asset)}index.json"


def decode_task_key(key: str) -> tuple[str, TaskPart, str, str] | None:
    """Split a key into asset segment, part, partition segment and rest; None for any other object."""
    match = _TASK.fullmatch(key)
    return None if match is None else (match[1], cast("TaskPart", match[2]), match[3], match[4])


def state_tag(url: str) -> str:
    """Return a short name of the database that keeps the state of a write, where that is not the store itself."""
    return blake3(url.encode()).hexdigest(length=4)


def write_name(generation: int, attempt: int, root: str, state: str = "") -> str:
    """Return the name, unique for ever, of one write of one try: from it alone gc tells whether it was superseded.

    Numbers of generations and tries mean something only among those of one state: `state` names it, "" for the store.
    """
    tag = f"{state}." if state else ""
    return f"{tag}g{generation:06d}-a{attempt:06d}-{uuid.uuid4().hex}-{encode_segment(root)}"


def decode_write_name(name: str) -> tuple[str, int, int, str] | None:
    """Return state, generation, attempt and the segment of the root of a write's name; None for any other name."""
    match = _WRITE.fullmatch(name)
    return None if match is None else (match[1] or "", int(match[2]), int(match[3]), match[4])


def numbered(n: int) -> str:
    """Return a number as fixed-width text, whose order as text is its order as a number."""
    return f"{n:010d}"


def fence_key(run_id: str) -> str:
    """Return the key whose existence forbids a run to commit anything more."""
    return f"fences/{encode_segment(run_id)}.json"


def is_fence_key(key: str) -> bool:
    """Whether a key is one of `fence_key`."""
    return key.startswith("fences/")


def brief_key(run_id: str) -> str:
    """Return the key of what a run is to compute."""
    return f"briefs/{encode_segment(run_id)}.json"


def verdict_key(root: str, run_id: str, kind: str) -> str:
    """Return the key of a decision about a run of a lineage."""
    return f"decisions/{encode_segment(root)}/{encode_segment(run_id)}.{kind}.json"


def alert_key(sensor: str, run_id: str) -> str:
    """Return the key under which a sensor notes that people were told of a run."""
    return f"alerts/{encode_segment(sensor)}/{encode_segment(run_id)}.json"


def claim_prefix(root: str) -> str:
    """Return the prefix of the numbered tries of a lineage."""
    return f"lineage/{encode_segment(root)}/"


def claim_key(root_segment: str, attempt: int) -> str:
    """Return the key of one try of a lineage, by the segment of its root."""
    return f"lineage/{root_segment}/{numbered(attempt)}.json"


def live_prefix(run_id: str | None = None) -> str:
    """Return the prefix of all heartbeats, or of one run's."""
    return "live/" if run_id is None else f"live/{encode_segment(run_id)}/"


def live_key(run_id: str, role: str, process: str) -> str:
    """Return the key of one process's heartbeat. The name alone tells run and role, so a LIST is enough to judge."""
    return f"{live_prefix(run_id)}{role}-{process}.json"


def decode_live_key(key: str) -> tuple[str, str, str] | None:
    """Return run id, role and process of a heartbeat key, or None for any other object."""
    return _decode_process_key(key, "live")


def hung_prefix() -> str:
    """Return the prefix of the marks of all processes that hang."""
    return "hung/"


def hung_key(run_id: str, role: str, process: str) -> str:
    """Return the key of the mark that stands while a process beats and makes no progress; named as its heartbeat."""
    return f"{hung_prefix()}{encode_segment(run_id)}/{role}-{process}.json"


def decode_hung_key(key: str) -> tuple[str, str, str] | None:
    """Return run id, role and process of the key of such a mark, or None for any other object."""
    return _decode_process_key(key, "hung")


def _decode_process_key(key: str, top: str) -> tuple[str, str, str] | None:
    match = re.fullmatch(rf"{top}/([^/]+)/(worker|step)-([0-9a-f]+)\.json", key)
    if match is None:
        return None
    run_id = decode_segment(match[1])
    return None if run_id is None else (run_id, match[2], match[3])
