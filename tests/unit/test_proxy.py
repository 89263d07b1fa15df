"""The fault proxy itself: what it passes on is unchanged, and each fault is the one that was asked for."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from proxy import S3Proxy
from proxy_rules import (
    Rule,
    cut_upload,
    flip_byte,
    lose_reply,
    never_answer,
    reset_before,
    slow_down,
    stall_body,
    throttle,
    truncate_body,
)

BODY = bytes(range(256)) * 40


class Upstream(http.server.ThreadingHTTPServer):
    """Keeps what it is sent, and answers with it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hosts: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.begun = threading.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be quiet: connections are reset here on purpose."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_PUT(self) -> None:
        self.server.hosts.append(self.headers["Host"])
        left, body = int(self.headers["Content-Length"]), b""
        while piece := self.rfile.read1(left):  # type: ignore[attr-defined]
            self.server.begun.set()
            body, left = body + piece, left - len(piece)
        if left == 0:
            self.server.stored[self.path] = body
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.server.stored.get(self.path, BODY))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the overridden method
        """Be quiet."""


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    """A server behind the proxy."""
    with Upstream() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[S3Proxy]:
    """A proxy without faults as yet."""
    with S3Proxy(upstream.url) as one:
        yield one


@pytest.fixture
def connection(proxy: S3Proxy) -> Iterator[http.client.HTTPConnection]:
    """A client's connection, which it keeps."""
    one = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=10)
    yield one
    one.close()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """One request and its whole reply."""
    connection.request(method, path, body)
    reply = connection.getresponse()
    return reply.status, reply.read()


def test_requests_pass_unchanged_on_one_connection(
    proxy: S3Proxy, upstream: Upstream, connection: http.client.HTTPConnection
) -> None:
    """Bodies and the Host header arrive as they were sent, and the client keeps its connection."""
    assert ask(connection, "PUT", "/a%20b?x=%2F", BODY) == (200, b"")
    kept = connection.sock
    assert ask(connection, "GET", "/a%20b?x=%2F") == (200, BODY)
    assert connection.sock is kept
    assert upstream.hosts == [proxy.endpoint.removeprefix("http://")]
    assert [(seen.method, seen.path, seen.query, seen.sent, seen.status) for seen in proxy.seen] == [
        ("PUT", "/a b", "x=/", len(BODY), 200),
        ("GET", "/a b", "x=/", 0, 200),
    ]


def test_a_body_is_streamed(proxy: S3Proxy, upstream: Upstream, connection: http.client.HTTPConnection) -> None:
    """The server has the beginning of a body before the client has sent the end: the proxy does not collect it."""

    def pieces() -> Iterator[bytes]:
        yield BODY
        assert upstream.begun.wait(timeout=10)
        yield BODY

    connection.request("PUT", "/a", pieces(), {"Content-Length": str(2 * len(BODY))})
    assert connection.getresponse().status == 200
    assert upstream.stored["/a"] == 2 * BODY


def test_rules_choose_their_requests(proxy: S3Proxy, connection: http.client.HTTPConnection) -> None:
    """By method, key, number and count; a rule that is used up lets requests pass."""
    proxy.plan(slow_down(2, method="GET", key="/a", first=2, every=2))
    paths = ["/a", "/b", "/a", "/a", "/a", "/a", "/a"]
    assert [ask(connection, "GET", path)[0] for path in paths] == [200, 200, 503, 200, 503, 200, 200]
    assert (proxy.count("GET", "/a"), proxy.count("GET"), proxy.count("PUT")) == (6, 7, 0)


@pytest.mark.parametrize("rule", [reset_before(), cut_upload(5000), lose_reply()])
def test_a_connection_is_reset(
    proxy: S3Proxy, upstream: Upstream, connection: http.client.HTTPConnection, rule: Rule
) -> None:
    """Before, during or after the upload: only in the last case the server has stored it, and then whole."""
    proxy.plan(rule)
    with pytest.raises(ConnectionError):
        ask(connection, "PUT", "/a", BODY)
    assert upstream.stored == ({"/a": BODY} if rule.kind == "lose_reply" else {})
    connection.close()
    assert ask(connection, "PUT", "/b", BODY) == (200, b"")


def test_a_reply_is_cut_short(proxy: S3Proxy, connection: http.client.HTTPConnection) -> None:
    """The header promises the whole body, and the connection ends before it."""
    proxy.plan(truncate_body(5000))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(connection, "GET", "/a")
    assert caught.value.partial == BODY[:5000]


@pytest.mark.parametrize("rule", [never_answer(), stall_body(100)])
def test_a_silent_server_stays_silent(proxy: S3Proxy, rule: Rule) -> None:
    """The client's own timeout ends it."""
    proxy.plan(rule)
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=0.2)
    with pytest.raises(TimeoutError):
        ask(connection, "GET", "/a")
    connection.close()


def test_one_bit_is_flipped(proxy: S3Proxy, upstream: Upstream, connection: http.client.HTTPConnection) -> None:
    """At the offset that was named, on the way there or back, and nowhere else."""
    flipped = BODY[:7000] + bytes([BODY[7000] ^ 1]) + BODY[7001:]
    proxy.plan(flip_byte(7000), flip_byte(7000, method="GET"))
    ask(connection, "PUT", "/a", BODY)
    assert upstream.stored["/a"] == flipped
    assert ask(connection, "GET", "/other") == (200, flipped)


def test_a_throttled_body_is_whole(proxy: S3Proxy, connection: http.client.HTTPConnection) -> None:
    """Slow is not broken."""
    proxy.plan(throttle(1_000_000))
    assert ask(connection, "GET", "/a") == (200, BODY)
