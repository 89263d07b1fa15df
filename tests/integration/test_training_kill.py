"""kill -9 of a training: it ends bit-equal to one that was never killed; a kill costs one save interval at most."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dagster_resilient.storage.object_store import open_store

SCRIPT = Path(__file__).with_name("train_script.py")
KILLS = 30 if os.environ.get("RESILIENT_SOAK") == "1" else 5
EVERY = 10
# What a start may get done before it is killed, so that the run lasts for all the kills.
PER_START = 60


def start(url, folder, steps, *arguments):
    """Start the script."""
    command = [sys.executable, str(SCRIPT), url, str(folder), str(steps), str(EVERY), *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def journal(folder):
    """Return the whole lines of the journal."""
    path = folder / "journal"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def finish(process):
    """Wait for a script that must end well."""
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def kill_after(process, folder, lines, delay):
    """Kill the script a moment after it has written so many journal lines, whatever it is doing then."""
    deadline = time.monotonic() + 120
    while len(journal(folder)) < lines and process.poll() is None:
        assert time.monotonic() < deadline, "the script makes no progress"
        time.sleep(0.001)
    time.sleep(delay)  # the moment of the kill is what varies
    process.kill()
    process.communicate(timeout=200)


def starts(lines):
    """Split a journal into its starts: where each resumed, and the steps that it made."""
    found = []
    for line in lines:
        if "resumed" in line:
            found.append((line["resumed"], []))
        else:
            found[-1][1].append(line)
    return found


def check_redo(lines):
    """Check that every start resumed at most one interval before what the earlier ones had done."""
    done = 0
    for resumed, steps in starts(lines):
        assert done - EVERY <= resumed <= done
        assert [line["step"] for line in steps] == list(range(resumed, resumed + len(steps)))
        done = max(done, resumed + len(steps))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The journal, by step, and the final digests of a run that is never killed."""
    folder = tmp_path_factory.mktemp("straight")
    steps = PER_START * (KILLS + 1)
    finish(start(str(folder / "store"), folder, steps))
    return steps, {line["step"]: line for line in starts(journal(folder))[0][1]}, (folder / "final.json").read_text()


def check_equal(folder, straight):
    """Check that a killed run saw and computed, at every try of every step, what the other one did."""
    steps, expected, final = straight
    lines = journal(folder)
    check_redo(lines)
    made = [line for line in lines if "step" in line]
    assert {line["step"] for line in made} == set(range(steps))
    assert all(line == expected[line["step"]] for line in made)
    assert (folder / "final.json").read_text() == final


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_training_that_is_killed_at_random_moments_ends_bit_equal(tmp_path, straight):
    """Weights, moments, schedule, each loss and each sample id, at every try of every step."""
    seed = int(os.environ.get("RESILIENT_SEED", time.time_ns() % 2**32))
    print(f"RESILIENT_SEED={seed}")
    rng = random.Random(seed)
    url = str(tmp_path / "store")
    for _ in range(KILLS):
        process = start(url, tmp_path, straight[0])
        # The first line of a start says where it resumed.
        lines = len(journal(tmp_path)) + 1 + rng.randint(0, PER_START - 10)
        kill_after(process, tmp_path, lines, rng.uniform(0, 0.02))
    finish(start(url, tmp_path, straight[0]))
    check_equal(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_training_that_is_killed_at_operations_of_its_store_ends_bit_equal(tmp_path, straight):
    """Between any two requests of a save: before and after data, manifest, commit and clean-up."""
    seed = int(os.environ.get("RESILIENT_SEED", time.time_ns() % 2**32))
    print(f"RESILIENT_SEED={seed}")
    rng = random.Random(seed)
    url = str(tmp_path / "store")
    for _ in range(KILLS):
        process = start(url, tmp_path, straight[0], rng.randint(0, 50), rng.choice(["die_before", "die_after"]))
        process.communicate(timeout=120)
        assert process.returncode in {-9, 0}
        if process.returncode == 0:  # it was nearly done, and had fewer operations left than it was to live for
            break
    finish(start(url, tmp_path, straight[0]))
    check_equal(tmp_path, straight)


@pytest.mark.slow
def test_a_completed_training_is_not_trained_again(tmp_path, straight):
    """One more start of the script ends at once, with the same weights."""
    url = str(tmp_path / "store")
    for _ in range(2):
        finish(start(url, tmp_path, 20))
    (resumed, again) = starts(journal(tmp_path))[1]
    assert (resumed, again) == (20, [])
    names = [info.key.rsplit("/", 1)[1] for info in open_store(url).list("tasks/") if "/data/" in info.key]
    assert sorted(names) == sorted(2 * ["document.json", "manifest.json", "tensors.safetensors"])
