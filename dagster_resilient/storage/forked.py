"""S3 in a process that was forked from one that had used obstore.

obstore runs its requests on threads, and a fork copies none of them: in the child every call would hang for ever, and
the threads cannot be started again. So the child asks a helper process of its own, a fresh interpreter, over two pipes.
Processes that are not forked (spawned workers, a plain script) never pay for this. What is not seen: a process that
used obstore by itself, without this library, before it forked.

A frame is a length, a JSON header, and a body. Credentials travel in the pipe, never on a command line.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import IO, Any, ParamSpec, TypeVar, cast

from dagster_resilient import errors
from dagster_resilient.storage.object_store import ObjectInfo, ObjectStore, as_buffers

P = ParamSpec("P")
T = TypeVar("T")

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline());"
    "from dagster_resilient.storage.forked import serve; serve(sys.stdin.buffer, sys.stdout.buffer)"
)
_LENGTHS = struct.Struct("!IQ")
_WRITES = {"_put", "_create", "_replace"}  # key and buffers come first
_PIECE = 1 << 20


class _Runtime:
    """Whether obstore's threads were started in this process, and whether a fork has left them behind."""

    used = False
    lost = False


def note_use() -> None:
    """Note that obstore is about to start its threads in this process."""
    _Runtime.used = True


def is_lost() -> bool:
    """Whether obstore cannot be used in this process, since it was forked from one that had used it."""
    return _Runtime.lost


def _after_fork() -> None:
    _Runtime.lost = _Runtime.lost or _Runtime.used


os.register_at_fork(after_in_child=_after_fork)


def safe(method: Callable[P, T]) -> Callable[P, T]:
    """Let a method of a store run here, or in the helper where this process cannot run it."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _Runtime.lost:
            return method(*args, **kwargs)
        store, *rest = args
        here = cast("ObjectStore", store)
        # Asked for each call: credentials are replaced while the process lives.
        config = here.sidecar_config()
        return cast("T", _helper(here).call(method.__name__, [*rest, *kwargs.values()], config))

    return call


_helpers: dict[tuple[int, str], StoreHelper] = {}


def _helper(store: ObjectStore) -> StoreHelper:
    """One helper for each process and store. Its start is its own affair, so that a lost race costs nothing."""
    return _helpers.setdefault((os.getpid(), store.url), StoreHelper(store.url))


class StoreHelper:
    """The forked process's side: sends a call, returns or raises what came back. Calls of many threads take turns."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._config: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, verb: str, args: Sequence[Any], config: Mapping[str, Any]) -> Any:
        """Run one method of the store in the helper.

        Args:
            verb: Name of the method.
            args: Its arguments.
            config: `sidecar_config` of the store. A helper with another one is replaced.

        Raises:
            StoreUnavailableError: The helper ended in the middle. The next call starts another one.
        """
        body: Sequence[memoryview] = args[1] if verb in _WRITES else []
        plain = [args[0], *args[2:]] if verb in _WRITES else [_plain(arg) for arg in args]
        with self._lock:
            if config != self._config:
                self._end()
                self._config = config
            try:
                process = self._started()
                _send(_pipe(process.stdin), {"verb": verb, "args": plain}, body)
                header, answer = _receive(_pipe(process.stdout))
            except (OSError, EOFError) as error:
                self._end()
                message = f"The helper process for {self._url} ended during {verb}: {error}"
                raise errors.StoreUnavailableError(message, store=self._url) from error
        if "error" in header:
            raise _raised(header, self._url)
        return _decoded(header, answer)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # Unbuffered: bytes left in a buffer would be sent twice if this process forks again.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                [sys.executable, "-c", _BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            _write(_pipe(self._process.stdin), json.dumps(sys.path).encode() + b"\n")
            _send(_pipe(self._process.stdin), self._config, [])
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # waits, and closes the pipes
                self._process = None


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer calls until the pipe is closed: the helper's side."""
    from dagster_resilient.storage.obstore_store import reopened  # noqa: PLC0415 - it imports this module

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the forked process decides
    config, _ = _receive(requests)
    store = reopened(config)
    while True:
        try:
            header, body = _receive(requests)
        except EOFError:
            return
        reply, parts = _answered(store, header, body)
        _send(replies, reply, parts)


def _answered(store: ObjectStore, header: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], Sequence[Any]]:
    args = header["args"]
    if header["verb"] in _WRITES:
        args = [args[0], as_buffers(body), *args[1:]]
    try:
        result = getattr(store, header["verb"])(*args)
    except errors.ResilientError as error:
        return {"error": type(error).__name__, "message": str(error), "key": getattr(error, "key", None)}, []
    if isinstance(result, str):
        return {"kind": "text", "value": result}, []
    if isinstance(result, bytes):
        return {"kind": "bytes"}, [result]
    if isinstance(result, ObjectInfo):
        return {"kind": "info", "value": _info(result)}, []
    if result and isinstance(result[0], ObjectInfo):
        return {"kind": "infos", "value": [_info(info) for info in result]}, []
    return {"kind": "parts", "value": [len(part) for part in result or ()]}, result or ()


def _decoded(header: Mapping[str, Any], answer: bytes) -> Any:
    value: Any = header.get("value")
    if header["kind"] == "bytes":
        return answer
    if header["kind"] == "text":
        return value
    if header["kind"] == "info":
        return _as_info(value)
    if header["kind"] == "infos":
        return [_as_info(one) for one in value]
    ends = [sum(value[: n + 1]) for n in range(len(value))]
    return [answer[end - size : end] for end, size in zip(ends, value, strict=True)]


def _info(info: ObjectInfo) -> list[Any]:
    return [info.key, info.size, info.last_modified.isoformat(), info.version]


def _as_info(fields: Sequence[Any]) -> ObjectInfo:
    key, size, at, version = fields
    return ObjectInfo(key, size, datetime.fromisoformat(at), version)


def _raised(header: Mapping[str, Any], url: str) -> Exception:
    kind: type[Exception] = getattr(errors, header["error"])
    if issubclass(kind, errors.StorageError):
        return kind(header["message"], store=url, key=header["key"])
    return kind(header["message"])


def _plain(arg: Any) -> Any:
    return arg if arg is None or isinstance(arg, str) else list(arg)


def _send(pipe: IO[bytes], header: Mapping[str, Any], body: Sequence[Any]) -> None:
    text = json.dumps(header).encode()
    _write(pipe, _LENGTHS.pack(len(text), sum(len(part) for part in body)) + text)
    for part in body:
        _write(pipe, part)
    pipe.flush()


def _write(pipe: IO[bytes], data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    header, body = _LENGTHS.unpack(_read(pipe, _LENGTHS.size))
    return json.loads(_read(pipe, header)), _read(pipe, body)


def _read(pipe: IO[bytes], size: int) -> bytes:
    """Read exactly so much: an unbuffered pipe gives what it has."""
    got = bytearray()
    while len(got) < size:
        piece = pipe.read(min(size - len(got), _PIECE))
        if not piece:
            raise EOFError("the pipe was closed")
        got += piece
    return bytes(got)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
