"""Estimates the mass outside of a support whose teacher did not send it, as servers do not.

    P = Σ_i p_i over the k tokens, in float64,     log(1 - P), but at least log ``MIN_REST_MASS``

Each p_i comes from a float32 logarithm, rounded once by the server and once in transport: P, and so
1 - P, has an error of about 1e-6. At ``MIN_REST_MASS`` the logarithm is off by at most 0.1 nats, at
a mass of 1e-3 by 0.001. A mass below ``MIN_REST_MASS`` counts as ``MIN_REST_MASS``: its true
logarithm is lower by log(MIN_REST_MASS / mass), so that reverse KL is too small by at most the
student's own mass outside of the support times that. The estimate is never rounding noise alone.
"""

from __future__ import annotations

import numpy as np

from async_opd.core.arrays import Float32

MIN_REST_MASS = 1e-5
"""Least estimate of the mass outside of a support."""


def estimate_log_rest(logprobs: Float32) -> Float32:
    """log(1 - P) [R] of a support's log-probabilities [R, k], nats."""
    mass = np.exp(logprobs, dtype=np.float64).sum(axis=1)
    return np.asarray(np.log1p(-np.minimum(mass, 1 - MIN_REST_MASS)), dtype=np.float32)
