"""Layers taken apart compute what stacked layers compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.qwen3 import LayeredCache, Qwen3, Qwen3Config, TakenApart, Unrolled, init_cache, layered

CONFIG = dataclasses.replace(
    Qwen3Config.preset("qwen3-0.6b"),
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def whole(layers):
    """Blocks of every layer, keys [B, Hkv, Dh, s] or values [B, Hkv, s, Dh], as one array with slots third."""
    axis = 2 if layers[0][0].shape[3] == CONFIG.head_dim else 3
    return np.stack([np.moveaxis(np.concatenate(layer, axis=axis), axis, 1) for layer in layers])


def test_tokens_one_by_one_give_the_hidden_states_of_stacked_layers():
    model = Qwen3(CONFIG, rngs=nnx.Rngs(1))
    stacked, apart = init_cache(CONFIG, 3, 12, jnp.float32), LayeredCache.empty(CONFIG, 3, [4, 8, 12], jnp.float32)
    unrolled = Unrolled(model, TakenApart()(model))
    tokens = np.random.default_rng(0).integers(0, 40, (6, 3, 1)).astype(np.int32)
    for step, now in enumerate(tokens):
        # The last row stands still: its position lies outside, and nothing of it is stored.
        positions = np.array([[step], [step], [12]], np.int32)
        expected, stacked = model(now, positions, cache=stacked)
        got, apart = unrolled(now, positions, cache=apart, window=8)
        np.testing.assert_allclose(got[:2], expected[:2], atol=1e-5)
    assert not whole(apart.k)[:, 2].any() and whole(apart.k)[:, :2, :6].all() and not whole(apart.v)[:, :, 6:].any()
    assert (apart.batch, apart.max_length, apart.sizes) == (3, 12, (4, 4, 4))
    np.testing.assert_allclose(unrolled.logits(got), model.logits(got))


def test_blocks_of_one_size_do_not_share_queries_spread_out_in_memory():
    rows, kv_heads, queries, head_dim, slots = 4, 2, 2, 64, 64
    q = jnp.ones((rows, 1, kv_heads * queries, head_dim))
    k = tuple(jnp.ones((rows, kv_heads, head_dim, slots)) for _ in range(3))
    v = tuple(jnp.ones((rows, kv_heads, slots, head_dim)) for _ in range(3))
    program = jax.jit(layered._attend).lower(q, k, v, jnp.full((rows, 1), 150)).compile()
    spread_out = q.nbytes * slots
    assert program.memory_analysis().temp_size_in_bytes < spread_out / 2


def test_layers_are_taken_apart_once_for_the_same_parameters():
    model, other = (Qwen3(CONFIG, rngs=nnx.Rngs(seed)) for seed in (1, 2))
    take_apart = TakenApart()
    first, second = take_apart(model), take_apart(other)
    assert take_apart(model) is first and take_apart(other) is second
    np.testing.assert_array_equal(first[1]["q_proj"], model.layers.q_proj[...][1])
    # An update replaces some of the arrays, or all.
    model.layers.q_proj[...] = 2 * model.layers.q_proj[...]
    updated = take_apart(model)
    np.testing.assert_array_equal(updated[1]["q_proj"], 2 * first[1]["q_proj"])
    assert take_apart(model) is updated and take_apart(other) is second


def test_tokens_of_some_rows_see_what_these_rows_hold_and_leave_the_others_alone():
    model = Qwen3(CONFIG, rngs=nnx.Rngs(1))
    unrolled, cache = Unrolled(model, TakenApart()(model)), LayeredCache.empty(CONFIG, 4, [4, 12], jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
    expected, _ = model(tokens)
    # Rows 3 and 1, first two tokens, then seven across the end of a block; the third row is nobody's.
    for piece in (np.arange(2), np.arange(2, 9)):
        now, positions = np.zeros((3, len(piece)), np.int32), np.full((3, len(piece)), 12, np.int32)
        now[:2], positions[:2] = tokens[:, piece], piece
        got, cache = unrolled(now, positions, cache=cache, window=9, rows=jnp.array([3, 1, 4]))
        np.testing.assert_allclose(got[:2], expected[:, piece], atol=1e-5)
    assert not whole(cache.k)[:, [0, 2]].any() and whole(cache.k)[:, [1, 3], :9].all()
    # Rows that are taken hold what they held, and can be put elsewhere.
    moved = cache.put(cache.take(jnp.array([3, 1]), 9), jnp.array([0, 4]))
    np.testing.assert_array_equal(whole(moved.v)[:, 0, :9], whole(cache.v)[:, 3, :9])
    np.testing.assert_array_equal(whole(moved.v)[:, 1:], whole(cache.v)[:, 1:])
