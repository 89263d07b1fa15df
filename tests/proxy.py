"""A small fault proxy in front of an S3 server, so that the real client stack meets real network faults.

It passes requests on as they came, the Host header too: a signature that was made for the proxy's own address stays
valid, since the server checks it against the header that it receives. Bodies are streamed. Faults are a plan of rules::

    with S3Proxy(server.endpoint) as proxy:
        proxy.plan(slow_down(3, method="PUT"), lose_reply(1, key="/log/"))

It listens on loopback only, and keeps a list of the requests that it has seen.
"""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from proxy_rules import Kind, Rule, Seen

_PIECE = 1 << 16
_CONNECT_SECONDS, _REPLY_SECONDS = 5.0, 60.0  # for the server behind; a frozen one must not keep a test for ever
_RESET = struct.pack("ii", 1, 0)  # linger for no time: closing sends a reset
# Expect is answered here, and not signed; the connection behind serves one request.
_HOP_BY_HOP = {"connection", "expect", "keep-alive", "proxy-connection"}
_BODILESS = {204, 304}
_NO_FAULT = Rule("latency")  # by no time


class _BrokenError(Exception):
    """A body ended early, or the plan wants it so: no end in good order may follow."""


@dataclass(frozen=True, slots=True)
class _Head:
    """First line and header lines of a request or a reply, as they came."""

    first: bytes
    lines: list[bytes]

    @classmethod
    def read(cls, reader: io.BufferedReader) -> _Head:
        first = reader.readline()
        lines = []
        while (line := reader.readline()) not in {b"\r\n", b"\n", b""}:
            lines.append(line)
        if not first or not line:
            raise ConnectionError("the other side has closed the connection")
        return cls(first, lines)

    def get(self, name: str) -> str:
        return next((value for field, value in map(_field, self.lines) if field == name), "")

    def raw(self, *more: bytes) -> bytes:
        kept = [line for line in self.lines if _field(line)[0] not in _HOP_BY_HOP]
        return b"".join([self.first, *kept, *more, b"\r\n"])

    def has_end(self) -> bool:
        return self.get("content-length") != "" or self.get("transfer-encoding").lower() == "chunked"


def _field(line: bytes) -> tuple[str, str]:
    name, _, value = line.decode("latin-1").partition(":")
    return name.strip().lower(), value.strip()


