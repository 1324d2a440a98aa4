"""A tiny random model whose distributions are far from uniform, and one engine for all tests that can share it."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from envace_jax.sampling import Engine
from models.qwen3 import Qwen3, Qwen3Config

VOCAB = 60  # ids the tokenizer has; the model's vocabulary is padded to 64

CONFIG = dataclasses.replace(
    Qwen3Config.preset("qwen3-0.6b"),
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.25,
)


@pytest.fixture(scope="session")
def model() -> Qwen3:
    return Qwen3(CONFIG, rngs=nnx.Rngs(3))


@pytest.fixture(scope="session")
def other_model() -> Qwen3:
    """The same architecture with other parameters, as after a training step."""
    return Qwen3(CONFIG, rngs=nnx.Rngs(4))


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine(CONFIG, slots=4, max_length=160, vocab_size=VOCAB, decode_chunk=8, prefill_chunk=32, min_window=64)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).astype(np.int32)
