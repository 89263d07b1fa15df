"""What the fault proxy does to which requests: rules, and the requests that it has seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "latency",
    "answer",
    "reset_before",
    "cut_upload",
    "lose_reply",
    "truncate_body",
    "stall_body",
    "flip_upload",
    "flip_download",
    "throttle",
    "never_answer",
]


@dataclass(frozen=True, slots=True)
class Rule:
    """A fault and the requests that it meets. Make one by a function below.

    Attributes:
        kind: What happens.
        count: How many requests it meets; None: no end.
        method: HTTP method; None: any.
        key: A part of the decoded path and query, such as a key or ``?uploads``.
        first: Number of the first matching request that it meets, from 1.
        every: It meets each so manieth one from there.
        seconds: For ``latency``.
        at: A number of bytes: where a body is cut, stalled or changed; for ``throttle`` the bytes in a second.
        status: For ``answer``.
        body: For ``answer``.
    """

    kind: Kind
    count: int | None = 1
    method: str | None = None
    key: str = ""
    first: int = 1
    every: int = 1
    seconds: float = 0.0
    at: int = 0
    status: int = 0
    body: bytes = b""

    def matches(self, seen: Seen) -> bool:
        """Whether the rule counts a request."""
        return self.method in {None, seen.method} and self.key in f"{seen.path}?{seen.query}"

    def meets(self, number: int) -> bool:
        """Whether it meets the so manieth request that it counts."""
        turn, rest = divmod(number - self.first, self.every)
        return turn >= 0 and rest == 0 and (self.count is None or turn < self.count)


def latency(seconds: float, n: int | None = None, **match: Any) -> Rule:
    """Wait before forwarding."""
    return Rule("latency", n, seconds=seconds, **match)


def answer(status: int, code: str, n: int | None = 1, **match: Any) -> Rule:
    """Answer with an S3 error, without forwarding. Status 200 with an error in the body is one of them."""
    body = f"<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Rule("answer", n, status=status, body=body.encode(), **match)


def slow_down(n: int | None = 1, **match: Any) -> Rule:
    """503: the bucket is asked too often."""
    return answer(503, "SlowDown", n, **match)


def internal_error(n: int | None = 1, **match: Any) -> Rule:
    """500: it may or may not have been done; here it was not."""
    return answer(500, "InternalError", n, **match)


def expired_token(n: int | None = 1, status: int = 400, **match: Any) -> Rule:
    """Temporary credentials have run out. S3 says 400, some servers 403."""
    return answer(status, "ExpiredToken", n, **match)


def reset_before(n: int | None = 1, **match: Any) -> Rule:
    """Reset the connection; the server never sees the request."""
    return Rule("reset_before", n, **match)


def cut_upload(at: int, n: int | None = 1, method: str = "PUT", **match: Any) -> Rule:
    """Pass on so many bytes of the request's body, then reset both connections."""
    return Rule("cut_upload", n, at=at, method=method, **match)


def lose_reply(n: int | None = 1, **match: Any) -> Rule:
    """Let the server do it and answer, then reset the connection."""
    return Rule("lose_reply", n, **match)


def truncate_body(at: int, n: int | None = 1, method: str = "GET", **match: Any) -> Rule:
    """Pass on so many bytes of the reply's body, then close in good order, though the header promised more."""
    return Rule("truncate_body", n, at=at, method=method, **match)


def stall_body(at: int, n: int | None = 1, method: str = "GET", **match: Any) -> Rule:
    """Pass on so many bytes of the reply's body, then nothing, on an open connection."""
    return Rule("stall_body", n, at=at, method=method, **match)


def flip_byte(at: int, n: int | None = 1, method: str = "PUT", **match: Any) -> Rule:
    """Change one byte on the way: of the request's body, or with ``method="GET"`` of the reply's."""
    return Rule("flip_download" if method == "GET" else "flip_upload", n, at=at, method=method, **match)


def throttle(bytes_per_second: int, n: int | None = None, **match: Any) -> Rule:
    """Pass both bodies on slowly, but without a long pause."""
    return Rule("throttle", n, at=bytes_per_second, **match)


def never_answer(n: int | None = 1, **match: Any) -> Rule:
    """Read the request, and neither forward nor answer it, until the client gives up."""
    return Rule("never_answer", n, **match)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request.

    Attributes:
        method: HTTP method.
        path: Decoded path: bucket and key.
        query: Decoded query.
        sent: Bytes of its body that came from the client.
        status: What the server, or the proxy in its stead, answered; None where nobody did.
        fault: The kind of the rule that met it.
    """

    method: str
    path: str
    query: str
    sent: int = 0
    status: int | None = None
    fault: Kind | None = None
