"""Reductions that a mask cannot poison, and (sum, weight) pairs that add over micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

Pair = tuple[jax.Array, jax.Array]


def fill_masked(values: jax.Array, mask: jax.Array, fill: float = 0.0) -> jax.Array:
    """Replace what is masked before any arithmetic sees it.

    -inf, NaN or a huge log-ratio at a masked position then reach neither the value nor, through 0 x inf, the gradient:
    `where` passes them a gradient of exactly 0 and the arithmetic behind it only meets `fill`.
    """
    return jnp.where(mask, values, jnp.asarray(fill, values.dtype))


def masked_pair(values: jax.Array, mask: jax.Array) -> Pair:
    """(sum of values, number of values) under the mask; their quotient is the masked mean."""
    return jnp.sum(fill_masked(values, mask)), jnp.sum(mask, dtype=values.dtype)


def safe_divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """numerator / denominator, and the numerator itself where the denominator is 0.

    So an empty batch (0 / 0) gives 0, and a sum that must not be averaged travels as (sum, 0).
    """
    return numerator / jnp.where(denominator == 0, jnp.ones_like(denominator), denominator)


def finish_metrics(metrics: Mapping[str, Pair | jax.Array]) -> dict[str, jax.Array]:
    """Turn summed metrics into numbers: a (sum, weight) pair becomes its quotient, a plain total stays."""
    return {name: safe_divide(*value) if isinstance(value, tuple) else value for name, value in metrics.items()}
