"""The benchmark as `make bench` runs it, in small: every row is there, and the raw rounds. No figure is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import resume
from benchmarks.report import verdict
from benchmarks.rounds import OURS, Contender, Row, Run

ROOT = Path(__file__).parents[2]
SOAK = os.environ.get("RESILIENT_SOAK") == "1"
# Each row of the table begins a section or belongs to the one above it: these texts must stand in one line each.
ROWS = [
    ("save a training state", "13 MB", "torch.save + fsync"),
    ("13 MB", "DCP, sync_files"),
    ("25 MB", "torch.save + fsync"),
    ("25 MB", "DCP, sync_files"),
    ("load it into live tensors", "13 MB", "torch.load, unverified"),
    ("13 MB", "safetensors, unverified"),
    ("25 MB", "torch.load, unverified"),
    ("25 MB", "safetensors, unverified"),
    ("put one object to S3", "12 MB", "s3fs pipe_file"),
    ("12 MB", "obstore ("),
    ("12 MB", "obstore, unsigned body"),
    ("commit a partition", "local directory", "one file, fsync, rename"),
    ("S3", "one bare obstore PUT"),
    ("time to first heartbeat", "local directory", "bare python"),
    ("acquire and first commit", "LIST", "GET", "CREATE"),
    ("each further commit", "1: CREATE 1"),
    ("whole checkpoint", "PUT", "CREATE", "HEAD"),
    ("whole partition of a loop", "LIST", "GET", "PUT", "CREATE", "HEAD"),
]
SECTIONS = {
    *("save a training state", "load it into live tensors", "put one object to S3", "commit a partition"),
    "time to first heartbeat",
}


class Clockwork:
    """Contenders that take no time of their own, and a list of who ran and who cleaned up."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def contender(self, peer: str, setting: str = "") -> Contender:
        """Return one that notes its turns."""
        name = peer + setting
        return Contender(peer, self._noting(name), self._noting(f"clean {name}"), setting)

    def _noting(self, text: str) -> Callable[[], None]:
        return lambda: self.calls.append(text)


