"""The key/value cache of a batch of sequences.

One array for keys and one for values, all layers stacked, heads before slots: attention reads the slots of one head
after the other. The forward pass carries it through the scan over layers and rewrites a small block of slots in each
row, so that XLA updates it in place. Lengths are not kept here: whoever owns the cache says by `positions` where each
token goes, and a position outside the cache is not written at all.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.qwen3.config import Qwen3Config
from models.qwen3.sharding import LOGICAL_TO_MESH, batch_axes, cache_spec

_TILE = 16  # slots that a TPU stores together, in 16 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of every layer."""

    k: jax.Array  # [L, B, Hkv, S, Dh]
    v: jax.Array  # [L, B, Hkv, S, Dh]

    @property
    def batch(self) -> int:
        return self.k.shape[1]

    @property
    def max_length(self) -> int:
        return self.k.shape[3]

    def write(
        self, layer: jax.Array, positions: jax.Array, k: jax.Array, v: jax.Array, mesh: Mesh | None = None
    ) -> "KVCache":
        """Stores k, v [B, T, Hkv, Dh] of one layer at `positions` [B, T]. `mesh`: where the cache lies, if on several
        devices.

        A row's positions ascend one by one from its first; a token that does not follow so, and one outside [0, S), is
        dropped.
        """
        if mesh is None or mesh.size == 1:
            return _store(self, layer, positions, k, v)
        # Each device has whole rows and heads, and nothing to ask of the others.
        rows, heads = batch_axes(mesh, self.batch), LOGICAL_TO_MESH["kv_heads"]
        cache, new = P(None, rows, heads), P(rows, None, heads)
        store = jax.shard_map(_store, mesh=mesh, in_specs=(cache, P(), P(rows), new, new), out_specs=cache)
        return store(self, layer, positions, k, v)

    def read(self, layer: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer in the first `length` (static) slots, each [B, Hkv, length, Dh]."""
        return _read(self.k, layer, length), _read(self.v, layer, length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheRows:
    """Some rows of a cache in the forward pass's eyes, read and written where they lie: nothing is copied but one
    layer's keys and values while it attends to them."""

    cache: KVCache
    rows: jax.Array  # int32[R], distinct; one outside the cache stands for none: nothing of it is stored

    @property
    def max_length(self) -> int:
        return self.cache.max_length

    def write(
        self, layer: jax.Array, positions: jax.Array, k: jax.Array, v: jax.Array, mesh: Mesh | None = None
    ) -> "CacheRows":
        """As `KVCache.write`, of [R, T] tokens; all rows are on every device, which may have some of the heads."""
        if mesh is None or mesh.size == 1:
            return CacheRows(_store(self.cache, layer, positions, k, v, self.rows), self.rows)
        heads = LOGICAL_TO_MESH["kv_heads"]
        cache, new = P(None, None, heads), P(None, None, heads)
        specs = (cache, P(), P(), new, new, P())
        store = jax.shard_map(_store, mesh=mesh, in_specs=specs, out_specs=cache)
        return CacheRows(store(self.cache, layer, positions, k, v, self.rows), self.rows)

    def read(self, layer: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """As `KVCache.read`, each [R, Hkv, length, Dh]."""
        return _read_rows(self.cache.k, layer, self.rows, length), _read_rows(self.cache.v, layer, self.rows, length)


def init_cache(config: Qwen3Config, batch: int, max_length: int, dtype, mesh: Mesh | None = None) -> KVCache:
    """An empty cache for `batch` rows of `max_length` slots; placed on `mesh` (rows and heads sharded) when given."""
    shape = (config.num_hidden_layers, batch, config.num_key_value_heads, max_length, config.head_dim)
    place = None if mesh is None else NamedSharding(mesh, cache_spec(mesh, batch))
    return KVCache(k=jnp.zeros(shape, dtype, device=place), v=jnp.zeros(shape, dtype, device=place))


def _store(
    cache: KVCache, layer: jax.Array, positions: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array | None = None
) -> KVCache:
    """`cache` with k, v [R, T, Hkv, Dh] at `positions` [R, T] of `rows` [R]; None: one for each row it has.

    Row by row, a block of slots that holds all its tokens is rewritten as it lies. A scatter of tokens would have XLA
    lay a token's heads side by side on a TPU, and a gather of blocks lay slots before rows: either keeps a second
    cache in that order while it decodes.
    """
    _, batch, heads, slots, head_dim = cache.k.shape
    count, length = positions.shape
    block = min(slots, max(length, _TILE))
    first = positions[:, 0] if length > 1 else positions[:, 0] // _TILE * _TILE
    start = jnp.clip(first, 0, slots - block)
    # Token t goes to the slot t + shift of the block: with several, none but near the end of the cache.
    shift = jnp.clip(positions[:, 0] - start, 0, block)
    known = jnp.pad(positions, ((0, 0), (block, block)), constant_values=-1)
    new = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (block, block), (0, 0))) for x in (k, v)]
    offsets = jnp.arange(block)

    def put(r: jax.Array, cache: KVCache) -> KVCache:
        row = r if rows is None else rows[r]
        begin = block - shift[r]
        here = jax.lax.dynamic_slice(known, (r, begin), (1, block))[0] == start[r] + offsets
        here = (here & (row < batch))[:, None]

        def one(stored: jax.Array, padded: jax.Array) -> jax.Array:
            at, size = (layer, row, 0, start[r], 0), (1, 1, heads, block, head_dim)
            tokens = jax.lax.dynamic_slice(padded, (r, 0, begin, 0), (1, heads, block, head_dim))
            kept = jax.lax.dynamic_slice(stored, at, size)
            return jax.lax.dynamic_update_slice(stored, jnp.where(here, tokens[None].astype(stored.dtype), kept), at)

        return KVCache(one(cache.k, new[0]), one(cache.v, new[1]))

    return jax.lax.fori_loop(0, count, put, cache)


def _read(cache: jax.Array, layer: jax.Array, length: int) -> jax.Array:
    _, batch, heads, _, head_dim = cache.shape
    return jax.lax.dynamic_slice(cache, (layer, 0, 0, 0, 0), (1, batch, heads, length, head_dim))[0]


def _read_rows(cache: jax.Array, layer: jax.Array, rows: jax.Array, length: int) -> jax.Array:
    # Row by row, again: for a gather of rows XLA would copy the whole cache into another order on a TPU.
    _, _, heads, _, head_dim = cache.shape
    size = (1, 1, heads, length, head_dim)
    return jax.lax.map(lambda row: jax.lax.dynamic_slice(cache, (layer, row, 0, 0, 0), size)[0, 0], rows)
