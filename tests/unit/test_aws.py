"""Storage options from a dagster-aws S3Resource."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from dagster_resilient import ResilientIOManager, ResilientResource
from dagster_resilient.aws import options_from_s3_resource
from dagster_resilient.errors import ConfigurationError, StoragePermissionError
from dagster_resilient.storage.object_store import open_store

PROFILES = """
[default]
region = eu-north-1
{default}
[other]
aws_access_key_id = other-key
aws_secret_access_key = other-secret
"""


@pytest.fixture(autouse=True)
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment and files that say nothing of AWS; return where the file of profiles would be."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "credentials"


def test_nothing_given_is_no_option() -> None:
    """The store then asks the environment, or the machine's role, as boto3 does."""
    assert options_from_s3_resource(S3Resource()) == {}


def test_every_field_is_taken_over() -> None:
    """Keys, endpoint, region and trust, by the names that `open_store` knows."""
    resource = S3Resource(
        region_name="eu-north-1",
        endpoint_url="http://localhost:1",
        use_ssl=False,
        verify=False,
        aws_access_key_id="k",
        aws_secret_access_key="s",
        aws_session_token="t",
    )
    options = options_from_s3_resource(resource)
    assert options == {
        "endpoint_url": "http://localhost:1",
        "region": "eu-north-1",
        "use_ssl": False,
        "client_kwargs": {"verify": False},
        "key": "k",
        "secret": "s",
        "token": "t",
    }
    assert open_store("s3://bucket/prefix", options).url == "s3://bucket/prefix"


def test_unsigned_requests_need_no_keys() -> None:
    """They win over keys, as in the resource."""
    assert options_from_s3_resource(S3Resource(use_unsigned_session=True, profile_name="p")) == {"anon": True}


def test_half_of_a_pair_is_refused() -> None:
    """Else the other half would come from elsewhere."""
    with pytest.raises(ConfigurationError, match="give both"):
        options_from_s3_resource(S3Resource(aws_access_key_id="k"))


def test_a_profile_is_named_and_not_read(no_aws: Path) -> None:
    """The store asks for its keys whenever they have expired. `default` counts where it gives keys."""
    no_aws.write_text(PROFILES.format(default=""))
    assert options_from_s3_resource(S3Resource(profile_name="other")) == {"profile": "other"}
    assert options_from_s3_resource(S3Resource()) == {}
    no_aws.write_text(PROFILES.format(default="aws_access_key_id = d\naws_secret_access_key = e"))
    assert options_from_s3_resource(S3Resource()) == {"profile": "default"}


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_PROFILE"])
def test_the_environment_comes_before_the_default_profile(
    no_aws: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As for boto3."""
    no_aws.write_text(PROFILES.format(default="aws_access_key_id = d\naws_secret_access_key = e"))
    monkeypatch.setenv(name, "other")
    assert options_from_s3_resource(S3Resource()) == {}


def test_environment_variables_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the resource was made by hand, in a test or a notebook."""
    monkeypatch.setenv("MY_KEY", "k")
    monkeypatch.setenv("MY_SECRET", "s")
    resource = S3Resource(aws_access_key_id=dg.EnvVar("MY_KEY"), aws_secret_access_key=dg.EnvVar("MY_SECRET"))
    assert options_from_s3_resource(resource) == {"key": "k", "secret": "s"}


def test_what_is_no_s3_resource_is_refused() -> None:
    """By the name of its class."""
    with pytest.raises(ConfigurationError, match="object is no S3Resource"):
        options_from_s3_resource(object())


@pytest.mark.s3
def test_a_store_uses_them(s3_url: str, s3_options: dict[str, Any], no_aws: Path) -> None:
    """Keys, or a profile, open the store; the resource's own client sees what it wrote; wrong keys are refused."""
    endpoint, bucket = s3_options["endpoint_url"], s3_url.split("/")[2]
    keys = {"aws_access_key_id": s3_options["key"], "aws_secret_access_key": s3_options["secret"]}
    no_aws.write_text("[p]\n" + "".join(f"{name} = {value}\n" for name, value in keys.items()))
    by_keys = S3Resource(endpoint_url=endpoint, region_name="us-east-1", **keys)
    by_profile = S3Resource(endpoint_url=endpoint, region_name="us-east-1", profile_name="p")
    wrong = S3Resource(endpoint_url=endpoint, **{**keys, "aws_secret_access_key": "wrong"})
    open_store(s3_url, options_from_s3_resource(by_keys)).put("a", b"1")
    assert open_store(s3_url, options_from_s3_resource(by_profile)).get("a") == b"1"
    for resource in (by_keys, by_profile):
        found = resource.get_client().get_object(Bucket=bucket, Key=f"{s3_url.split('/', 3)[3]}/a")
        assert found["Body"].read() == b"1"
    with pytest.raises(StoragePermissionError):
        open_store(s3_url, options_from_s3_resource(wrong)).get("a")


def test_a_resilient_resource_takes_its_credentials(s3_url: str, s3_options: dict[str, Any], no_aws: Path) -> None:
    """A value is stored and loaded with nothing but the S3Resource's keys; the keys appear in no repr of ours."""
    s3 = S3Resource(
        endpoint_url=s3_options["endpoint_url"],
        region_name="us-east-1",
        aws_access_key_id=s3_options["key"],
        aws_secret_access_key=s3_options["secret"],
    )
    resilient = ResilientResource(url=s3_url, s3=s3)

    @dg.asset
    def numbers() -> list[int]:
        return [1, 2]

    given = {"resilient": resilient, "io_manager": ResilientIOManager(resilient=resilient)}
    assert dg.materialize([numbers], resources=given).success
    assert resilient.load("numbers") == [1, 2]
    assert s3_options["secret"] not in repr(resilient.store)


def test_credentials_that_are_given_twice_are_refused() -> None:
    """Else one of them would silently not be used."""
    s3 = S3Resource(aws_access_key_id="a", aws_secret_access_key="b")
    resilient = ResilientResource(url="s3://bucket/x", s3=s3, storage_options={"key": "c"})
    with pytest.raises(ConfigurationError, match=r"both give key"):
        _ = resilient.store
