"""The key/value cache of a batch of sequences.

One array for keys and one for values, all layers stacked. The forward pass carries it through the scan over layers
and writes single slots by index, so that XLA updates it in place. Lengths are not kept here: whoever owns the cache
says by `positions` where each token goes, and a position outside the cache is not written at all.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from models.qwen3 import sharding
from models.qwen3.config import Qwen3Config


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of every layer."""

    k: jax.Array  # [L, B, S, Hkv, Dh]
    v: jax.Array  # [L, B, S, Hkv, Dh]

    @property
    def batch(self) -> int:
        return self.k.shape[1]

    @property
    def max_length(self) -> int:
        return self.k.shape[2]

    def write(self, layer: jax.Array, positions: jax.Array, k: jax.Array, v: jax.Array) -> "KVCache":
        """Stores k, v [B, T, Hkv, Dh] of one layer at `positions` [B, T]; positions outside [0, S) are dropped."""
        return KVCache(_write(self.k, layer, positions, k), _write(self.v, layer, positions, v))

    def read(self, layer: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer in the first `length` (static) slots, each [B, length, Hkv, Dh]."""
        return _read(self.k, layer, length), _read(self.v, layer, length)


def init_cache(config: Qwen3Config, batch: int, max_length: int, dtype, mesh: Mesh | None = None) -> KVCache:
    """An empty cache for `batch` rows of `max_length` slots; placed on `mesh` (rows and heads sharded) when given."""
    shape = (config.num_hidden_layers, batch, max_length, config.num_key_value_heads, config.head_dim)
    place = None if mesh is None else NamedSharding(mesh, sharding.cache_spec(mesh, batch))
    return KVCache(k=jnp.zeros(shape, dtype, device=place), v=jnp.zeros(shape, dtype, device=place))


def _write(cache: jax.Array, layer: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    # Written as a scatter batched over rows (not .at[layer, rows, positions]): rows are sharded, and only in this
    # form does the partitioner know that a row's tokens stay in that row.
    batch, length = positions.shape
    indices = jnp.stack([jnp.broadcast_to(layer, (batch, length)), positions], axis=-1).astype(jnp.int32)
    return jax.lax.scatter(
        cache,
        indices,
        values.astype(cache.dtype),
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(2, 3),
            inserted_window_dims=(0, 2),
            scatter_dims_to_operand_dims=(0, 2),
            operand_batching_dims=(1,),
            scatter_indices_batching_dims=(0,),
        ),
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )


def _read(cache: jax.Array, layer: jax.Array, length: int) -> jax.Array:
    _, batch, _, heads, head_dim = cache.shape
    zero = jnp.zeros((), jnp.int32)
    start = (jnp.asarray(layer, jnp.int32), zero, zero, zero, zero)
    return jax.lax.dynamic_slice(cache, start, (1, batch, length, heads, head_dim))[0]
