"""fsspec's storage options (s3fs, gcsfs, adlfs) in obstore's words.

An option that is not known is refused, whatever its value: a misspelt credential must not fall back to another one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagster_resilient.errors import ConfigurationError
from dagster_resilient.storage import credentials as creds

_S3_KEYS = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
_S3_KNOWN = (
    "key, secret, token, endpoint_url, region, anon, profile, credentials, use_ssl, client_kwargs (region_name, "
    "endpoint_url, use_ssl, verify), config_kwargs (connect_timeout, read_timeout, s3.addressing_style, "
    "request_checksum_calculation, response_checksum_validation), requester_pays, unsigned_payload, bulk_delete, "
    "max_concurrency"
)
_GCS_KNOWN = "token, project, endpoint_url, access, max_concurrency"
_AZURE_KNOWN = (
    "account_name, account_key, sas_token, connection_string, client_id, client_secret, tenant_id, anon, "
    "account_host, max_concurrency"
)
_CONCURRENCY = 12


@dataclass(frozen=True)
class Settings:
    """How a store is opened.

    Attributes:
        config: obstore's configuration without the keys of `credentials`.
        credentials: Where keys come from that can change.
        client: Options of obstore's HTTP client that differ from ours, as JSON.
        max_concurrency: Parts of one object that are under way at once.
        checks_bodies: See `ObjectStore.checks_bodies`.
    """

    config: dict[str, str] = field(repr=False)
    credentials: creds.Credentials
    client: dict[str, Any] = field(default_factory=dict)
    max_concurrency: int = _CONCURRENCY
    checks_bodies: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return all of it for another process, with the keys as they are now."""
        return {
            "config": {**self.config, **self.credentials.config()},
            "client": self.client,
            "max_concurrency": self.max_concurrency,
        }


class Options:
    """Storage options that are taken one by one; `finish` refuses what is left over."""

    def __init__(self, options: Mapping[str, Any], name: str = "") -> None:
        self._rest = {key: value for key, value in options.items() if value is not None}
        self._name = name

    def take(self, name: str, default: Any = None) -> Any:
        """Return an option, once."""
        return self._rest.pop(name, default)

    def text(self, name: str) -> str | None:
        """Return an option as text, or None where it is empty."""
        value = self.take(name)
        return str(value) if value not in (None, "") else None

    def group(self, name: str) -> Options:
        """Return an option that is a mapping of options."""
        value = self.take(name, {})
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"The storage option {self._name}{name} must be a mapping.")
        return Options(value, f"{self._name}{name}.")

    def only(self, *names: str) -> Options:
        """Take some of the options, to be judged later."""
        return Options({name: self.take(name) for name in names}, self._name)

    def names(self) -> list[str]:
        """Return what was not taken."""
        return sorted(self._name + name for name in self._rest)

    def concurrency(self) -> int:
        """Return ``max_concurrency``."""
        value = self.take("max_concurrency", _CONCURRENCY)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"The storage option max_concurrency must be a number from 1 on, not {value!r}.")
        return value


def finish(known: str, *options: Options) -> None:
    """Refuse options that nobody has taken. Their values are not shown: they may be secrets."""
    unknown = [name for one in options for name in one.names()]
    if unknown:
        raise ConfigurationError(f"Storage option(s) {', '.join(unknown)} are not known; known are {known}.")


# ---- S3


def s3_settings(bucket: str, options: Mapping[str, Any]) -> Settings:
    """Translate the options of s3fs; the environment (``AWS_*``) fills what is not given.

    Raises:
        ConfigurationError: An option that is not known, or that cannot be kept.
    """
    mine = Options(options)
    client, config = mine.group("client_kwargs"), mine.group("config_kwargs")
    if mine.take("s3_additional_kwargs"):
        raise ConfigurationError(
            "The storage option s3_additional_kwargs is not supported: no header is added to single requests. Set "
            "encryption and storage class as defaults of the bucket."
        )
    anon = bool(mine.take("anon", default=False))
    keys = mine.only(*_S3_KEYS, "credentials", "profile")
    unsigned = bool(mine.take("unsigned_payload", default=False))
    # Said outright, or obstore would read the environment, and what we promise would hang on it.
    translated = {
        "skip_signature": _flag(anon),
        "unsigned_payload": _flag(unsigned),
        "conditional_put": "etag",
        "disable_bulk_delete": _flag(not mine.take("bulk_delete", default=True)),
        "request_payer": _flag(bool(mine.take("requester_pays", default=False))),
        **_s3_address(bucket, mine, client, config.group("s3")),
        **_s3_checksum(config),
    }
    http = _s3_client(client, config)
    checked = "checksum_algorithm" in translated or not (anon or unsigned)
    at_once = mine.concurrency()
    finish(_S3_KNOWN, mine, client, config)  # before the keys are judged: one that is missing may be misspelt
    return Settings(translated, _s3_credentials(keys, anon=anon), http, at_once, checked)


