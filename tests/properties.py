"""How many examples a property test tries: all of them in ``make test``, some in ``make check``.

``.ci/run`` tries the same ones each time, so that no new example fails for a change that has
nothing to do with it. ``make test`` draws new ones.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

CHECK = "check"
"""The profile of ``make check``: ``pytest --hypothesis-profile=check``."""
SHARE = 5
"""``make check`` tries one example in so many."""
USUAL = 100
"""Hypothesis's own number of examples."""

settings.register_profile("test", deadline=None)
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(CHECK, deadline=None, max_examples=USUAL // SHARE)
settings.load_profile("test")


def examples(full: int) -> settings:
    """Settings of a property test with ``full`` examples, or a fifth of them in ``make check``."""
    checks = settings.get_current_profile_name() == CHECK
    return settings(max_examples=full // SHARE if checks else full)
