"""An initialisation that gives the first layer heads that look a fixed distance back.

Copying out of the right record takes two steps: a head that carries the tokens before a place to that place, and a
later one that matches them (induction heads: Olsson et al. 2022, arXiv 2209.11895). The second is of no use before the
first is there, so a small model spends its training on a plateau. On records read out in random order, 80 % of the
values were right after 125 steps with such heads; without, 51 % after 175 steps of larger batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from envace_jax.config import ConfigError
from models.qwen3 import Qwen3

_SHARE = 0.06  # of the direction that all embeddings have in common, in each coordinate
_SHARPNESS = 2.5  # of the heads: their query and key norms
_FREQUENCIES = 6  # the fastest rotary frequencies, which tell neighbouring positions apart


def with_local_heads(model: Qwen3, offsets: Sequence[int]) -> Qwen3:
    """`model`, whose first layer's heads attend to the token `offsets[h]` places before.

    All embeddings get a direction u in common. Queries and keys of the head read u alone: the query is a vector a, the
    key is a turned back by the offset, so that their product, sum_j a_j^2 cos((distance - offset) theta_j), is greatest
    there. Values and everything else stay random.

    Raises ConfigError when there is not one offset for each head, or heads share keys.
    """
    config = model.config
    heads, size = config.num_attention_heads, config.head_dim
    if len(offsets) != heads or config.num_key_value_heads != heads:
        raise ConfigError(
            f"local_heads has {len(offsets)} offsets for {heads} heads with {config.num_key_value_heads} keys: "
            "give one offset for each head, and as many key-value heads as heads"
        )
    common = np.random.default_rng(0).choice([-_SHARE, _SHARE], config.hidden_size).astype(np.float32)
    reader = common / np.dot(common, common)
    frequencies, _ = config.rope_frequencies()
    fast = (np.arange(size // 2) < _FREQUENCIES).astype(np.float32)
    query = np.concatenate([fast, np.zeros_like(fast)])
    layers = model.layers
    q, k = np.array(layers.q_proj[...]), np.array(layers.k_proj[...])
    for head, offset in enumerate(offsets):
        rows = slice(head * size, (head + 1) * size)
        key = np.concatenate([fast * np.cos(offset * frequencies), fast * np.sin(offset * frequencies)])
        q[0, rows], k[0, rows] = np.outer(query, reader), np.outer(key, reader)
    model.embed_tokens[...] = model.embed_tokens[...] + common
    layers.q_proj[...], layers.k_proj[...] = jnp.asarray(q), jnp.asarray(k)
    for norm in (layers.q_norm, layers.k_norm):
        norm[...] = norm[...].at[0].set(_SHARPNESS)
    return model
