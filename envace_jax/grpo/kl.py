"""Estimators of KL(policy || reference) on sampled tokens (J. Schulman, "Approximating KL divergence", 2020).

With x = log p - log q at tokens sampled from p. As loss terms they differ more than as values: in expectation over the
policy's own samples the gradient of k2 is that of the true KL; that of k1 is 0; that of k3 is that of KL(q || p).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

K3_LIMIT = 10.0  # the release clamps k3 to +-10
LOG_RATIO_LIMIT = 20.0  # exp(20) is finite in every float format used here


def k1(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    """x: unbiased, of high variance, negative for some tokens; its expected gradient is 0."""
    return logps - ref_logps


def k2(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    """x^2 / 2: biased in value, the gradient of the KL in expectation."""
    return 0.5 * jnp.square(logps - ref_logps)


def k3(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    """exp(-x) + x - 1, clamped to +-10: unbiased, never negative; with its own (biased) gradient."""
    minus_x = jnp.clip(ref_logps - logps, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.clip(jnp.exp(minus_x) - minus_x - 1.0, -K3_LIMIT, K3_LIMIT)


def k3_plus(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    """The value of k3 with the gradient of k2 (straight through)."""
    carrier = k2(logps, ref_logps)
    return jax.lax.stop_gradient(k3(logps, ref_logps) - carrier) + carrier


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}
