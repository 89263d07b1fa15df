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
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from blake3 import blake3

from dagster_resilient.errors import ConfigurationError

MAX_SEGMENT = 120
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.=")
_EMPTY = "%_"
_NO_PARTITION = "%-"
_ASSET_CONTEXT = "dagster_resilient 2026 asset key"
_PIECES = re.compile(r"%[0-9A-F]{2}|.")
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


def task_prefix(asset: Sequence[str], partition_key: str | None) -> str:
    """Return the prefix under which a task keeps its log, its items and its data."""
    return f"tasks/{asset_segment(asset)}/{partition_segment(partition_key)}"


def numbered(n: int) -> str:
    """Return a number as fixed-width text, whose order as text is its order as a number."""
    return f"{n:010d}"


def fence_key(run_id: str) -> str:
    """Return the key whose existence forbids a run to commit anything more."""
    return f"fences/{encode_segment(run_id)}.json"


def claim_prefix(root: str) -> str:
    """Return the prefix of the numbered tries of a lineage."""
    return f"lineage/{encode_segment(root)}/"


def live_prefix(run_id: str | None = None) -> str:
    """Return the prefix of all heartbeats, or of one run's."""
    return "live/" if run_id is None else f"live/{encode_segment(run_id)}/"


def live_key(run_id: str, role: str, process: str) -> str:
    """Return the key of one process's heartbeat. The name alone tells run and role, so a LIST is enough to judge."""
    return f"{live_prefix(run_id)}{role}-{process}.json"


def decode_live_key(key: str) -> tuple[str, str, str] | None:
    """Return run id, role and process of a heartbeat key, or None for any other object."""
    match = re.fullmatch(r"live/([^/]+)/(worker|step)-([0-9a-f]+)\.json", key)
    if match is None:
        return None
    run_id = decode_segment(match[1])
    return None if run_id is None else (run_id, match[2], match[3])
