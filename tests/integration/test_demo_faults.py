"""The demo notices each fault that would break its promise. `make test` plants one of them, `make soak` each."""

import os
import random

import pytest
from demo_runs import demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


FAULTS = [
    ("no_restore", "Training resumed at step 0"),
    ("no_skip", "selects finished assets"),
    ("no_fence", "committed 2 times"),
]
# The test's name tells which it was.
PLANTED = (
    FAULTS if os.environ.get("RESILIENT_SOAK") == "1" else random.Random(os.environ["RESILIENT_SEED"]).sample(FAULTS, 1)
)


@pytest.mark.parametrize(("fault", "noticed"), PLANTED)
def test_a_planted_fault_makes_the_demo_fail(tmp_path, fault, noticed):
    """Without restore, fence or skip the demo exits non-zero and says what went wrong."""
    done = demo(tmp_path / "demo", "--module", f"planted_{fault}")
    assert done.returncode != 0
    assert noticed in done.stdout, done.stdout + done.stderr
