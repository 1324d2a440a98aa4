"""Decoding with the layers taken apart, for a CPU.

In a scan over stacked layers XLA's CPU backend copies each layer's matrices, keys and values out of the stacks at every
token, since its matrix products want whole buffers; for small models that is most of the time (measured, four layers,
512 slots: attention took 2.7 times as long). Here every layer has its own arrays, used where they lie, and the loop
over layers is unrolled, so compile time grows with depth.

For the same reason the slots of a row are cut into blocks, each an array of its own: attention to the first so many of
them reads whole blocks, where a slice would be copied. Keys lie with slots last and values with slots before, as either
product of attention runs along its rows (measured with two query heads to a key: a third of the time).
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3, rms_norm

Blocks = tuple[jax.Array, ...]  # of one layer: keys [B, Hkv, Dh, s] or values [B, Hkv, s, Dh]
Layers = tuple[dict[str, jax.Array], ...]  # of each layer, its parameters by name
_K, _V = 3, 2  # the axis of slots
_SCORES = 2**25  # of one row that are held at a time: 128 MB
# So few to a key head are multiplied and summed in one loop that runs along the keys, faster than a matrix product with
# so few rows (measured with two: three quarters of the time). Of a single one XLA makes something many times slower.
_FEW_QUERIES = 4


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
        return tuple(block.shape[_K] for block in self.k[0])

    @classmethod
    def empty(cls, config: Qwen3Config, batch: int, ends: Sequence[int], dtype) -> LayeredCache:
        """For `batch` rows of `ends[-1]` slots, in blocks that end before the slots `ends` (ascending)."""
        heads, head_dim = config.num_key_value_heads, config.head_dim
        sizes = np.diff([0, *ends]).tolist()

        def layers(*shapes: tuple[int, ...]) -> tuple[Blocks, ...]:
            return tuple(tuple(jnp.zeros(s, dtype) for s in shapes) for _ in range(config.num_hidden_layers))

        return cls(
            layers(*((batch, heads, head_dim, size) for size in sizes)),
            layers(*((batch, heads, size, head_dim) for size in sizes)),
        )

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

        def of(blocks: Blocks, axis: int) -> Blocks:
            return tuple(
                jax.lax.slice_in_dim(block[jnp.clip(rows, 0, len(block) - 1)], 0, min(size, slots - start), axis=axis)
                for block, size, start in zip(blocks, self.sizes, starts, strict=False)
                if start < slots
            )

        return LayeredCache(tuple(of(k, _K) for k in self.k), tuple(of(v, _V) for v in self.v))

    def put(self, part: LayeredCache, rows: jax.Array) -> LayeredCache:
        """Write back what `take` took, in place; a row number outside is dropped."""

        def to(old: Blocks, new: Blocks, axis: int) -> Blocks:
            lead = (slice(None),) * (axis - 1)
            written = (
                b.at[(rows, *lead, slice(n.shape[axis]))].set(n, mode="drop") for b, n in zip(old, new, strict=False)
            )
            return (*written, *old[len(new) :])

        return LayeredCache(
            tuple(to(*pair, _K) for pair in zip(self.k, part.k, strict=True)),
            tuple(to(*pair, _V) for pair in zip(self.v, part.v, strict=True)),
        )


def _is_blocks(x: object) -> bool:
    return isinstance(x, tuple) and isinstance(x[0], jax.Array)


@jax.jit
def _unstacked(stacks: dict[str, jax.Array]) -> Layers:
    count = len(next(iter(stacks.values())))
    return tuple({name: stack[i] for name, stack in stacks.items()} for i in range(count))


class TakenApart:
    """Takes the layers of models apart, once for all calls with the same parameters.

    The copies of the last two models are kept, an actor's and a rehearser's, for as long as their stacks live.
    """

    def __init__(self):
        self._kept: list[tuple[list[weakref.ref], Layers]] = []

    def __call__(self, model: Qwen3) -> Layers:
        stacks = model.layers.arrays()
        self._kept = [kept for kept in self._kept if all(_alive(stack()) for stack in kept[0])]
        for refs, layers in self._kept:
            if all(ref() is stack for ref, stack in zip(refs, stacks.values(), strict=True)):
                return layers
        layers = _unstacked(stacks)
        self._kept = [*self._kept[-1:], ([weakref.ref(stack) for stack in stacks.values()], layers)]
        return layers


def _alive(array: jax.Array | None) -> bool:
    return array is not None and not array.is_deleted()


class Unrolled:
    """`model` over a `LayeredCache`, with `layers` in place of its stacks, from `TakenApart`."""

    def __init__(self, model: Qwen3, layers: Layers):
        self._model, self._layers = model, layers

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
                keys[i] = _write(keys[i], _K, rows, positions, k)
                values[i] = _write(values[i], _V, rows, positions, v)
                if rows is None:
                    return _attend(q, keys[i], values[i], positions)
                part = LayeredCache((keys[i],), (values[i],)).take(rows, window)
                return _attend(q, part.k[0], part.v[0], positions)

            x = model._layer(x, w, angles, attend)
        hidden = rms_norm(x, model.norm[...], model.config.rms_norm_eps)
        return hidden, cache.with_first(LayeredCache(tuple(keys), tuple(values)))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """As `Qwen3.logits`."""
        return self._model.logits(hidden)


def _write(blocks: Blocks, axis: int, rows: jax.Array | None, positions: jax.Array, new: jax.Array) -> Blocks:
    """`new` [R, T, Hkv, Dh] at `positions` [R, T] of the rows; a position outside the blocks is dropped."""
    rows = jnp.arange(len(new)) if rows is None else rows
    lead = (slice(None),) * (axis - 1)
    out, start = [], 0
    for block in blocks:
        size = block.shape[axis]
        at = jnp.where(positions < start, size, positions - start)  # a negative index would count from the end
        out.append(block.at[(rows[:, None], *lead, at)].set(new.astype(block.dtype), mode="drop"))
        start += size
    return tuple(out)


def _attend(q: jax.Array, k: Blocks, v: Blocks, positions: jax.Array) -> jax.Array:
    """As `attention.cached_attention`: q [R, T, H, Dh], positions [R, T], each token sees the slots up to its own."""
    _, length, heads, _ = q.shape
    slots, block = sum(part.shape[_K] for part in k), length
    while block % 2 == 0 and heads * block * slots > _SCORES:
        block //= 2
    if block == length:
        return _attend_piece(q, k, v, positions)
    pieces = tuple(x.reshape(len(x), -1, block, *x.shape[2:]).swapaxes(0, 1) for x in (q, positions))
    out = jax.lax.map(lambda piece: _attend_piece(piece[0], k, v, piece[1]), pieces)
    return out.swapaxes(0, 1).reshape(q.shape)


def _attend_piece(q: jax.Array, k: Blocks, v: Blocks, positions: jax.Array) -> jax.Array:
    rows, length, heads, head_dim = q.shape
    kv_heads = k[0].shape[1]
    # All queries of a key head as rows of one matrix.
    q = q.reshape(rows, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, head_dim)
    own = jnp.tile(positions, heads // kv_heads)[:, None, :, None]
    starts = np.cumsum([0, *(block.shape[_K] for block in k)])
    scores = [_scores(q, block, own >= start) for block, start in zip(k, starts, strict=False)]
    scores = jnp.concatenate(scores, axis=-1) / math.sqrt(head_dim)
    seen = jnp.arange(scores.shape[-1]) <= own
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    # Divided at the end, not as a softmax before the second product: half the time.
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    parts = jnp.split(weights.astype(v[0].dtype), np.cumsum([block.shape[_V] for block in v])[:-1], axis=-1)
    out = sum(jnp.einsum("bkqs,bksd->bkqd", part, block) for part, block in zip(parts, v, strict=True))
    out = out / weights.sum(axis=-1, keepdims=True).astype(out.dtype)
    out = out.reshape(rows, kv_heads, -1, length, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, length, heads, head_dim)


def _scores(q: jax.Array, k: jax.Array, reached: jax.Array) -> jax.Array:
    """q [B, Hkv, Q, Dh], k [B, Hkv, Dh, s] -> [B, Hkv, Q, s]; of queries that have not `reached` the block, anything.

    reached: bool[B, 1, Q, 1].
    """
    if 1 < q.shape[2] <= _FEW_QUERIES:
        # Blocks of one size would share the spread-out queries, and XLA would write them to memory for that (measured:
        # a step took ten times as long).
        q = jnp.where(reached, q, 0)
        return jnp.sum(q[..., None] * k[:, :, None], axis=3, dtype=jnp.float32)
    return jnp.einsum("bkqd,bkds->bkqs", q, k, preferred_element_type=jnp.float32)
