"""An image crosses process borders about once for a sample, with eight rollouts and two ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.engine
def test_the_copies_of_an_image_are_at_most_1_2() -> None:
    command = [sys.executable, "-m", "benchmarks.media", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["samples"], found["n"], found["ranks"]) == (128, 8, 2)
    assert found["held_at_the_end"] == 0
    assert 0.25 < found["images_only"] <= found["copies"] <= 1.2
