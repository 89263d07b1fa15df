"""Runs the demo for the tests of it, which lie in two files so that two workers share them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = "800"


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as `make demo` does, with fewer training steps."""
    command = [sys.executable, "-m", "example_project.demo", "--folder", str(folder), "--steps", STEPS, *options]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests' / 'planted'}", "COLUMNS": "160"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=400)
