"""One place, one URL, in whatever spelling (G15)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.storage.object_store import open_store

SPELLINGS: dict[str, list[str]] = {
    "s3://b/x/y": ["s3://b/x/y", "s3://b//x/y/", "s3a://b/x//y", "S3://b/x/y//", "s3://b/x/y/"],
    "s3://b": ["s3://b", "s3://b/", "s3://b//", "s3a://b", "S3://b"],
    "memory://one": ["memory://one", "memory://one/", "memory:///one", "memory://one//", "MEMORY://one"],
    "fsspec+s3://b/x/y": [
        *("fsspec+s3://b/x/y", "fsspec+s3://b//x/y/", "fsspec+s3a://b/x/y", "FSSPEC+S3://b/x/y", "fsspec+s3://b/x//y//")
    ],
    "fsspec+memory://one": [
        "fsspec+memory://one",
        "fsspec+memory://one/",
        "fsspec+memory:///one//",
        "fsspec+memory:/one",
    ],
}


@pytest.mark.parametrize("url", SPELLINGS)
def test_a_place_has_one_url(url: str) -> None:
    """Slashes too many, another case of the scheme, and other names of the scheme mean nothing."""
    assert {open_store(spelling).url for spelling in SPELLINGS[url]} == {url}


@pytest.mark.parametrize("prefix", ["", "fsspec+"])
def test_a_directory_has_one_url(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute or relative, as path or URL, with dots: they open the same place, and one sees what another wrote."""
    monkeypatch.chdir(tmp_path)
    spellings: list[Any] = [
        f"{prefix}file://{tmp_path}/a/b",
        f"{prefix}file://{tmp_path}//a/./c/../b/",
        f"{prefix}file:{tmp_path}/a/b",
    ]
    if not prefix:
        spellings += ["a/b", "./a/b/", "a//b", tmp_path / "a" / "b", Path("a/b"), f"FILE://{tmp_path}/a/b"]
    stores = [open_store(spelling) for spelling in spellings]
    assert {store.url for store in stores} == {f"{prefix}file://{tmp_path}/a/b"}
    stores[0].put("k", b"1")
    assert [store.get("k") for store in stores] == [b"1"] * len(stores)


@pytest.mark.parametrize(
    "url",
    [
        *("fsspec+s3://", "fsspec+s3:///x", "fsspec+s3:/b/x", "fsspec+s3://k:s@b/x", "fsspec+s3://b/../x"),
        *("fsspec+file://a", "fsspec+file:a", "nope://x", "fsspec+nope://x", "fsspec+://x", "simplecache::s3://b/x"),
        "fsspec+disk:/x",
    ],
)
def test_a_doubtful_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is guessed, and no folder of such a name is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError):
        open_store(url)
    assert list(tmp_path.iterdir()) == []


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    """It would stand in every log."""
    for url in ("fsspec+s3://key:canary@b/x", "sftp://user:canary@host/x", "ftp://user:canary@host/x"):
        with pytest.raises(ConfigurationError) as caught:
            open_store(url)
        assert "canary" not in str(caught.value)
