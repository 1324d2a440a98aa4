"""A policy that a test can foretell: a Qwen3 whose next token depends on the last one, and a little on all others.

Each line of a script is one token, and the script says with which probability a line follows another. Attention adds
small noise, so that log-probabilities betray a token that was scored in another context than it was sampled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from envace_jax.chat import ChatTokenizer
from envace_jax.chat.build import train_tokenizer
from models.qwen3 import Qwen3, Qwen3Config, save_hf

NEVER = -20.0  # log-probability of what the script does not name
NOISE = 1e-3  # of the attention's output, against states of length 1


def save_chain(
    directory: Path, follows: Mapping[str, Mapping[str, float]], prompts: Iterable[str], *, heads: int = 1
) -> Path:
    """Writes the policy as a Hugging Face directory and returns it.

    follows: line -> {line: probability}; lines are text without breaks, breaks alone, or names of control ids.
    prompts: texts that prompts are made of, so that they take few tokens.
    heads: of attention, as many as a mesh has to share between.
    """
    lines = {line for before, after in follows.items() for line in (before, *after)}
    train_tokenizer([*lines] * 1000 + [*prompts], 6000, directory / "tokenizer", pattern=r"[^\n]+|\n+")
    chat = ChatTokenizer.from_pretrained(directory / "tokenizer")

    def id_of(line: str) -> int:
        if hasattr(chat.control, line):
            return getattr(chat.control, line)
        (token,) = chat.encode_text(line)
        return int(token)

    states = {id_of(line): number for number, line in enumerate(follows, start=1)}
    size = len(states) + 1  # state 0: any other token
    config = Qwen3Config(
        vocab_size=-(-chat.vocab_size // 8) * 8,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model = Qwen3(config, rngs=nnx.Rngs(0))
    embedding = np.zeros((config.vocab_size, size), np.float32)
    embedding[:, 0] = 1.0
    head = np.full((config.vocab_size, size), NEVER, np.float32)
    head[chat.control.im_end, 0] = 0.0
    for line, after in follows.items():
        state = states[id_of(line)]
        embedding[id_of(line)] = np.eye(size, dtype=np.float32)[state]
        for next_line, probability in after.items():
            head[id_of(next_line), state] = np.log(probability)
    model.embed_tokens[...] = embedding
    model.lm_head[...] = head / np.sqrt(size)  # the final norm makes a state sqrt(size) long
    unit = 1 / config.initializer_range
    model.layers.v_proj[...] = model.layers.v_proj[...] * unit
    model.layers.o_proj[...] = model.layers.o_proj[...] * unit * NOISE
    model.layers.down_proj[...] = jnp.zeros_like(model.layers.down_proj[...])
    save_hf(model, directory / "hf", "float32")
    for path in (directory / "tokenizer").iterdir():
        path.rename(directory / "hf" / path.name)
    return directory / "hf"
