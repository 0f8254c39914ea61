"""Why a student's engine computes nothing: the key of the metric, and the words of the report."""

from __future__ import annotations

WAITS = {
    "weights": "the newest weights",
    "gpu": "its GPU, which others use",
    "prompts": "prompts (admission)",
}
"""What a replica that computes nothing waits for: ``wait_<cause>_s``, and in words."""


def cause_of(*, paused: bool, asleep: bool) -> str:
    """Why the engine has no request now; a weight sync comes before the GPU's other users."""
    if paused:
        return "weights"
    return "gpu" if asleep else "prompts"
