"""What the specification of the objective is written with: small batches by name and jitted losses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.grpo import TokenBatch, grpo_loss, grpo_loss_sums


@pytest.fixture(scope="session")
def make_batch():
    """make_batch(roles, advantages, **arrays): a batch of lists, one segment per row unless told otherwise."""

    def make(roles, advantages, **arrays) -> TokenBatch:
        roles = jnp.asarray(roles, jnp.int32)
        zeros = jnp.zeros_like(roles)
        integers = {"segments": zeros + 1, "generations": None}
        integers = {
            name: default if arrays.get(name) is None else jnp.asarray(arrays[name], jnp.int32)
            for name, default in integers.items()
        }
        floats = {
            name: None if arrays.get(name) is None else jnp.asarray(arrays[name], float)
            for name in ("old_logps", "behavior_logps", "ref_logps")
        }
        advantages = jnp.broadcast_to(jnp.asarray(advantages, float), roles.shape)
        return TokenBatch(zeros, zeros, roles=roles, advantages=advantages, **integers, **floats)

    return make


@pytest.fixture(scope="session")
def value_and_grad():
    """value_and_grad(logps, batch, config, entropy=None) -> ((loss, metrics), gradient), jitted."""
    return jax.jit(jax.value_and_grad(grpo_loss, has_aux=True), static_argnums=2)


@pytest.fixture(scope="session")
def sums_and_grad():
    """sums_and_grad(logps, batch, config, entropy=None) -> ((numerator, denominator, metrics), gradient), jitted."""

    @functools.partial(jax.jit, static_argnums=2)
    def run(logps, batch, config, entropy=None):
        def numerator(logps):
            top, bottom, metrics = grpo_loss_sums(logps, batch, config, entropy)
            return top, (bottom, metrics)

        (top, (bottom, metrics)), gradient = jax.value_and_grad(numerator, has_aux=True)(logps)
        return (top, bottom, metrics), gradient

    return run


@pytest.fixture(scope="session")
def episodes():
    """Eight generations in six packed episodes: (logps, entropy, batch) of shape [6, 8], with context and padding.

    Row 0 holds two episodes, rows 1 and 2 one of two generations each, rows 3 and 4 one of one each; row 5 is padding.
    """
    rng = np.random.default_rng(7)
    shape = (6, 8)
    segments = np.array(
        [
            [1, 1, 1, 1, 2, 2, 2, 0],
            [1, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 1, 1, 1],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ],
        np.int32,
    )
    roles = np.array(
        [
            [0, 1, 1, 1, 0, 1, 1, 0],
            [0, 1, 1, 0, 2, 2, 2, 2],
            [0, 0, 1, 0, 2, 2, 0, 0],
            [0, 1, 1, 1, 0, 0, 0, 0],
            [0, 2, 2, 2, 2, 2, 2, 2],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ],
        np.int32,
    )
    generations = roles  # an episode here has at most one generation of each role
    advantages = rng.normal(size=(6, 3, 3))[np.arange(6)[:, None], segments, generations]
    logps = -rng.uniform(0.2, 2.0, shape)

    def near(scale):
        return jnp.asarray(logps + scale * rng.normal(size=shape), jnp.float32)

    batch = TokenBatch(
        tokens=jnp.asarray(rng.integers(0, 50, shape), jnp.int32),
        positions=jnp.zeros(shape, jnp.int32),
        segments=jnp.asarray(segments),
        roles=jnp.asarray(roles),
        advantages=jnp.asarray(advantages, jnp.float32),
        old_logps=near(0.25),
        generations=jnp.asarray(generations, jnp.int32),
        behavior_logps=near(0.3),
        ref_logps=near(0.5),
    )
    return jnp.asarray(logps, jnp.float32), jnp.asarray(rng.uniform(0.1, 2.0, shape), jnp.float32), batch


@pytest.fixture(scope="session")
def map_batch():
    """map_batch(function, batch): the function applied to every array of the batch."""

    def apply(function, batch: TokenBatch) -> TokenBatch:
        present = {name: value for name, value in vars(batch).items() if value is not None}
        return dataclasses.replace(batch, **{name: function(value) for name, value in present.items()})

    return apply
