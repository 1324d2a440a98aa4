"""From logits to tokens: one pure function of arrays, every parameter a traced value of its row.

The draw is Gumbel-max in two levels: first a block of the vocabulary by its mass, then a token in the block. That is
exact, never yields an id of mass zero, and needs about V/128 + 128 random numbers a token instead of V. Whatever needs
the vocabulary sorted (top-p, top-k) runs only in steps where some row asks for it.
"""

import jax
import jax.numpy as jnp

from .params import SlotSampling

BLOCK = 128


def sample(
    logits: jax.Array, keys: jax.Array, sampling: SlotSampling, hold: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw one token a row.

    logits: float32[N, V]; ids from `vocab_size` on are never drawn and do not count in any probability.
    keys: typed keys [N], one a token. hold: bool[N], rows whose stop ids may not be drawn yet.
    Returns tokens int32[N], logps float32[N], log_kept_mass float32[N] (see `Completion`).
    """
    width = logits.shape[-1]
    greedy = sampling.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    if vocab_size < width:
        scaled = jnp.where(jnp.arange(width) < vocab_size, scaled, -jnp.inf)

    truncates = ~greedy & ((sampling.top_p < 1) | (sampling.top_k > 0))
    allowed = jax.lax.cond(
        jnp.any(hold), lambda x: _hold_back(x, jnp.where(hold[:, None], sampling.stop_ids, -1)), lambda x: x, scaled
    )
    allowed = jax.lax.cond(
        jnp.any(truncates), lambda x: _truncate(x, sampling.top_p, sampling.top_k, truncates), lambda x: x, allowed
    )

    # One shift for both sums keeps `log_kept_mass` exactly 0 where nothing was cut.
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(scaled - peak), axis=-1)
    blocks = _blocks(allowed, -jnp.inf)
    mass = jnp.sum(jnp.exp(blocks - peak[..., None]), axis=-1)  # [N, V / BLOCK]
    cut = ~greedy & (truncates | hold)
    log_kept_mass = jnp.where(cut, jnp.log(jnp.sum(mass, axis=-1)) - jnp.log(total), 0.0)

    drawn = jax.vmap(_draw)(keys, jnp.log(mass), blocks)
    tokens = jnp.where(greedy, jnp.argmax(allowed, axis=-1), drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - peak[:, 0] - jnp.log(total), log_kept_mass


def _draw(key: jax.Array, log_mass: jax.Array, blocks: jax.Array) -> jax.Array:
    """One id of one row: log_mass float32[V / BLOCK], blocks float32[V / BLOCK, BLOCK]."""
    across, within = jax.random.split(key)
    block = jnp.argmax(log_mass + jax.random.gumbel(across, log_mass.shape))
    return block * BLOCK + jnp.argmax(blocks[block] + jax.random.gumbel(within, (BLOCK,)))


def _blocks(x: jax.Array, fill: float) -> jax.Array:
    """[N, V] -> [N, ceil(V / BLOCK), BLOCK], the last block filled up."""
    rest = -x.shape[-1] % BLOCK
    if rest:
        x = jnp.pad(x, ((0, 0), (0, rest)), constant_values=fill)
    return x.reshape(x.shape[0], -1, BLOCK)


def _hold_back(scaled: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """Give the ids of each row's list (int32[N, M], -1 is none) no mass."""
    ids = jnp.where(stop_ids < 0, scaled.shape[-1], stop_ids)
    return scaled.at[jnp.arange(scaled.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


def _truncate(scaled: jax.Array, top_p: jax.Array, top_k: jax.Array, truncates: jax.Array) -> jax.Array:
    """Give no mass to what top-k, then top-p of what is left, cut. Rows outside `truncates` stay as they are."""
    ranked = -jnp.sort(-scaled, axis=-1)
    width = scaled.shape[-1]
    last = jnp.where(top_k > 0, jnp.minimum(top_k, width), width) - 1
    ranked = jnp.where(ranked >= jnp.take_along_axis(ranked, last[:, None], axis=-1), ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    keep = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    floor = jnp.min(jnp.where(keep & (probs > 0), ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where((scaled >= floor) | ~truncates[:, None], scaled, -jnp.inf)
