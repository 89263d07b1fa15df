"""The demo keeps its promise. That it notices each fault that would break it is in `test_demo_faults`."""

import pytest
from demo_runs import demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_both_losses_are_recovered_and_the_result_is_equal(tmp_path):
    """Killed in training, stopped in inference: it recovers by itself, and the result equals an undisturbed run's."""
    done = demo(tmp_path / "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the woken run met FencedError" in done.stdout
    assert "equal: delay_model" in done.stdout
    assert "equal: delay_predictions" in done.stdout
