"""How long to search: ``HYPOTHESIS_EXAMPLES`` is the number of examples of each test here."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "0"))
"""0: the few of each test that the fast suite has time for."""


def examples(few: int) -> settings:
    """So many in the fast suite, more if the environment says so."""
    return settings(
        max_examples=EXAMPLES or few,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