@pytest.mark.s3
def test_a_quick_run_prints_every_row_and_keeps_its_rounds(tmp_path: Path) -> None:
    """The table has a line for each measurement; its raw rounds follow one line on the machine, and nothing else."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    missing = [row for row in ROWS if not any(all(text in line for text in row) for line in lines)]
    assert not missing, done.stdout
    assert "We are slower" in done.stdout
    head, *rounds = [json.loads(line) for line in (tmp_path / "checkpoint.jsonl").read_text().splitlines()]
    assert head["quick"] is True
    assert head["machine"].keys() >= {"cpu", "cores", "filesystem", "python"}
    assert all("requests" in line or line["seconds"] > 0 for line in rounds)
    assert {line["section"] for line in rounds if line.get("peer") == OURS} == SECTIONS
    assert "We are slower" in (tmp_path / "checkpoint.txt").read_text()


@pytest.mark.s3
def test_a_quick_run_of_the_sidecar_measures_start_memory_and_delay(tmp_path: Path) -> None:
    """Each of the three has its line for a directory and for S3, and its raw rounds."""
    command = [sys.executable, "-m", "benchmarks.sidecar", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    _, *rounds = [json.loads(line) for line in (tmp_path / "sidecar.jsonl").read_text().splitlines()]
    sections = ["first heartbeat", "memory of a sidecar", "time of a step"]
    assert {(line["section"], line["case"]) for line in rounds} == {
        (section, case) for section in sections for case in ("local directory", "S3")
    }
    assert all(line in done.stdout for line in [*sections, "no sidecar", "the aim", "one obstore PUT"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SOAK, reason="minutes of waiting for a TTL: RESILIENT_SOAK=1")
def test_a_quick_run_of_the_resume_recovers_a_training_that_was_killed(tmp_path: Path) -> None:
    """The training is found, queued, launched and goes on, in this order; `make soak` has the peers beside it."""
    command = [sys.executable, "-m", "benchmarks.resume", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    head, *rounds = [json.loads(line) for line in (tmp_path / "resume.jsonl").read_text().splitlines()]
    assert head["quick"] is True
    measured = {line["peer"]: [line[part] for part in resume.PARTS] for line in rounds if "outcome" not in line}
    assert measured.keys() == {OURS, resume.WATCHED}
    assert all(ends[0] > 0 and ends == sorted(ends) for ends in measured.values()), measured
    assert "the aim" in (tmp_path / "resume.txt").read_text()


def test_a_recovery_is_shown_in_its_parts_and_beside_the_best_peer() -> None:
    """Ends that are counted from the kill become the lengths of the parts; medians are shown, and the most redone."""

    def entrant(peer: str, *recoveries: tuple[list[float], int]) -> resume.Entrant:
        found = [resume.Recovery(dict(zip(resume.PARTS, ends, strict=True)), redone) for ends, redone in recoveries]
        nowhere: Any = None
        return resume.Entrant(peer, "s", nowhere, (resume.EVERYTHING,), {resume.EVERYTHING: found})

    ours = entrant(OURS, ([9, 10, 12, 20], 1), ([5, 6, 8, 10], 4), ([9, 10, 12, 20], 1))
    peers = [entrant("slow", ([1, 2, 3, 40], 0)), entrant("fast", ([1, 2, 3, 5], 2))]
    rows = resume.rows([ours, *peers], resume.EVERYTHING, 15, "not within 90 s")
    assert {row.section for row in rows} == {f"{resume.EVERYTHING}, TTL 15 s"}
    assert [(row.case, row.ours, row.peer, row.theirs, row.ratio) for row in rows] == [
        ("s", "20.00 s", "the aim", "25.00 s", 0.8),
        ("s", "20.00 s", resume.PLAIN, "not within 90 s", None),
        ("s", "20.00 s", "slow", "40.00 s", 0.5),
        ("s", "20.00 s", "fast", "5.00 s", 4.0),
        (f"s: {' + '.join(resume.PARTS)}", "9.0 + 1.0 + 2.0 + 8.0 s", "fast", "1.0 + 1.0 + 1.0 + 2.0 s", None),
        ("s: steps done again", "1, at most 4", "fast", "2, at most 2", None),
    ]


def test_every_contender_takes_its_turn_in_every_round_and_cleans_up() -> None:
    """The order moves on by one per round; what a round leaves is removed before the next contender begins."""
    clock = Clockwork()
    Run(settle=False).compare("s", "c", [clock.contender(OURS), clock.contender("peer")], rounds=2)
    turns = [call for call in clock.calls if not call.startswith("clean")]
    assert turns == [OURS, "peer", "peer", OURS, OURS, "peer"]
    assert clock.calls == [text for turn in turns for text in (turn, f"clean {turn}")]


def test_the_warm_up_round_is_not_kept(tmp_path: Path) -> None:
    """Of the first round nothing is recorded, of each later one everything."""
    clock = Clockwork()
    with Run(tmp_path / "rounds.jsonl", settle=False) as run:
        run.compare("s", "c", [clock.contender(OURS), clock.contender("peer")], rounds=2)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert sorted((line["peer"], line["round"]) for line in lines) == [(p, n) for p in (OURS, "peer") for n in (1, 2)]


def test_a_peer_counts_at_its_best_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several settings of one peer the one with the smallest median makes the row."""
    clock = Clockwork()
    contenders = [clock.contender(OURS), clock.contender("peer", "slow"), clock.contender("peer", "fast")]
    seconds = {OURS: 4.0, "peerslow": 9.0, "peerfast": 2.0}
    monkeypatch.setattr(Run, "_timed", lambda _, one: seconds[one.peer + one.setting])
    rows = Run().compare("s", "c", contenders, rounds=3)
    assert rows == [Row("s", "c", "4.00 s", "peer (fast)", "2.00 s", 2.0)]


def test_the_verdict_names_what_is_slower_worst_first() -> None:
    """Rows where we win, tie or have nobody to compare with are left out."""
    rows = [Row("a", "x", "", "p", "", 1.2), Row("b", "y", "", "q", "", 3.0), Row("c", "z", "", "r", "", 0.5)]
    assert [line.split(":")[0].split()[2] for line in verdict([*rows, Row("d", "", "")])[1:]] == ["b,", "a,"]
    assert verdict([rows[2]]) == ["We are slower nowhere in this run."]
