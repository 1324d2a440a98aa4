"""Layers taken apart compute what stacked layers compute."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.qwen3 import LayeredCache, Qwen3, Qwen3Config, Unrolled, init_cache

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


def test_tokens_one_by_one_give_the_hidden_states_of_stacked_layers():
    model = Qwen3(CONFIG, rngs=nnx.Rngs(1))
    stacked, layered = init_cache(CONFIG, 3, 12, jnp.float32), LayeredCache.empty(CONFIG, 3, [4, 8, 12], jnp.float32)
    unrolled = Unrolled(model)
    tokens = np.random.default_rng(0).integers(0, 40, (5, 3, 1)).astype(np.int32)
    for step, now in enumerate(tokens):
        # The last row stands still: its position lies outside, and nothing of it is stored.
        positions = np.array([[step], [step], [12]], np.int32)
        expected, stacked = model(now, positions, cache=stacked)
        got, layered = unrolled(now, positions, cache=layered, window=8)
        np.testing.assert_allclose(got[:2], expected[:2], atol=1e-5)
    again = layered.stack()
    np.testing.assert_allclose(again.k, stacked.k, atol=1e-5)
    np.testing.assert_allclose(again.v, stacked.v, atol=1e-5)
    assert not np.asarray(again.k[:, 2]).any() and np.asarray(again.k[:, :2, :5]).all()
    np.testing.assert_array_equal(layered.unstack(again).v[1][0], layered.v[1][0])
    assert (layered.batch, layered.max_length) == (3, 12)
    np.testing.assert_allclose(unrolled.logits(got), model.logits(got))
