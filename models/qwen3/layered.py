"""Decoding with the layers taken apart, for a CPU.

In a scan over stacked layers XLA's CPU backend copies each layer's matrices, keys and values out of the stacks at every
token, since its matrix products want whole buffers; for small models that is most of the time (measured, four layers,
512 slots: attention took 2.7 times as long). Here every layer has its own arrays, used where they lie, and the loop
over layers is unrolled, so compile time grows with depth.

For the same reason the slots of a row are cut into blocks, each an array of its own: attention to the first so many of
them reads whole blocks, where a slice of one array would be copied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.qwen3.cache import KVCache
from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3, rms_norm

Blocks = tuple[jax.Array, ...]  # of one layer, each [B, s, Hkv, Dh]


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
        return tuple(block.shape[1] for block in self.k[0])

    @classmethod
    def empty(cls, config: Qwen3Config, batch: int, ends: Sequence[int], dtype) -> LayeredCache:
        """For `batch` rows of `ends[-1]` slots, in blocks that end before the slots `ends` (ascending)."""
        sizes = np.diff([0, *ends]).tolist()

        def blocks() -> Blocks:
            return tuple(jnp.zeros((batch, s, config.num_key_value_heads, config.head_dim), dtype) for s in sizes)

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
                jnp.take(block, rows, axis=0, mode="clip")[:, : slots - start]
                for block, start in zip(blocks, starts, strict=False)
                if start < slots
            )

        return jax.tree.map(of, self, is_leaf=_is_blocks)

    def put(self, part: LayeredCache, rows: jax.Array) -> LayeredCache:
        """Write back what `take` took, in place; a row number outside is dropped."""

        def to(new: Blocks, old: Blocks) -> Blocks:
            written = (b.at[rows, : n.shape[1]].set(n, mode="drop") for b, n in zip(old, new, strict=False))
            return (*written, *old[len(new) :])

        return jax.tree.map(to, part, self, is_leaf=_is_blocks)

    def stack(self) -> KVCache:
        """As the forward pass over stacked layers takes it."""
        return KVCache(*(jnp.stack([jnp.concatenate(blocks, axis=1) for blocks in x]) for x in (self.k, self.v)))

    def unstack(self, cache: KVCache) -> LayeredCache:
        """A cache as `stack` made it, taken apart as this one is."""
        ends = np.cumsum(self.sizes)[:-1]
        return LayeredCache(*(tuple(tuple(jnp.split(layer, ends, axis=1)) for layer in x) for x in (cache.k, cache.v)))


def _is_blocks(x: object) -> bool:
    return isinstance(x, tuple) and isinstance(x[0], jax.Array)


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
        """As `Qwen3`: int32[B, 1] twice -> hidden [B, 1, D] and the cache with these tokens added.

        Attention looks at the blocks that hold `window` slots.
        """
        model = self._model
        part = cache if window is None else cache.first(min(window, cache.max_length))
        angles = model.angles(positions)
        x = model.embed_tokens[...][tokens].astype(model.dtype)
        keys, values = list(part.k), list(part.v)
        for i, w in enumerate(self._layers):

            def attend(q, k, v, i=i):
                keys[i], values[i] = _write(keys[i], positions, k), _write(values[i], positions, v)
                return _attention(q, keys[i], values[i], positions)

            x = model._layer(x, w, angles, attend)
        hidden = rms_norm(x, model.norm[...], model.config.rms_norm_eps)
        return hidden, cache.with_first(LayeredCache(tuple(keys), tuple(values)))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """As `Qwen3.logits`."""
        return self._model.logits(hidden)


def _write(blocks: Blocks, positions: jax.Array, new: jax.Array) -> Blocks:
    """`new` [B, 1, Hkv, Dh] at `positions` [B, 1]; a position outside the blocks is dropped."""
    rows, out, start = jnp.arange(len(new)), [], 0
    for block in blocks:
        size = block.shape[1]
        at = jnp.where(positions[:, 0] < start, size, positions[:, 0] - start)  # a negative index would count from the end
        out.append(block.at[rows, at].set(new[:, 0].astype(block.dtype), mode="drop"))
        start += size
    return tuple(out)


def _attention(q: jax.Array, k: Blocks, v: Blocks, positions: jax.Array) -> jax.Array:
    # q [B, 1, H, Dh], positions [B, 1]: each row's token sees its slots up to its own. Decoding is bound by reading the
    # cache: with the query heads laid out block-diagonally over [Hkv * Dh], keys and values are used as they lie,
    # without the transpose to [B, Hkv, S, Dh] that batched products per head cost (measured: half the time at 512).
    batch, _, heads, head_dim = q.shape
    kv_heads = k[0].shape[2]
    k, v = (tuple(x.reshape(batch, -1, kv_heads * head_dim) for x in blocks) for blocks in (k, v))
    eye = jnp.eye(kv_heads, dtype=q.dtype)
    q = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    q = jnp.einsum("bkgd,kj->bjdkg", q, eye).reshape(batch, kv_heads * head_dim, heads)
    scores = [jnp.einsum("bsc,bch->bsh", block, q, preferred_element_type=jnp.float32) for block in k]
    scores = jnp.concatenate(scores, axis=1) / math.sqrt(head_dim)
    seen = jnp.arange(scores.shape[1])[None, :, None] <= positions[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=1).astype(v[0].dtype)
    ends = np.cumsum([block.shape[1] for block in v])[:-1]
    parts = zip(jnp.split(weights, ends, axis=1), v, strict=True)
    out = sum(jnp.einsum("bsh,bsc->bhc", part, block) for part, block in parts)
    out = out.reshape(batch, kv_heads, -1, kv_heads, head_dim)
    return jnp.einsum("bkgjd,kj->bkgd", out, eye.astype(out.dtype)).reshape(batch, 1, heads, head_dim)