def _flag(value: bool) -> str:
    return str(value).lower()


def _s3_credentials(options: Options, *, anon: bool) -> creds.Credentials:
    given = {ours: value for name, ours in _S3_KEYS.items() if (value := options.text(name))}
    function, profile = options.take("credentials"), options.text("profile")
    if sum(map(bool, (anon, given, function, profile))) > 1:
        raise ConfigurationError("Give one of these storage options: key and secret, profile, credentials, or anon.")
    if anon:
        return creds.given({})
    if given:
        if "access_key_id" not in given or "secret_access_key" not in given:
            raise ConfigurationError("The storage options key and secret belong together; one of them is missing.")
        return creds.given(given)
    if function is not None:
        return creds.from_function(function)
    profile = profile or (None if os.environ.get("AWS_ACCESS_KEY_ID") else os.environ.get("AWS_PROFILE"))
    return creds.from_profile(profile) if profile else creds.from_environment()


def _s3_address(bucket: str, options: Options, client: Options, s3: Options) -> dict[str, str]:
    region = options.text("region") or client.text("region_name")
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = options.text("endpoint_url") or client.text("endpoint_url")
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    ssl = bool(options.take("use_ssl", default=True)) and bool(client.take("use_ssl", default=True))
    if not ssl and not endpoint:
        endpoint = f"s3.{region}.amazonaws.com"
    style = s3.text("addressing_style") or "auto"
    finish(_S3_KNOWN, s3)
    if style not in {"auto", "path", "virtual"}:
        raise ConfigurationError(f"The addressing style {style!r} is not known; write path or virtual.")
    address = {"region": region, "virtual_hosted_style_request": _flag(style == "virtual")}
    if endpoint:
        address["endpoint"] = _endpoint(endpoint, ssl=ssl, bucket=bucket if style == "virtual" else None)
    return address


def _endpoint(endpoint: str, *, ssl: bool = True, bucket: str | None = None) -> str:
    """Return a URL without a slash at its end; obstore wants the bucket in it where requests are virtual-hosted."""
    scheme, mark, host = endpoint.rpartition("://")
    if "@" in host:
        raise ConfigurationError("The storage option endpoint_url holds credentials; give them as other options.")
    scheme = scheme if mark else ("https" if ssl else "http")
    return f"{scheme}://{bucket + '.' if bucket else ''}{host.rstrip('/')}"


def _s3_checksum(config: Options) -> dict[str, str]:
    """Send a CRC with each body, as botocore does, unless told otherwise: some servers know no such header.

    It is in a header, never in a trailer, and costs a tenth of the signature's digest. Both are sent, since some
    servers check only one of them: SeaweedFS compares the CRC with the body, and not the digest that is signed.
    """
    mode = config.text("request_checksum_calculation") or os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION")
    if (mode or "when_supported").lower() not in {"when_supported", "when_required"}:
        raise ConfigurationError(
            f"The storage option config_kwargs.request_checksum_calculation must be 'when_supported' or "
            f"'when_required', not {mode!r}."
        )
    return {} if mode and mode.lower() == "when_required" else {"checksum_algorithm": "CRC64NVME"}


def _s3_client(client: Options, config: Options) -> dict[str, Any]:
    """Timeouts and trust, as botocore spells them."""
    http: dict[str, Any] = {}
    for name in ("connect_timeout", "read_timeout"):
        if (seconds := config.take(name)) is not None:
            http[name] = f"{round(float(seconds) * 1000)}ms"
    config.take("response_checksum_validation")  # what is read is compared with its manifest, which tells more
    verify = client.take("verify", default=True)
    if isinstance(verify, str):
        http["root_certificate"] = _read("client_kwargs.verify", verify)
    elif not verify:
        http["allow_invalid_certificates"] = True
    return http


