"""What S3 promises beyond the common contract, seen by a second client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import servers

from dagster_resilient.errors import StorageError, VersionConflictError
from dagster_resilient.storage import keys, uploads
from dagster_resilient.storage.object_store import ObjectStore

Place = tuple[str, dict[str, Any]]

pytestmark = pytest.mark.s3


def names(store: ObjectStore, prefix: str = "") -> list[str]:
    """The keys that a listing shows, in its order."""
    return [info.key for info in store.list(prefix)]


def test_list_shows_more_than_one_page(s3_store: ObjectStore) -> None:
    """S3 answers in pages of 1,000: what is on the second one is shown too, and deleted by one call."""
    wanted = [f"steps/{keys.numbered(n)}" for n in range(1105)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3_store.put(key, b"1"), wanted))
    assert names(s3_store, "steps/") == wanted
    s3_store.delete(wanted)
    assert names(s3_store, "steps/") == []


def test_a_small_object_is_one_request_and_a_large_one_has_growing_parts(
    s3_store: ObjectStore, s3_url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 8 MiB there are no parts; above, parts grow so that their number stays below S3's limit."""

    def parts(key: str) -> int:
        bucket, prefix = s3_url.removeprefix("s3://").split("/")
        tag = servers.client(s3_server).head_object(Bucket=bucket, Key=f"{prefix}/{key}")["ETag"].strip('"')
        return int(tag.partition("-")[2] or 1)

    s3_store.put("small", [b"x"] * 3)
    s3_store.put("large", [b"x" * 7_000_000] * 3)
    monkeypatch.setattr(uploads, "PARTS", 2)
    s3_store.put("larger", [b"x" * 7_000_000] * 3)
    assert (parts("small"), parts("large"), parts("larger")) == (1, 3, 2)
    assert s3_store.get("larger") == b"x" * 21_000_000


def test_folder_markers_of_other_tools_do_no_harm(s3_store: ObjectStore, s3_url: str, s3_server: Any) -> None:
    """Empty objects named like folders, as consoles make them, neither break a listing nor hide what is below."""
    bucket, prefix = s3_url.removeprefix("s3://").split("/")
    for key in ("ckpt/", "ckpt/step-5/"):
        servers.client(s3_server).put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=b"")
    s3_store.put("ckpt/step-5/data", b"1")
    assert "ckpt/step-5/data" in names(s3_store, "ckpt/")
    assert s3_store.get("ckpt/step-5/data") == b"1"
    s3_store.delete(names(s3_store))
    assert [info for info in s3_store.list("") if info.size] == []


def test_a_large_range_is_read_whole_by_several_requests(s3_store: ObjectStore) -> None:
    """Larger than one request asks for, beside small ones, in the order asked for; one that ends beyond is an error."""
    body = bytes(range(256)) * 200_000
    s3_store.put("large", body)
    wanted = [(7, 40_000_007), (0, 3), (50_000_000, 51_200_000)]
    parts = s3_store.get_ranges("large", wanted)
    assert [parts[n] == body[start:end] for n, (start, end) in enumerate(wanted)] == [True] * 3
    for end in (51_200_001, 90_000_000):
        with pytest.raises(StorageError, match="ends beyond the object"):
            s3_store.get_ranges("large", [(1, end)])


def test_a_replace_of_what_is_not_there_is_a_conflict(s3_store: ObjectStore) -> None:
    """Servers answer 404 or 412; nothing is written either way."""
    with pytest.raises(VersionConflictError, match="changed or deleted"):
        s3_store.replace("absent", b"1", '"0"')
    assert names(s3_store) == []


@pytest.mark.parametrize("version", ["", "*"])
def test_a_replace_always_has_a_condition(s3_store: ObjectStore, version: str) -> None:
    """What a server would take for none, or for any version, is refused before it is asked."""
    s3_store.put("a", b"1")
    with pytest.raises(VersionConflictError, match="has no version"):
        s3_store.replace("a", b"2", version)
    assert s3_store.get("a") == b"1"


def test_a_listing_tells_versions(s3_store: ObjectStore) -> None:
    """What it shows can be replaced without a HEAD."""
    s3_store.put("a", b"1")
    (info,) = s3_store.list("")
    s3_store.replace("a", b"2", info.version or "")
    assert s3_store.get("a") == b"2"
