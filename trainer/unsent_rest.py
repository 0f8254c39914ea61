"""The mass outside of a support whose teacher did not send it: servers do not.

    P = Σ_i p_i over the k tokens, in float64,     log(1 - P), but at least log ``LEAST``

Each p_i comes from a float32 logarithm, rounded once by the server and once on its way: P is known
to about 1e-6, and what is left of 1 no better. At ``LEAST`` the logarithm is off by 0.1 nats at
most, at a mass of 1e-3 by 0.001. A mass below ``LEAST`` counts as ``LEAST``: its true logarithm is
lower by log(LEAST / mass), so that reverse KL is too small by at most the student's own mass
outside of the support times that. It is never the difference of two roundings.
"""

from __future__ import annotations

import numpy as np

from async_opd.core.samples import Float32

LEAST = 1e-5
"""Least mass of the rest."""


def unsent_rest(logprobs: Float32) -> Float32:
    """log(1 - P) [R] of a support's log-probabilities [R, k], nats."""
    mass = np.exp(logprobs, dtype=np.float64).sum(axis=1)
    return np.asarray(np.log1p(-np.minimum(mass, 1 - LEAST)), dtype=np.float32)
