"""A cache holds each token in the slot it was given, and nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.qwen3 import CacheRows, KVCache

ROWS, HEADS, DIM = 4, 2, 3


@functools.partial(jax.jit, donate_argnums=0)
def write(cache, layer, positions, k, v):
    return cache.write(layer, positions, k, v)


def written_one_by_one(cache, layer, positions, values, rows):
    out = np.array(cache)
    for row, tokens, where in zip(rows, values, positions, strict=True):
        for token, position in zip(tokens, where, strict=True):
            if 0 <= position < out.shape[3] and row < out.shape[1]:
                out[layer, row, :, position] = token
    return out


@pytest.mark.parametrize("some", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("slots, tokens", [(5, 1), (40, 1), (5, 5), (40, 3), (40, 20), (37, 32)])
def test_tokens_lie_in_their_slots(slots, tokens, some):
    rng = np.random.default_rng(slots + tokens)
    before = [rng.normal(size=(2, ROWS, HEADS, slots, DIM)).astype(np.float32) for _ in "kv"]
    new = [rng.normal(size=(ROWS, tokens, HEADS, DIM)).astype(np.float32) for _ in "kv"]
    rows = np.array([2, 0, 9, 3]) if some else np.arange(ROWS)  # 9: no row of the cache
    # From the beginning, up to the very end, somewhere; and padding behind a few tokens, or from the first on.
    starts = np.array([0, slots - tokens, slots // 2, max(0, slots - 3)])
    counts = np.array([tokens, tokens, 0, min(3, tokens)])
    positions = np.where(np.arange(tokens) < counts[:, None], starts[:, None] + np.arange(tokens), slots)
    cache = KVCache(*(jnp.asarray(x) for x in before))
    after = write(CacheRows(cache, jnp.asarray(rows)) if some else cache, 1, jnp.asarray(positions), *new)
    after = after.cache if some else after
    for found, old, values in zip((after.k, after.v), before, new, strict=True):
        np.testing.assert_array_equal(found, written_one_by_one(old, 1, positions, values, rows))


def test_what_is_read_is_the_beginning_of_each_row():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, ROWS, HEADS, 8, DIM)), jnp.float32)
    cache = KVCache(x, -x)
    k, v = cache.read(jnp.int32(1), 5)
    np.testing.assert_array_equal(k, x[1, :, :, :5])
    np.testing.assert_array_equal(v, -x[1, :, :, :5])
    k, v = CacheRows(cache, jnp.array([3, 1])).read(jnp.int32(0), 5)
    np.testing.assert_array_equal(k, x[0, jnp.array([3, 1]), :, :5])
    np.testing.assert_array_equal(v, -k)
