"""A few verbs of S3 on loopback that are as slow, or as broken, as a test wants. No signature is checked."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "slow"


class SlowS3(ThreadingHTTPServer):
    """The server. A request whose client gave up before the answer was due has no effect.

    Attributes:
        delay: Seconds until a request takes effect and is answered.
        refuses: Whether all is answered by 503.
        expired: Access key ids whose time has run out. The refusal repeats the session token, as S3 does.
        seen: Requests so far, by verb.
        cut: Requests so far whose client did not wait, by verb.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.delay = 0.0
        self.refuses = False
        self.expired: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()

    @property
    def options(self) -> dict[str, Any]:
        """Storage options as `open_store` takes them."""
        return {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{self.server_port}"}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Answer inside the block."""
        thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()
            self.socket.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SlowS3

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _begin(self, verb: str) -> bytes | None:
        """Return the body once the answer is due; None where the client does not wait, or is refused."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen[verb] += 1
        if select.select([self.connection], [], [], self.server.delay)[0] and self._left():
            self.server.cut[verb] += 1
            self.close_connection = True
            return None
        if self.server.refuses:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            return None
        if any(f"Credential={key}/" in self.headers.get("Authorization", "") for key in self.server.expired):
            token = self.headers.get("x-amz-security-token", "")
            self._answer(400, f"<Error><Token-0>{token}</Token-0><Code>ExpiredToken</Code></Error>".encode())
            return None
        return body

    def _left(self) -> bool:
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _answer(self, status: int, body: bytes = b"") -> None:
        with contextlib.suppress(OSError):  # the client left at the last moment
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"e"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(body)

    @property
    def _key(self) -> str:
        # The client escapes the "%" of our keys once more.
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def do_PUT(self) -> None:
        """Write an object."""
        body = self._begin("put")
        if body is not None:
            self.server.objects[self._key] = body
            self._answer(200)

    def do_GET(self) -> None:
        """Read an object, or list."""
        query = parse_qs(urlsplit(self.path).query)
        listing = "list-type" in query
        if self._begin("list" if listing else "get") is None:
            return
        if listing:
            self._list(query["prefix"][0], query.get("start-after", [""])[0])
        elif self._key in self.server.objects:
            self._answer(200, self.server.objects[self._key])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _list(self, prefix: str, after: str) -> None:
        found = sorted(key for key in self.server.objects if key.startswith(prefix) and key > after)
        entry = "<Contents><Key>{}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        body = "".join(entry.format(escape(key)) for key in found)
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{body}</ListBucketResult>".encode())

    def do_POST(self) -> None:
        """Delete several."""
        body = self._begin("delete")
        if body is not None:
            gone = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in gone:
                self.server.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in gone)
            self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
