"""The demo keeps its promise, and notices each fault that would break it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = "800"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as `make demo` does, with fewer training steps."""
    command = [sys.executable, "-m", "example_project.demo", "--folder", str(folder), "--steps", STEPS, *options]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests' / 'planted'}", "COLUMNS": "160"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=400)


def test_both_losses_are_recovered_and_the_result_is_equal(tmp_path):
    """Killed in training, stopped in inference: it recovers by itself, and the result equals an undisturbed run's."""
    done = demo(tmp_path / "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the woken run met FencedError" in done.stdout
    assert "equal: delay_model" in done.stdout
    assert "equal: delay_predictions" in done.stdout


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        ("no_restore", "Training resumed at step 0"),
        ("no_skip", "selects finished assets"),
        ("no_fence", "committed 2 times"),
    ],
)
def test_a_planted_fault_makes_the_demo_fail(tmp_path, fault, noticed):
    """Without restore, fence or skip the demo exits non-zero and says what went wrong."""
    done = demo(tmp_path / "demo", "--module", f"planted_{fault}")
    assert done.returncode != 0
    assert noticed in done.stdout, done.stdout + done.stderr
