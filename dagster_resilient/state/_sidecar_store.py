"""The store as the sidecar sees it: four calls, each with a time limit, and no retries. The next interval is the retry.

Standard library and obstore only: see `_sidecar`.
"""

# pathlib costs more to import than all the rest of this file:
# ruff: noqa: PTH103, PTH105, PTH108, PTH116, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Protocol

    class Store(Protocol):
        """The calls that a sidecar makes. Threads share a store. `timeout` is the limit of the call in seconds."""

        def put(self, key: str, body: bytes, timeout: float) -> None:
            """Write an object."""

        def get(self, key: str, timeout: float) -> bytes:
            """Read an object; FileNotFoundError where there is none."""

        def delete(self, key: str, timeout: float) -> None:
            """Delete an object, there or not."""

        def names(self, prefix: str, after: str | None, timeout: float) -> list[str]:
            """Return the keys under a prefix, without the prefix: those behind `after` alone, or more."""


_MARK = ".resilient#0"  # as storage.local_root has it, which a sidecar does not import
_CLASSES = {"s3": "S3Store", "gcs": "GCSStore", "azure": "AzureStore"}
_TIMEOUTS = {"connect_timeout", "read_timeout"}
_SECRETS = ("secret_access_key", "session_token", "service_account_key", "account_key", "sas_key", "client_secret")
_ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN")
_SHORTEST = 4  # a "secret" of fewer letters would hide half of the text


class Directory:
    """A local store. Atomic by rename, not synced: a heartbeat need not outlive a power loss.

    No call on a file can be cut off, so the limits go unused: where a network mount hangs, the calling thread does.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._place: tuple[int, int] | None = None
        self._mark: bytes | None = None
        self._count = itertools.count()

    def put(self, key: str, body: bytes, timeout: float) -> None:  # noqa: ARG002 - see the class
        """Write an object. A root that was there and has gone (unmounted, renamed) is not made again."""
        if self._place is not None:
            self._look_at_root()
        target = f"{self._path}/{key}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # Listings skip names that end in "#" and digits; see LocalDirectoryStore. Each call has a name of its own: on a
        # mount that hung, several beats wake up together.
        temporary = f"{target}#{os.getpid()}{next(self._count):09d}"
        with open(temporary, "wb") as file:
            file.write(body)
        os.replace(temporary, target)
        if self._place is None or self._mark is None:
            self._place, self._mark = self._stand()

    def _look_at_root(self) -> None:
        """Refuse another directory in its place, such as the mount point below it. See `storage.local_root`."""
        place, mark = self._stand()
        if place != self._place and (mark is None or mark != self._mark):
            raise FileNotFoundError(errno.ENOENT, "another directory than it was", self._path)
        self._place = place

    def _stand(self) -> tuple[tuple[int, int], bytes | None]:
        found = os.stat(self._path)
        try:
            with open(f"{self._path}/{_MARK}", "rb") as file:
                return (found.st_dev, found.st_ino), file.read()
        except FileNotFoundError:
            return (found.st_dev, found.st_ino), None

    def get(self, key: str, timeout: float) -> bytes:  # noqa: ARG002 - see the class
        """Read an object."""
        with open(f"{self._path}/{key}", "rb") as file:
            return file.read()

    def delete(self, key: str, timeout: float) -> None:  # noqa: ARG002 - see the class
        """Delete an object."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._path}/{key}")

    def names(self, prefix: str, after: str | None, timeout: float) -> list[str]:  # noqa: ARG002 - see the class
        """Return the names in a folder."""
        try:
            return os.listdir(f"{self._path}/{prefix}")
        except FileNotFoundError:
            return []


