"""A supervised k1 is refused under every name; a proper one, and its neighbours, are not."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.config.sections.supervised_k1 import supervised_k1


@pytest.mark.parametrize(
    ("loss", "culprit"),
    [
        ({"kind": "k1", "gradient": "supervised"}, "gradient"),
        ({"kind": "k1", "policy_gradient": False}, "policy_gradient"),
        ({"kind": "k1", "policy_gradient": "no"}, "policy_gradient"),
        ({"kind": "k1", "use_policy_gradient": 0}, "use_policy_gradient"),
        ({"kind": "k1", "supervised": True}, "supervised"),
        ({"kind": "k1_supervised"}, "kind"),
        ({"kind": "reverse_kl_k1"}, "kind"),
        ({"kind": "KL"}, "kind"),
        ({"estimator": "k1_loss"}, "estimator"),
        ("kl", ""),
    ],
)
def test_a_supervised_k1_is_found_with_the_key_that_asks_for_it(loss: Any, culprit: str) -> None:
    assert supervised_k1(loss) == culprit


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "k1"},
        {"kind": "k1", "gradient": "policy_gradient"},
        {"kind": "k1", "gradient": "policy_gradiant"},
        {"kind": "k2", "gradient": "supervised"},
        {"kind": "reverse_kl"},
        {"kind": "forward_kl"},
        {},
        None,
        [],
    ],
)
def test_other_losses_are_left_to_their_own_checks(loss: Any) -> None:
    assert supervised_k1(loss) is None