def _read(option: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigurationError(f"The file in the storage option {option} cannot be read: {error}") from error


# ---- Google Cloud Storage


def gcs_settings(options: Mapping[str, Any]) -> Settings:
    """Translate the options of gcsfs; the environment (``GOOGLE_*``) fills what is not given.

    Raises:
        ConfigurationError: An option that is not known, or that cannot be kept.
    """
    mine = Options(options)
    config = _gcs_token(mine.take("token"))
    mine.take("project")  # names who owns new buckets; none are made here
    if (access := mine.text("access")) not in {None, "read_write", "full_control"}:
        raise ConfigurationError(f"The storage option access={access!r} is of no use to a store that is written to.")
    if endpoint := mine.text("endpoint_url"):
        config["base_url"] = _endpoint(endpoint)
    # Its writes carry no checksum: what arrives is not compared with what was sent.
    settings = Settings(config, creds.given({}), {}, mine.concurrency(), checks_bodies=False)
    finish(_GCS_KNOWN, mine)
    return settings


def _gcs_token(token: Any) -> dict[str, str]:
    if token in {None, "google_default", "cloud"} if isinstance(token, (str, type(None))) else False:
        return {}
    if token == "anon":  # noqa: S105 - a word, no token
        return {"skip_signature": "true"}
    if isinstance(token, Mapping) and token.get("type") == "service_account":
        return {"service_account_key": json.dumps(dict(token))}
    if isinstance(token, str) and token not in {"browser", "cache"}:
        return {"application_credentials": token}
    raise ConfigurationError(
        "The storage option token must be 'google_default', 'cloud', 'anon', the path of a file with credentials, or "
        "the content of a service account's file."
    )


# ---- Azure


def azure_settings(options: Mapping[str, Any], account: str | None = None) -> Settings:
    """Translate the options of adlfs; the environment (``AZURE_*``) fills what is not given.

    Args:
        options: Storage options.
        account: Name of the account that the URL gives.

    Raises:
        ConfigurationError: An option that is not known, or no account is named.
    """
    mine = Options(options)
    text = mine.text("connection_string")
    has_keys = any(options.get(name) for name in ("account_name", "account_key", "sas_token"))
    if text is None and not has_keys:
        text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    config = {**_connection(text or ""), **_azure_keys(mine)}
    named = config.setdefault("account_name", account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or "")
    if account is not None and named != account:
        raise ConfigurationError(f"The URL names the account {account!r}, the storage options another: {named!r}.")
    if not re.fullmatch(r"[a-z0-9]{3,24}", named):
        raise ConfigurationError("Name the Azure account: by the storage option account_name.")
    settings = Settings(config, creds.given({}), {}, mine.concurrency(), checks_bodies=False)
    finish(_AZURE_KNOWN, mine)
    return settings


def _azure_keys(options: Options) -> dict[str, str]:
    names = ("account_name", "account_key", "client_id", "client_secret", "tenant_id")
    config = {name: value for name in names if (value := options.text(name))}
    if sas := options.text("sas_token"):
        config["sas_key"] = sas.removeprefix("?")
    if host := options.text("account_host"):
        config["endpoint"] = _endpoint(host)
    if options.take("anon", default=False):
        config["skip_signature"] = "true"
    return config


_CONNECTION: dict[str, Callable[[str], tuple[str, str]]] = {
    "AccountName": lambda value: ("account_name", value),
    "AccountKey": lambda value: ("account_key", value),
    "SharedAccessSignature": lambda value: ("sas_key", value.removeprefix("?")),
    "BlobEndpoint": lambda value: ("endpoint", _endpoint(value)),
}


def _connection(text: str) -> dict[str, str]:
    """Read a connection string. Its parts are not shown in an error: one of them is the key."""
    pairs = [piece.partition("=") for piece in text.split(";") if piece.strip()]
    parts = {name.strip(): value for name, _, value in pairs}
    config = dict(_CONNECTION[name](value) for name, value in parts.items() if name in _CONNECTION)
    suffix = parts.get("EndpointSuffix")
    if suffix and "endpoint" not in config and "account_name" in config:
        protocol = parts.get("DefaultEndpointsProtocol", "https")
        config["endpoint"] = f"{protocol}://{config['account_name']}.blob.{suffix}"
    return config