class Bucket:
    """A prefix of a bucket of S3, Google Cloud Storage or Azure, through obstore.

    The time limit belongs to a client, so there is one client for each limit in use; the limits are few (see
    `Patience`).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        import obstore  # noqa: PLC0415 - only a bucket needs it, and only once the path to it is known

        self._obstore = obstore
        self._class = _CLASSES[config["kind"]]
        self._root = config["root"]
        self._bucket = config["bucket"]
        self._config = config["config"]
        self._http = {name: value for name, value in config.get("client", {}).items() if name not in _TIMEOUTS}
        if "access_key_id" in self._config:
            # Or obstore would combine these keys with a session token of other ones. They stand in the configuration.
            for name in _ENVIRONMENT:
                os.environ.pop(name, None)
        self._clients: dict[float, Any] = {}
        self._lock = threading.Lock()

    def _client(self, timeout: float) -> Any:
        with self._lock:
            if timeout not in self._clients:
                self._clients[timeout] = self._open(timeout)
            return self._clients[timeout]

    def _open(self, timeout: float) -> Any:
        from obstore import store  # noqa: PLC0415 - as above

        addresses = [str(self._config.get(name, "")) for name in ("endpoint", "base_url")]
        plain_http = any(address.startswith("http://") for address in addresses)
        limit = f"{round(timeout * 1000)}ms"
        return getattr(store, self._class)(
            self._bucket,
            config=self._config,
            client_options={**self._http, "timeout": limit, "connect_timeout": limit, "allow_http": plain_http},
            retry_config={"max_retries": 0},
        )

    def put(self, key: str, body: bytes, timeout: float) -> None:
        """Write an object."""
        self._obstore.put(self._client(timeout), self._root + key, body, use_multipart=False)

    def get(self, key: str, timeout: float) -> bytes:
        """Read an object."""
        return bytes(self._obstore.get(self._client(timeout), self._root + key).bytes())

    def delete(self, key: str, timeout: float) -> None:
        """Delete an object."""
        with contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._client(timeout), self._root + key)

    def names(self, prefix: str, after: str | None, timeout: float) -> list[str]:
        """Return the keys under a prefix that sort behind `after`: of a log that is known, only what is new."""
        whole = self._root + prefix
        offset = None if after is None else whole + after
        found = self._obstore.list(self._client(timeout), whole, offset=offset).collect()
        return [meta["path"][len(whole) :] for meta in found]


class UnknownStoreError(ValueError):
    """There is nothing to open yet: the parent could not say with which credentials."""


def open_store(config: dict[str, Any] | None) -> Store:
    """Open what `ObjectStore.sidecar_config` describes."""
    if config is None:
        raise UnknownStoreError("the credentials of the store are not known yet")
    if config["kind"] == "local":
        return Directory(config["path"])
    if config["kind"] in _CLASSES:
        return Bucket(config)
    raise ValueError(f"the sidecar knows no store of kind {config['kind']!r}")


def secrets_of(config: Mapping[str, Any] | None) -> set[str]:
    """Return what of a store's configuration no message may show. Of a signed URL, also the signature alone."""
    known = (config or {}).get("config", {})
    whole = {str(known[name]) for name in _SECRETS if known.get(name)}
    return whole | {part.partition("=")[2] for one in whole for part in one.split("&") if part.startswith("sig=")}


def without(secrets: Iterable[str], text: str) -> str:
    """Return a text without secrets: S3 repeats an expired token in its answer, Azure's URL holds a key."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "(hidden)") if len(secret) >= _SHORTEST else text
    return text


def refused(error: Exception) -> bool:
    """Return whether newer credentials may help."""
    if not type(error).__module__.startswith("obstore"):
        return isinstance(error, UnknownStoreError)
    from dagster_resilient.storage.obstore_errors import classified  # noqa: PLC0415 - where calls go well, not needed

    return issubclass(classified(error, "write", "")[0], PermissionError)


class Patience:
    """How long a call to the store may take.

    It starts short: behind a call that hangs, others may go through. Each call that is cut off doubles it, up to a
    bound: a store that needs 8 s for a request is slow, not down. A call that ends within a quarter of it halves it.
    """

    def __init__(self, shortest: float, longest: float) -> None:
        self.seconds = shortest
        self._shortest = shortest
        self._longest = max(shortest, longest)

    def learn(self, limit: float, took: float, *, ok: bool) -> None:
        """Take in how a call with that limit went. Of several that are cut off together, the first one counts."""
        if limit != self.seconds:
            return
        if not ok and took >= 0.9 * limit:
            self.seconds = min(self._longest, 2 * limit)
        elif ok and took < limit / 4:
            self.seconds = max(self._shortest, limit / 2)


class Schedule:
    """When to beat: at once, and from then on by the clock alone, whatever the store does.

    The second beat comes after half an interval to a whole one, by chance, and every later one an interval after the
    one before. So processes that were started together beat spread out; and since no answer of the store moves a beat,
    they still do when it comes back to all of them at once. Where time was lost (the machine slept), the beats that
    were missed are left out.
    """

    def __init__(self, interval: float, now: float, share: float) -> None:
        """Begin now. `share` is the chance, in [0, 1)."""
        self.due = now
        self._interval = interval
        self._first = interval * (1 + share) / 2

    def advance(self, now: float) -> float:
        """Go on to the next beat; return the seconds until then, which are 0 where it is late."""
        self.due += self._first
        self._first = self._interval
        if now > self.due:
            self.due += (now - self.due) // self._interval * self._interval
        return max(0.0, self.due - now)


def chance() -> float:
    """Return a number in [0, 1). The module `random` takes longer to import than the sidecar's first request."""
    return int.from_bytes(os.urandom(4), "big") / 2**32
