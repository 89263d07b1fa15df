"""What a dagster-aws `S3Resource` says, as storage options.

No postponed annotations here: Dagster reads the types of what imports this.
"""

import importlib
import os
from collections.abc import Mapping
from typing import Any

import dagster as dg

from dagster_resilient.errors import ConfigurationError

# What makes a profile one that gives credentials, and not only a region.
_GIVES_KEYS = {
    *("aws_access_key_id", "credential_process", "role_arn", "sso_session", "sso_start_url", "login_session"),
    "web_identity_token_file",
}


def options_from_s3_resource(resource: Any) -> dict[str, Any]:
    """Return the storage options for `open_store` with which a store uses the credentials and endpoint of a resource.

    They are the resource's own keys, or its profile, or what boto3 would find without either: the environment, the
    profile ``default``, a role. Keys that expire are read anew by the store; nothing is asked for here. `max_attempts`
    is not taken over: a store has retries of its own.

    Args:
        resource: A dagster-aws `S3Resource`, or another resource with its fields.

    Raises:
        ConfigurationError: It is none, or it gives half of a pair of keys.
    """
    if not all(hasattr(resource, name) for name in _FIELDS):
        raise ConfigurationError(f"{type(resource).__name__} is no S3Resource of dagster-aws.")
    found = {name: _value(getattr(resource, name)) for name in _FIELDS}
    options = {
        "endpoint_url": found["endpoint_url"],
        "region": found["region_name"],
        "use_ssl": None if found["use_ssl"] else False,
        "client_kwargs": None if found["verify"] in {None, True} else {"verify": found["verify"]},
        **_credentials(found),
    }
    return {name: value for name, value in options.items() if value is not None}


_FIELDS = (
    *("use_unsigned_session", "region_name", "endpoint_url", "profile_name", "use_ssl", "verify"),
    *("aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
)


def _value(field: Any) -> Any:
    """An environment variable is unresolved where Dagster has not initialised the resource: it would be its name."""
    return field.get_value() if isinstance(field, dg.EnvVar) else field


def _credentials(found: Mapping[str, Any]) -> dict[str, Any]:
    key, secret = found["aws_access_key_id"], found["aws_secret_access_key"]
    if found["use_unsigned_session"]:
        return {"anon": True}
    if bool(key) != bool(secret):
        raise ConfigurationError("The S3Resource has one of aws_access_key_id and aws_secret_access_key; give both.")
    if key:
        return {"key": key, "secret": secret, "token": found["aws_session_token"]}
    return {"profile": found["profile_name"] or _default_profile()}


def _default_profile() -> str | None:
    """Return ``default`` where boto3 would take keys from that profile. The rest of its chain is the store's own."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_PROFILE"):
        return None
    profiles = importlib.import_module("botocore.session").Session().full_config.get("profiles", {})
    return "default" if _GIVES_KEYS & set(profiles.get("default", {})) else None