class S3Proxy:
    """The proxy. Use it as a context manager, or `start` and `close` it.

    Attributes:
        endpoint: Its URL, on a port that was free.
        seen: The requests in the order in which they ended.
        on_request: Called after a request was done or refused, before the client learns of it, in the thread that
            serves it. What it raises is lost: collect what a test wants to judge.
    """

    def __init__(self, upstream: str) -> None:
        """Take a free port.

        Args:
            upstream: URL of the server behind.
        """
        there = urllib.parse.urlsplit(upstream)
        self._upstream = (there.hostname or "127.0.0.1", there.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen: list[Seen] = []
        self.on_request: Callable[[Seen], None] = lambda _seen: None
        self._rules: list[tuple[Rule, list[int]]] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=10)
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(self, *rules: Rule) -> None:
        """Follow these rules from now on, in place of the earlier ones, and forget the requests seen so far.

        Each rule counts all requests that match it; of those that meet a request, the first one acts.
        """
        with self._lock:
            self._rules = [(rule, [0]) for rule in rules]
            self.seen = []

    def count(self, method: str | None = None, key: str = "") -> int:
        """Return how many requests were seen that match; see `Rule`."""
        wanted = Rule("latency", method=method, key=key)
        return sum(wanted.matches(seen) for seen in self.seen)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    @contextlib.contextmanager
    def _tracked(self, connection: socket.socket) -> Iterator[io.BufferedReader]:
        with self._lock:
            self._open.add(connection)
        try:
            with connection, io.BufferedReader(connection.makefile("rb", buffering=0), _PIECE) as reader:
                yield reader
        finally:
            with self._lock:
                self._open.discard(connection)

    def _serve(self, client: socket.socket) -> None:
        with self._tracked(client) as reader:
            try:
                while _Exchange(self, client, reader).run():
                    pass
            except (OSError, _BrokenError):
                with contextlib.suppress(OSError):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def rule_for(self, seen: Seen) -> Rule | None:
        """Count a request, and return the rule that acts on it."""
        acting = None
        with self._lock:
            for rule, counter in self._rules:
                if rule.matches(seen):
                    counter[0] += 1
                    if acting is None and rule.meets(counter[0]):
                        acting = rule
        return acting

    def note(self, seen: Seen) -> None:
        """Add a request to those seen."""
        with self._lock:
            self.seen.append(seen)
        self.on_request(seen)

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond `close`."""
        self._closing.wait(seconds)

    @contextlib.contextmanager
    def connected(self) -> Iterator[tuple[socket.socket, io.BufferedReader]]:
        """Connect to the server behind. An error resets that connection too: the server must not take a half body."""
        upstream = socket.create_connection(self._upstream, timeout=_CONNECT_SECONDS)
        upstream.settimeout(_REPLY_SECONDS)
        with self._tracked(upstream) as reader:
            try:
                yield upstream, reader
            except BaseException:
                upstream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                raise


class _Exchange:
    """One request and its reply."""

    def __init__(self, proxy: S3Proxy, client: socket.socket, reader: io.BufferedReader) -> None:
        self._proxy = proxy
        self._client = client
        self._request = _Head.read(reader)
        method, target, _ = self._request.first.decode("latin-1").split(" ", 2)
        path, _, query = target.partition("?")
        self._asked = Seen(method, urllib.parse.unquote(path), urllib.parse.unquote(query))
        self._rule = proxy.rule_for(self._asked) or _NO_FAULT
        self._sent = 0
        self._body = self._counted(_pieces(reader, self._request) if self._request.has_end() else iter(()))

    def run(self) -> bool:
        """Serve it; return whether the connection can serve another one."""
        if self._rule.kind == "reset_before":
            self._note(None)
            raise _BrokenError
        if self._request.get("expect"):
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._rule.kind == "answer":
            return self._answered()
        if self._rule.kind == "never_answer":
            _drain(self._body)
            self._note(None)
            self._hang()
        self._proxy.pause(self._rule.seconds)
        with self._proxy.connected() as (upstream, reader):
            self._forward(upstream)
            return self._reply(reader)

    def _note(self, status: int | None) -> None:
        fault = None if self._rule is _NO_FAULT else self._rule.kind
        self._proxy.note(replace(self._asked, sent=self._sent, status=status, fault=fault))

    def _answered(self) -> bool:
        _drain(self._body)
        self._note(self._rule.status)
        body = b"" if self._asked.method == "HEAD" else self._rule.body
        head = f"HTTP/1.1 {self._rule.status} Fault\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
        self._client.sendall(head.encode() + b"\r\n\r\n" + body)
        return True

    def _hang(self) -> None:
        """Wait until the client, or `S3Proxy.close`, closes the connection."""
        self._client.recv(1)
        raise _BrokenError

    def _forward(self, upstream: socket.socket) -> None:
        try:
            upstream.sendall(self._request.raw(b"Connection: close\r\n"))
            for piece in self._changed(self._body, "flip_upload", "cut_upload"):
                upstream.sendall(piece)
        except _BrokenError:
            self._note(None)
            raise
        except OSError:
            # A server may refuse and close before it has read the body: its answer is there to be read.
            _drain(self._body)

    def _reply(self, reader: io.BufferedReader) -> bool:
        try:
            reply = _Head.read(reader)
        except OSError:
            self._note(None)
            raise
        status = int(reply.first.split()[1])
        bodiless = self._asked.method == "HEAD" or status in _BODILESS
        body = iter(()) if bodiless else _pieces(reader, reply)
        if self._rule.kind == "lose_reply":
            _drain(body)
            self._note(status)
            raise _BrokenError
        self._note(status)
        lasting = bodiless or reply.has_end()
        self._client.sendall(reply.raw() if lasting else reply.raw(b"Connection: close\r\n"))
        return self._send(body) and lasting

    def _send(self, body: Iterator[bytes]) -> bool:
        try:
            for piece in self._changed(body, "flip_download", "truncate_body"):
                self._client.sendall(piece)
        except _BrokenError:
            return False
        return True

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        try:
            for piece in pieces:
                self._sent += len(piece)
                yield piece
        except OSError as error:
            raise _BrokenError from error

    def _changed(self, pieces: Iterable[bytes], flip: Kind, cut: Kind) -> Iterator[bytes]:
        """Pass on a body with the fault that the rule wants in this direction."""
        rule, start = self._rule, 0
        for piece in pieces:
            inside = rule.at - start
            here = 0 <= inside < len(piece)
            if here and rule.kind == flip:
                yield piece[:inside] + bytes([piece[inside] ^ 0x01]) + piece[inside + 1 :]
            elif here and (rule.kind == cut or (rule.kind == "stall_body" and cut == "truncate_body")):
                yield piece[:inside]
                if rule.kind == "stall_body":
                    self._hang()
                raise _BrokenError
            else:
                yield piece
            if rule.kind == "throttle":
                self._proxy.pause(len(piece) / rule.at)
            start += len(piece)


def _drain(pieces: Iterable[bytes]) -> None:
    for _ in pieces:
        pass


def _pieces(reader: io.BufferedReader, head: _Head) -> Iterator[bytes]:
    """Yield a body as it travels, the frames of a chunked one included, as soon as something has come."""
    if head.get("transfer-encoding").lower() == "chunked":
        yield from _chunked(reader)
    elif length := head.get("content-length"):
        yield from _exactly(reader, int(length))
    else:
        while piece := reader.read1(_PIECE):
            yield piece


def _exactly(reader: io.BufferedReader, size: int) -> Iterator[bytes]:
    while size:
        piece = reader.read1(min(size, _PIECE))
        if not piece:
            raise _BrokenError
        size -= len(piece)
        yield piece


def _chunked(reader: io.BufferedReader) -> Iterator[bytes]:
    size = -1
    while size:
        line = _line(reader)
        size = int(line.split(b";")[0], 16)
        yield line
        yield from _exactly(reader, size)
        if size:
            yield _line(reader)
    while (line := _line(reader)).strip():  # trailers
        yield line
    yield line


def _line(reader: io.BufferedReader) -> bytes:
    line = reader.readline()
    if not line:
        raise _BrokenError
    return line
