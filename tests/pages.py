"""Pages of the documentation as programs: their blocks in order, run by a real shell and a real interpreter.

A fenced ``sh`` block runs in the page's shell, which keeps its folder and variables from block to block and stops at
the first command that fails. A ``python`` block runs in the page's interpreter, in one namespace; one whose first line
is ``# file: NAME`` is written to that file instead. A comment before a block changes that:

- ``<!-- test: skip because REASON -->``: it is not run.
- ``<!-- test: background -->``: it runs beside the blocks after it, and is ended with the page.
- ``<!-- test: output -->``: it is what the block before it prints. ``...`` stands for anything left out; numbers and
  run ids may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"```(\w*)\s*")
_NOTE = re.compile(r"<!-- test: (.*) -->\s*")
_FILE = re.compile(r"# file: (\S+)\n")
_VARYING = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b|\b[0-9a-f]{32}\b|\b(?=[0-9a-f]*[0-9])[0-9a-f]{8}\b"), "ID"),
    (re.compile(r"\d+(\.\d+)?(e-?\d+)?"), "N"),
)
_INTERPRETER = """
import contextlib, io, json, sys, traceback
replies, sys.stdout = sys.stdout, sys.stderr
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    block, output, failed = json.loads(line), io.StringIO(), False
    with contextlib.redirect_stdout(output):
        try:
            exec(compile(block["text"], block["where"], "exec"), namespace)
        except BaseException:
            failed = True
            traceback.print_exc(file=output)
    print(json.dumps([output.getvalue(), failed]), file=replies, flush=True)
