"""fsspec's storage options in obstore's words: what is translated, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.storage.object_store import open_store
from dagster_resilient.storage.obstore_options import azure_settings, gcs_settings, s3_settings
from dagster_resilient.storage.obstore_store import reopened


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)


def s3(**options: Any) -> dict[str, str]:
    """What obstore is told for a bucket."""
    settings = s3_settings("bucket", options)
    return {**settings.config, **settings.credentials.config()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"region": "us-east-1", "skip_signature": "false", "disable_bulk_delete": "false"}),
        ({"key": "k", "secret": "s", "token": "t"}, {"access_key_id": "k", "session_token": "t"}),
        ({"anon": True}, {"skip_signature": "true"}),
        ({"endpoint_url": "http://h:1/"}, {"endpoint": "http://h:1"}),
        ({"endpoint_url": "h:1", "use_ssl": False}, {"endpoint": "http://h:1"}),
        ({"endpoint_url": "h:1"}, {"endpoint": "https://h:1"}),
        ({"use_ssl": False, "region": "r"}, {"endpoint": "http://s3.r.amazonaws.com"}),
        ({"client_kwargs": {"region_name": "r", "endpoint_url": "http://h"}}, {"region": "r", "endpoint": "http://h"}),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {"virtual_hosted_style_request": "true"}),
        (
            {"config_kwargs": {"s3": {"addressing_style": "virtual"}}, "endpoint_url": "https://h"},
            {"endpoint": "https://bucket.h"},
        ),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, {"virtual_hosted_style_request": "false"}),
        ({"requester_pays": True}, {"request_payer": "true"}),
        ({"bulk_delete": False}, {"disable_bulk_delete": "true"}),
        ({"unsigned_payload": True}, {"unsigned_payload": "true", "checksum_algorithm": "CRC64NVME"}),
        ({"key": None, "token": None, "client_kwargs": None}, {"region": "us-east-1"}),
    ],
)
def test_options_of_s3fs_are_translated(options: dict[str, Any], expected: dict[str, str]) -> None:
    """Each as s3fs and botocore spell it; obstore takes all of them."""
    told = s3(**options)
    assert told | expected == told
    open_store("s3://bucket", options)._inner._client  # type: ignore[attr-defined]  # noqa: B018 - opens it


def test_timeouts_and_trust_go_to_the_http_client(tmp_path: Path) -> None:
    """In obstore's words, and as JSON, for other processes."""
    (tmp_path / "ca.pem").write_text("CERTIFICATE")
    config = {"connect_timeout": 1.5, "read_timeout": 7, "response_checksum_validation": "when_required"}
    verified = s3_settings("b", {"config_kwargs": config, "client_kwargs": {"verify": str(tmp_path / "ca.pem")}})
    assert verified.client == {"connect_timeout": "1500ms", "read_timeout": "7000ms", "root_certificate": "CERTIFICATE"}
    assert s3_settings("b", {"client_kwargs": {"verify": False}}).client == {"allow_invalid_certificates": True}
    with pytest.raises(ConfigurationError, match="verify cannot be read"):
        s3_settings("b", {"client_kwargs": {"verify": str(tmp_path / "none.pem")}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secrt": 1}, "secrt are not known"),
        ({"client_kwargs": {"x": 1}, "config_kwargs": {"y": 1, "s3": {}}}, "client_kwargs.x, config_kwargs.y"),
        ({"config_kwargs": {"s3": {"z": 1}}}, "config_kwargs.s3.z"),
        ({"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, "s3_additional_kwargs is not supported"),
        ({"config_kwargs": {"request_checksum_calculation": "always"}}, "must be 'when_supported' or"),
        ({"config_kwargs": {"s3": {"addressing_style": "odd"}}}, "addressing style 'odd'"),
        ({"client_kwargs": "region"}, "client_kwargs must be a mapping"),
        ({"key": "k"}, "belong together"),
        ({"key": "k", "secret": "s", "profile": "p"}, "one of these"),
        ({"anon": True, "credentials": dict}, "one of these"),
        ({"max_concurrency": 0}, "max_concurrency must be"),
        ({"max_concurrency": "4"}, "max_concurrency must be"),
        ({"endpoint_url": "http://u:p@h"}, "holds credentials"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], message: str) -> None:
    """By name, when the store is opened, before anything is sent."""
    with pytest.raises(ConfigurationError, match=message):
        open_store("s3://bucket", options)


def test_the_environment_fills_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As boto3 reads it; an option goes first."""
    for name, value in {
        "REGION": "r",
        "ENDPOINT_URL": "http://h",
        "ACCESS_KEY_ID": "k",
        "SECRET_ACCESS_KEY": "s",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    assert s3() | {"region": "r", "endpoint": "http://h", "access_key_id": "k", "secret_access_key": "s"} == s3()
    assert s3(region="other")["region"] == "other"
    assert "access_key_id" not in s3(anon=True)


def test_a_body_is_checked_by_one_of_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its CRC or by its signature; only without both must a verified write be read back."""
    plain = {"config_kwargs": {"request_checksum_calculation": "when_required"}}
    assert "checksum_algorithm" not in s3(**plain)
    checked = [s3_settings("b", options).checks_bodies for options in ({}, {"unsigned_payload": True}, {"anon": True})]
    assert checked == [True] * 3
    assert s3_settings("b", plain).checks_bodies
    assert not s3_settings("b", {**plain, "unsigned_payload": True}).checks_bodies
    assert not s3_settings("b", {**plain, "anon": True}).checks_bodies
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "WHEN_REQUIRED")
    assert "checksum_algorithm" not in s3()


# ---- Google Cloud Storage


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"token": "google_default", "project": "p"}, {}),
        ({"token": "anon"}, {"skip_signature": "true"}),
        ({"token": "/keys/one.json"}, {"application_credentials": "/keys/one.json"}),
        ({"token": {"type": "service_account"}}, {"service_account_key": '{"type": "service_account"}'}),
        ({"endpoint_url": "http://127.0.0.1:4443"}, {"base_url": "http://127.0.0.1:4443"}),
    ],
)
def test_options_of_gcsfs_are_translated(options: dict[str, Any], expected: dict[str, str]) -> None:
    """Each as gcsfs spells it. Its writes carry no checksum, so what was written is read back."""
    settings = gcs_settings(options)
    assert settings.config == expected
    assert not settings.checks_bodies


