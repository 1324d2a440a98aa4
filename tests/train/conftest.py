"""A tiny policy and packed batches of random episodes for it."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envace_jax.grpo import TokenBatch
from models.qwen3 import Qwen3
from tests.tiny import save_policy


@pytest.fixture
def tiny_model(tiny_qwen3_config):
    """A fresh model with the same parameters each time."""
    return Qwen3(tiny_qwen3_config, rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.fixture(scope="session")
def make_rows():
    """make_rows(rows, seed=0): a TokenBatch [rows, 24]; each row two episodes with both roles, and padding behind."""

    def make(rows: int, seed: int = 0) -> TokenBatch:
        rng = np.random.default_rng(seed)
        width = 24
        shape = (rows, width)
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        roles, generations = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        advantages = np.zeros(shape, np.float32)
        for row in range(rows):
            start = 0
            for segment in (1, 2):
                length = int(rng.integers(6, 12))
                at = np.s_[row, start : start + length]
                segments[at], positions[at] = segment, np.arange(length)
                cut = int(rng.integers(3, length))
                roles[at] = [0, 0, *[1] * (cut - 2), *[2] * (length - cut)]
                generations[at] = roles[at]
                advantages[at] = np.where(roles[at] == 1, rng.normal(), rng.normal())
                start += length
        return TokenBatch(
            tokens=rng.integers(0, 90, shape).astype(np.int32),  # ids below the tests' vocab_size
            positions=positions,
            segments=segments,
            roles=roles,
            advantages=advantages,
            generations=generations,
            behavior_logps=np.where(roles > 0, rng.normal(-4.0, 0.3, shape), 0.0).astype(np.float32),
        )

    return make


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A Hugging Face directory: the tiny model with random weights and a tokenizer of the embedded world."""
    return save_policy(tmp_path_factory.mktemp("made") / "policy")
