"""Decoding with the layers taken apart, for a CPU.

In a scan over stacked layers XLA's CPU backend copies each layer's matrices, keys and values out of the stacks at every
token, since its matrix products want whole buffers; for small models that is most of the time (measured, four layers,
512 slots: attention took 2.7 times as long). Here every layer has its own arrays, used where they lie, and the loop
over layers is unrolled, so compile time grows with depth.

For the same reason the slots of a row are cut into blocks, each an array of its own with heads before slots, as matrix
products want them: attention to the first so many of them reads whole blocks, where a slice would be copied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.qwen3.attention import cached_attention
from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3, rms_norm

Blocks = tuple[jax.Array, ...]  # of one layer, each [B, Hkv, s, Dh]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayeredCache:
    """Keys (after RoPE) and values: of every layer, blocks of slots that follow one another."""

    k: tuple[Blocks, ...]  # L of them
    v: tuple[Blocks, ...]

    @property
    def batch(self) -> int:
        return self.k[0][0].shape[0]

    @property
    def max_length(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots of each block."""
        return tuple(block.shape[2] for block in self.k[0])

    @classmethod
    def empty(cls, config: Qwen3Config, batch: int, ends: Sequence[int], dtype) -> LayeredCache:
        """For `batch` rows of `ends[-1]` slots, in blocks that end before the slots `ends` (ascending)."""
        sizes = np.diff([0, *ends]).tolist()

        def blocks() -> Blocks:
            return tuple(jnp.zeros((batch, config.num_key_value_heads, s, config.head_dim), dtype) for s in sizes)

        return cls(*(tuple(blocks() for _ in range(config.num_hidden_layers)) for _ in "kv"))

    def first(self, slots: int) -> LayeredCache:
        """The blocks that hold the first `slots` of every row; no copy."""
        count = int(np.searchsorted(np.cumsum(self.sizes), slots)) + 1
        return jax.tree.map(lambda blocks: blocks[:count], self, is_leaf=_is_blocks)

    def with_first(self, part: LayeredCache) -> LayeredCache:
        """This cache with `part` for its first blocks."""
        return jax.tree.map(lambda new, old: (*new, *old[len(new) :]), part, self, is_leaf=_is_blocks)

    def take(self, rows: jax.Array, slots: int) -> LayeredCache:
        """The first `slots` of the rows int32[R], as a cache of their own; a row number outside takes any row."""
        starts = np.cumsum([0, *self.sizes])

        def of(blocks: Blocks) -> Blocks:
            return tuple(
                jnp.take(block, rows, axis=0, mode="clip")[:, :, : slots - start]
                for block, start in zip(blocks, starts, strict=False)
                if start < slots
            )

        return jax.tree.map(of, self, is_leaf=_is_blocks)

    def put(self, part: LayeredCache, rows: jax.Array) -> LayeredCache:
        """Write back what `take` took, in place; a row number outside is dropped."""

        def to(new: Blocks, old: Blocks) -> Blocks:
            written = (b.at[rows, :, : n.shape[2]].set(n, mode="drop") for b, n in zip(old, new, strict=False))
            return (*written, *old[len(new) :])

        return jax.tree.map(to, part, self, is_leaf=_is_blocks)


def _is_blocks(x: object) -> bool:
    return isinstance(x, tuple) and isinstance(x[0], jax.Array)


class Unrolled:
    """`model` over a `LayeredCache`.

    Made inside a jitted function before a loop, it takes the layers' matrices apart once, not at every token.
    """

    def __init__(self, model: Qwen3):
        self._model = model
        arrays = model.layers.arrays()
        count = model.config.num_hidden_layers
        self._layers = [{name: stacked[i] for name, stacked in arrays.items()} for i in range(count)]

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        cache: LayeredCache,
        window: int | None = None,
        rows: jax.Array | None = None,
    ) -> tuple[jax.Array, LayeredCache]:
        """As `Qwen3`: int32[R, T] twice -> hidden [R, T, D] and the cache with these tokens added.

        Attention looks at the blocks that hold `window` slots. rows: int32[R], which rows of the cache these are (one
        outside is nobody's); None: all. Nothing but the new tokens is written.
        """
        model = self._model
        window = cache.max_length if window is None else min(window, cache.max_length)
        part = cache.first(window)
        angles = model.angles(positions)
        x = model.embed_tokens[...][tokens].astype(model.dtype)
        keys, values = list(part.k), list(part.v)
        for i, w in enumerate(self._layers):

            def attend(q, k, v, i=i):
                keys[i], values[i] = _write(keys[i], rows, positions, k), _write(values[i], rows, positions, v)
                if rows is None and tokens.shape[1] == 1:
                    return _attend_one(q, keys[i], values[i], positions)
                k, v = (_read(x, rows, window).swapaxes(1, 2) for x in (keys[i], values[i]))
                return cached_attention(q, k, v, positions)

            x = model._layer(x, w, angles, attend)
        hidden = rms_norm(x, model.norm[...], model.config.rms_norm_eps)
        return hidden, cache.with_first(LayeredCache(tuple(keys), tuple(values)))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """As `Qwen3.logits`."""
        return self._model.logits(hidden)


def _write(blocks: Blocks, rows: jax.Array | None, positions: jax.Array, new: jax.Array) -> Blocks:
    """`new` [R, T, Hkv, Dh] at `positions` [R, T] of the rows; a position outside the blocks is dropped."""
    rows = jnp.arange(len(new)) if rows is None else rows
    out, start = [], 0
    for block in blocks:
        size = block.shape[2]
        at = jnp.where(positions < start, size, positions - start)  # a negative index would count from the end
        out.append(block.at[rows[:, None], :, at].set(new.astype(block.dtype), mode="drop"))
        start += size
    return tuple(out)


def _read(blocks: Blocks, rows: jax.Array | None, slots: int) -> jax.Array:
    """The first `slots` of the rows: [R, Hkv, slots, Dh]."""
    parts = blocks if rows is None else (jnp.take(block, rows, axis=0, mode="clip") for block in blocks)
    return jnp.concatenate(list(parts), axis=2)[:, :, :slots]


def _attend_one(q: jax.Array, k: Blocks, v: Blocks, positions: jax.Array) -> jax.Array:
    # q [B, 1, H, Dh], positions [B, 1]: each row's token sees its slots up to its own.
    batch, _, heads, head_dim = q.shape
    q = q.reshape(batch, k[0].shape[1], -1, head_dim)
    scores = [jnp.einsum("bkgd,bksd->bkgs", q, block, preferred_element_type=jnp.float32) for block in k]
    scores = jnp.concatenate(scores, axis=-1) / math.sqrt(head_dim)
    seen = jnp.arange(scores.shape[-1]) <= positions[:, :, None, None]
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    # Divided at the end, not as a softmax before the second product: half the time.
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    parts = jnp.split(weights.astype(v[0].dtype), np.cumsum([block.shape[2] for block in v])[:-1], axis=-1)
    out = sum(jnp.einsum("bkgs,bksd->bkgd", part, block) for part, block in zip(parts, v, strict=True))
    out = out / weights.sum(axis=-1, keepdims=True).astype(out.dtype)
    return out.reshape(batch, 1, heads, head_dim)