@pytest.mark.parametrize("options", [{"token": "browser"}, {"token": 3}, {"access": "read_only"}, {"tokn": "x"}])
def test_options_of_gcsfs_that_cannot_be_kept_are_refused(options: dict[str, Any]) -> None:
    """A browser cannot be asked; a store that cannot be written is of no use."""
    with pytest.raises(ConfigurationError, match=r"[sS]torage option"):
        gcs_settings(options)


def test_a_bucket_of_google_is_opened_by_its_url() -> None:
    """Both spellings are one place; versions are generations."""
    store = open_store("gs://bucket//p/", {"token": "anon"})
    assert store.url == open_store("gcs://bucket/p").url == "gs://bucket/p"
    assert store.replaces
    assert store.sidecar_config()["kind"] == "gcs"
    inner = store._inner  # type: ignore[attr-defined]
    assert inner._condition("7") == {"version": "7"}
    assert inner._version({"e_tag": "x", "version": "7"}) == "7"
    assert type(inner._client).__name__ == "GCSStore"


# ---- Azure


KEY = "a2V5a2V5a2V5"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"account_name": "acct", "account_key": KEY}, {"account_key": KEY}),
        ({"account_name": "acct", "sas_token": "?sv=1&sig=abc"}, {"sas_key": "sv=1&sig=abc"}),
        ({"account_name": "acct", "client_id": "i", "client_secret": "c", "tenant_id": "t"}, {"tenant_id": "t"}),
        ({"account_name": "acct", "anon": True}, {"skip_signature": "true"}),
        ({"account_name": "acct", "account_host": "h.example"}, {"endpoint": "https://h.example"}),
        (
            {"connection_string": f"AccountName=acct;AccountKey={KEY}==;EndpointSuffix=core.chinacloudapi.cn"},
            {"account_key": f"{KEY}==", "endpoint": "https://acct.blob.core.chinacloudapi.cn"},
        ),
        (
            {"connection_string": f"AccountName=acct;AccountKey={KEY};BlobEndpoint=http://127.0.0.1:10000/acct;"},
            {"endpoint": "http://127.0.0.1:10000/acct"},
        ),
    ],
)
def test_options_of_adlfs_are_translated(options: dict[str, Any], expected: dict[str, str]) -> None:
    """Each as adlfs spells it."""
    settings = azure_settings(options)
    assert settings.config == settings.config | expected | {"account_name": "acct"}
    assert not settings.checks_bodies


def test_azure_reads_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account, or a whole connection string, as adlfs does."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "first")
    assert azure_settings({}).config["account_name"] == "first"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=second;AccountKey={KEY}")
    assert azure_settings({}).config == {"account_name": "second", "account_key": KEY}


@pytest.mark.parametrize("spelling", ["az://c/p", "abfs://c/p/", "abfss://c@acct.dfs.core.windows.net/p"])
def test_a_container_of_azure_is_opened_by_its_url(spelling: str) -> None:
    """All spellings are one place."""
    store = open_store(spelling, {"account_name": "acct", "account_key": KEY})
    assert store.url == "az://c/p"
    assert store.sidecar_config()["kind"] == "azure"
    assert type(store._inner._client).__name__ == "AzureStore"  # type: ignore[attr-defined]


def test_azure_needs_one_account() -> None:
    """None, or two that differ, are refused; so is a user in the URL."""
    with pytest.raises(ConfigurationError, match="account_name"):
        open_store("az://c/p")
    with pytest.raises(ConfigurationError, match="names the account 'other'"):
        open_store("abfs://c@other.dfs.core.windows.net/p", {"account_name": "acct"})
    with pytest.raises(ConfigurationError, match="no valid bucket"):
        open_store("abfs://user:password@host/p", {"account_name": "acct"})


# ---- another process


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/p", {"key": "k", "secret": "s", "token": "t", "endpoint_url": "http://h", "max_concurrency": 3}),
        ("gs://b/p", {"token": "anon"}),
        ("az://b/p", {"account_name": "acct", "account_key": KEY}),
    ],
)
def test_another_process_opens_the_same_store(url: str, options: dict[str, Any]) -> None:
    """The configuration is JSON, complete, and the store made from it describes itself alike."""
    config = json.loads(json.dumps(open_store(url, options).sidecar_config()))
    again = reopened(config)
    assert again.url == url
    assert again.sidecar_config() == config