"""


class PageError(AssertionError):
    """A page does not do what it says."""


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: Name of the page.
        line: Line of its opening fence.
        language: What stands behind the fence.
        text: What is between the fences.
        note: The comment before it, "" where there is none.
    """

    page: str
    line: int
    language: str
    text: str
    note: str = ""

    @property
    def where(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is run by the test."""
        return self.language in {"python", "sh"} and not self.note.startswith("skip because ")


def blocks_of(text: str, page: str) -> list[Block]:
    """Return the blocks of a page in order.

    Raises:
        PageError: A comment means nothing, belongs to no block, or a block is not closed.
    """
    found: list[Block] = []
    note, lines = "", enumerate(text.split("\n"), 1)
    for number, line in lines:
        noted, fence = _NOTE.fullmatch(line), _FENCE.fullmatch(line)
        if noted:
            note = noted[1]
        elif fence:
            found.append(_checked(Block(page, number, fence[1], _until_fence(lines, page, number), note)))
            note = ""
        elif line.strip() and note:
            raise PageError(f"{page}:{number}: the comment {note!r} stands before no block.")
    return found


def _until_fence(lines: Iterator[tuple[int, str]], page: str, opened: int) -> str:
    inside: list[str] = []
    for _, line in lines:
        if line.rstrip() == "```":
            return "".join(f"{line}\n" for line in inside)
        inside.append(line)
    raise PageError(f"{page}:{opened}: the block is not closed.")


def _checked(block: Block) -> Block:
    if block.note not in {"", "background", "output"} and not re.fullmatch(r"skip because \S.*", block.note):
        raise PageError(f"{block.where}: the comment {block.note!r} is not known; see tests/pages.py.")
    return block


def missing_line(shown: str, printed: str) -> str | None:
    """Return the first line of a shown output that was not printed in this order, None where all were."""
    rest = iter([_general(line) for line in printed.splitlines()])
    for line in (line for line in shown.splitlines() if line.strip() not in {"", "..."}):
        pattern = re.compile(".*".join(re.escape(piece) for piece in _general(line).split("...")))
        if not any(pattern.fullmatch(other) for other in rest):
            return line
    return None


def _general(line: str) -> str:
    for varying, name in _VARYING:
        line = varying.sub(name, line)
    return line.strip()


class Reader:
    """Somebody who does what a page says, in a folder of their own. Ends all processes that this started."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, seconds: float = 120.0) -> None:
        """Take a folder.

        Args:
            folder: Where the blocks run, and where their outputs are kept.
            environment: Added to the environment.
            seconds: How long the page may take in all.
        """
        self.folder = folder / "page"
        self.folder.mkdir()
        self._logs = folder
        self._deadline = time.monotonic() + seconds
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": tools, "PYTHONPATH": str(ROOT), **(environment or {})}
        self._processes: list[subprocess.Popen[str]] = []
        self._shell: subprocess.Popen[str] | None = None
        self._python: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the interpreter end by itself; TERM whatever is left of the sessions, orphans too; KILL after 15 s."""
        sessions = {process.pid for process in self._processes}
        if self._python is not None and self._python.stdin is not None:
            self._python.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._python.wait(5)
        left = [process for process in psutil.process_iter() if _session_of(process.pid) in sessions]
        for process in left:
            _signal(process, signal.SIGTERM)
        _, stubborn = psutil.wait_procs(left, timeout=15)
        for process in stubborn:
            _signal(process, signal.SIGKILL)
        for started in self._processes:
            started.kill()
            started.wait()
            assert started.stdin is not None
            assert started.stdout is not None
            started.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                started.stdin.close()

    def follow(self, page: Path) -> None:
        """Run the blocks of a page in order.

        Raises:
            PageError: A block failed, took too long, or printed something else than the page shows.
        """
        printed = ""
        for block in blocks_of(page.read_text(), page.name):
            if block.note == "output":
                line = missing_line(block.text, printed)
                if line is not None:
                    raise PageError(f"{block.where} shows a line that was not printed: {line!r}. Printed:\n{printed}")
            elif block.runs:
                printed = self.run(block)

    def run(self, block: Block) -> str:
        """Run one block and return what it printed."""
        file = _FILE.match(block.text)
        if block.language == "python" and file:
            (self.folder / file[1]).write_text(block.text[file.end() :])
            return ""
        return self._run_python(block) if block.language == "python" else self._run_sh(block)

    def _run_python(self, block: Block) -> str:
        self._python = self._python or self._start([sys.executable, "-c", _INTERPRETER])
        reply = self._ask(self._python, json.dumps({"text": block.text, "where": block.where}), block)
        printed, failed = json.loads(reply) if reply else ("The interpreter has ended.", True)
        if failed:
            raise PageError(f"{block.where} failed:\n{printed}")
        return str(printed)

    def _run_sh(self, block: Block) -> str:
        """The block's output goes to a file: what it leaves running in the background would hold a pipe open."""
        self._shell = self._shell or self._start(["bash", "--noprofile", "--norc"], "set -eo pipefail\n")
        script, output = (self._logs / f"{Path(block.page).stem}-{block.line}.{end}" for end in ("sh", "out"))
        script.write_text(block.text)
        run = f". '{script}' </dev/null >'{output}' 2>&1"
        done = self._ask(self._shell, f"{run} &\necho done" if block.note else f"{run}\necho done", block)
        if done != "done\n":
            raise PageError(f"{block.where} failed:\n{output.read_text()}")
        return output.read_text() if output.exists() else ""

    def _start(self, command: list[str], first: str = "") -> subprocess.Popen[str]:
        with (self._logs / f"{Path(command[0]).name}.out").open("w") as errors:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(first)
        return process

    def _ask(self, process: subprocess.Popen[str], question: str, block: Block) -> str:
        """Return the line that answers, "" where the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
        left = self._deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            raise PageError(f"{block.where}: the page's time is over.\n{self.outputs()}")
        return process.stdout.readline()

    def outputs(self) -> str:
        """What the shell's blocks printed so far, each shortened to its end."""
        found = sorted(self._logs.glob("*.out"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in found)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def is_running(pid: int) -> bool:
    """Whether a process exists, and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tables_under(text: str, heading: str) -> Iterator[dict[str, str]]:
    """Yield the rows of the tables between a heading and the next one, as dicts by the table's own header."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    header: list[str] | None = None
    for line in section[1].splitlines() if section else []:
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else None
        if cells is None:
            header = None
        elif header is None:
            header = cells
        elif not re.fullmatch(r"[\s|:-]+", line):
            yield dict(zip(header, cells, strict=True))


def defaults_shown(text: str, heading: str) -> dict[str, Any]:
    """Return the settings that a section's tables list, with the defaults that they name ("" for none)."""
    rows = (row for row in tables_under(text, heading) if "default" in row)
    return {next(iter(row.values())).strip("`"): row["default"].strip("`") for row in rows}
