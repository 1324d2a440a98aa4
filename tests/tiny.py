"""A Qwen3 small enough to compile in a second, for tests and for the programs beside them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.qwen3 import Qwen3Config


def tiny_config() -> Qwen3Config:
    """Like its larger siblings: grouped heads, an untied head."""
    from models.qwen3 import Qwen3Config

    return Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    )


def save_policy(directory: Path) -> Path:
    """Makes `directory` a Hugging Face directory: the model with random weights, a tokenizer of the embedded world."""
    from flax import nnx

    from envace_jax.chat.build import train_tokenizer
    from envace_jax.tasks.mini.vocabulary import PATTERN, texts
    from models.qwen3 import Qwen3, save_hf

    config = dataclasses.replace(tiny_config(), vocab_size=512, max_position_embeddings=2048)
    save_hf(Qwen3(config, rngs=nnx.Rngs(0)), directory, "float32")
    tokenizer = directory / "tokenizer"
    train_tokenizer(texts(40), 512, tokenizer, pattern=PATTERN)
    for path in tokenizer.iterdir():
        path.rename(directory / path.name)
    tokenizer.rmdir()
    return directory
