"""A supervised k1 is found, and refused, under all of its names.

k1 = log q(x) - log p(x) for a token x sampled from the student q. Differentiating it as a loss
gives ∇ log q(x): the teacher p does not appear, and the mean of that over x ~ q is zero. Only as
the advantage of a policy gradient, (log q(x) - log p(x)) ∇ log q(x), does it lead to the teacher.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

FAMILY = {"k1", "kl"}
DECORATION = {"reverse", "rkl", "token", "sampled", "estimator", "penalty", "loss", "supervised"}
DECORATION |= {"direct", "policy", "gradient", "pg"}
SUPERVISED = {"loss", "supervised", "direct"}
KIND_KEYS = ("kind", "name", "type", "estimator")
FLAGS = {"policy_gradient": True, "use_policy_gradient": True, "pg": True, "supervised": False}
POLICY_GRADIENT = "policy_gradient"

MESSAGE = (
    "a supervised k1 does not distil: the gradient of E_q[log q - log p] taken through log q "
    "alone is that of log q, in which the teacher does not appear (its mean is zero)"
)
REMEDY = "write loss: {kind: k1, gradient: policy_gradient}, or use reverse_kl, k2 or forward_kl"


def supervised_k1(loss: Any) -> str | None:
    """The key below ``loss`` that asks for a supervised k1; '' for ``loss`` itself; or None."""
    if isinstance(loss, str):
        return "" if _is_alias(loss) and loss != "k1" else None
    if not isinstance(loss, dict):
        return None
    key = next((key for key in KIND_KEYS if isinstance(loss.get(key), str)), None)
    if key is None or not _is_alias(loss[key]):
        return None
    refused = next((name for name in ("gradient", *FLAGS) if _asks(loss, name) is False), None)
    if refused is not None:
        return refused
    if _words(loss[key]) & SUPERVISED:
        return key
    if loss[key].lower() == "k1" or any(_asks(loss, name) for name in ("gradient", *FLAGS)):
        return None
    return key


def without_request(loss: Any) -> dict[str, Any]:
    """The same loss as a proper k1, so that its other keys can be checked too."""
    rest = loss if isinstance(loss, dict) else {}
    dropped = {*KIND_KEYS, *FLAGS, "gradient"}
    return {"kind": "k1", **{key: value for key, value in rest.items() if key not in dropped}}


def _asks(loss: dict[Any, Any], name: str) -> bool | None:
    """Whether this key asks for a policy gradient; None if it is missing or misspelled."""
    value = loss.get(name)
    if value is None:
        return None
    if name == "gradient":
        text = str(value)
        if difflib.get_close_matches(text, [POLICY_GRADIENT], cutoff=0.8):
            return True if text == POLICY_GRADIENT else None  # pydantic reports the misspelling
        return False
    off = value is False or str(value).lower() in ("0", "false", "no", "off", "none")
    return off is not FLAGS[name]


def _is_alias(kind: str) -> bool:
    words = _words(kind)
    return bool(words & FAMILY) and words <= FAMILY | DECORATION and words != {"reverse", "kl"}


def _words(kind: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", kind.lower()))
