"""An S3 endpoint that throws away what it is sent: how fast a client is where no server holds it up.

It runs as a process of its own: ``python -m benchmarks.discard`` prints the port. It answers puts, uploads in parts,
HEAD with the size that came in, and deletes. It checks nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_BLOCK = 1 << 20
_ABOUT = 'ETag: "0"\r\nLast-Modified: Mon, 30 Nov 2026 10:00:00 GMT\r\n'


class _Sizes:
    """Bytes by object, and by upload."""

    lock = threading.Lock()
    objects: dict[str, int] = {}  # noqa: RUF012 - one server in this process
    uploads: dict[str, int] = defaultdict(int)  # noqa: RUF012 - as above


class _Connection(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answer requests until the client closes."""
        with contextlib.suppress(ConnectionError):
            while self._one():
                pass

    def _one(self) -> bool:
        line = self.rfile.readline().decode()
        if not line:
            return False
        method, target, _ = line.split(" ", 2)
        headers = {}
        while (header := self.rfile.readline().decode().strip()) != "":
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect"):
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        size = int(headers.get("content-length") or 0)
        self._discard(size)
        # A body in chunks says how long it is without them.
        self._answer(method, target, int(headers.get("x-amz-decoded-content-length") or size))
        return True

    def _discard(self, size: int) -> None:
        """Read a body into the same memory again and again. What the reader holds already comes first."""
        block = memoryview(bytearray(_BLOCK))
        while size:
            got = self.rfile.readinto1(block[: min(size, _BLOCK)])  # type: ignore[attr-defined]
            if not got:
                raise ConnectionError("the client closed in the middle of a body")
            size -= got

    def _answer(self, method: str, target: str, size: int) -> None:
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True)
        upload = query.get("uploadId", [""])[0]
        body, length = b"", 0
        with _Sizes.lock:
            if "uploads" in query:
                body = f"<R><UploadId>{os.urandom(8).hex()}</UploadId></R>".encode()
            elif method == "PUT" and upload:
                _Sizes.uploads[upload] += size
            elif method == "POST" and upload:
                _Sizes.objects[url.path] = _Sizes.uploads.pop(upload)
                body = b'<R><ETag>"0"</ETag></R>'
            elif method == "POST":
                body = b"<DeleteResult><Deleted><Key>all</Key></Deleted></DeleteResult>"
            elif method == "PUT":
                _Sizes.objects[url.path] = size
            elif method == "HEAD":
                length = _Sizes.objects.get(url.path, 0)
        self.wfile.write(f"HTTP/1.1 200 OK\r\n{_ABOUT}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = socket.SOMAXCONN


def main() -> None:
    """Serve until the standard input is closed."""
    with _Server(("127.0.0.1", 0), _Connection) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        server.shutdown()


@contextlib.contextmanager
def discarding() -> Iterator[str]:
    """Run it inside the block; give its URL."""
    command = [sys.executable, "-m", "benchmarks.discard"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


if __name__ == "__main__":
    main()
