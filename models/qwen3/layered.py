"""Decoding with the layers taken apart, for a CPU.

In a scan over stacked layers XLA's CPU backend copies each layer's matrices, keys and values out of the stacks at every
token, since its matrix products want whole buffers; for small models that is most of the time (measured, four layers,
512 slots: attention took 2.7 times as long). Here every layer has its own arrays, used where they lie, and the loop
over layers is unrolled, so compile time grows with depth.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from models.qwen3.attention import cached_attention
from models.qwen3.cache import KVCache
from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3, rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayeredCache:
    """Keys (after RoPE) and values, one array a layer."""

    k: tuple[jax.Array, ...]  # L of [B, S, Hkv, Dh]
    v: tuple[jax.Array, ...]  # L of [B, S, Hkv, Dh]

    @property
    def batch(self) -> int:
        return self.k[0].shape[0]

    @property
    def max_length(self) -> int:
        return self.k[0].shape[1]

    @classmethod
    def empty(cls, config: Qwen3Config, batch: int, max_length: int, dtype) -> LayeredCache:
        """For `batch` rows of `max_length` slots."""
        shape = (batch, max_length, config.num_key_value_heads, config.head_dim)
        return cls(*(tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers)) for _ in "kv"))

    @classmethod
    def unstack(cls, cache: KVCache) -> LayeredCache:
        """A cache as the forward pass over stacked layers has it, taken apart."""
        return cls(tuple(cache.k), tuple(cache.v))

    def stack(self) -> KVCache:
        """As the forward pass over stacked layers takes it."""
        return KVCache(jnp.stack(self.k), jnp.stack(self.v))


class Unrolled:
    """`model` for one token a row over a `LayeredCache`.

    Made inside a jitted function before a loop, it takes the layers' matrices apart once, not at every token.
    """

    def __init__(self, model: Qwen3):
        self._model = model
        arrays = model.layers.arrays()
        count = model.config.num_hidden_layers
        self._layers = [{name: stacked[i] for name, stacked in arrays.items()} for i in range(count)]

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, *, cache: LayeredCache, window: int | None = None
    ) -> tuple[jax.Array, LayeredCache]:
        """As `Qwen3`: int32[B, 1] twice -> hidden [B, 1, D] and the cache with these tokens added."""
        model, rows = self._model, jnp.arange(tokens.shape[0])
        slots = cache.max_length if window is None else min(window, cache.max_length)
        angles = model.angles(positions)
        x = model.embed_tokens[...][tokens].astype(model.dtype)
        keys, values = list(cache.k), list(cache.v)
        for i, w in enumerate(self._layers):

            def attend(q, k, v, i=i):
                for stored, new in ((keys, k), (values, v)):
                    stored[i] = stored[i].at[rows, positions[:, 0]].set(new[:, 0].astype(stored[i].dtype), mode="drop")
                return cached_attention(q, keys[i][:, :slots], values[i][:, :slots], positions)

            x = model._layer(x, w, angles, attend)
        hidden = rms_norm(x, model.norm[...], model.config.rms_norm_eps)
        return hidden, LayeredCache(tuple(keys), tuple(values))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """As `Qwen3.logits`."""
        return self._model.logits(hidden)
