"""The packed batch the loss reads, and the numbering of its generations."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

CONTEXT, ACT, REHEARSE = 0, 1, 2  # roles of a token; it is trained iff its role is not CONTEXT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """Trajectories packed into rows; every array is [B, T], and x[b, t] belongs to tokens[b, t].

    A *segment* is what attention sees as one sequence. A *generation* is one turn of one role; several share a segment.
    """

    tokens: jax.Array  # int32, ids
    positions: jax.Array  # int32, position within the segment
    segments: jax.Array  # int32, 0 = padding
    roles: jax.Array  # int, CONTEXT | ACT | REHEARSE: the only mask there is
    advantages: jax.Array  # float32, of the token's generation
    old_logps: jax.Array | None = None  # float32, log p of the policy before the update; None = the current one
    generations: jax.Array | None = None  # int32, which generation of its segment; None = one per row and segment
    behavior_logps: jax.Array | None = None  # float32, log p as the sampler computed it
    ref_logps: jax.Array | None = None  # float32, log p of the reference policy


def generation_slots(batch: TokenBatch) -> jax.Array:
    """Number the generations of each row: int32 [B, T], equal for trained tokens of one (segment, generation).

    Numbers run from 0 without gaps over the trained tokens of a row; masked tokens have T, one past the last possible
    number. Ids may be any integers and the tokens of a generation need not be neighbours, but all are in one row.
    """
    mask = batch.roles != CONTEXT
    generations = jnp.zeros_like(batch.segments) if batch.generations is None else batch.generations
    width = mask.shape[-1]
    place = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), mask.shape)
    keys = ((~mask).astype(jnp.int32), batch.segments, generations)  # masked tokens sort behind all others
    _, segments, generations, place = jax.lax.sort((*keys, place), dimension=-1, num_keys=3)
    changes = (segments[:, 1:] != segments[:, :-1]) | (generations[:, 1:] != generations[:, :-1])
    number = jnp.pad(jnp.cumsum(changes, axis=-1, dtype=jnp.int32), ((0, 0), (1, 0)))
    back = jax.vmap(lambda p, n: jnp.zeros(width, jnp.int32).at[p].set(n))(place, number)
    return jnp.where(mask, back, width)


def generation_sums(values: jax.Array, slots: jax.Array) -> jax.Array:
    """Sum over each generation, by slot: [B, T], where [b, s] sums values[b, t] over slots[b, t] = s."""
    width = values.shape[-1]
    return jax.vmap(lambda v, s: jnp.zeros(width, v.dtype).at[s].add(v, mode="drop"))(values, slots)


def at_slots(per_generation: jax.Array, slots: jax.Array) -> jax.Array:
    """Give every trained token the number of its generation: [B, T] by slot -> [B, T] by token; masked ones get 0."""
    return jax.vmap(lambda g, s: g.at[s].get(mode="fill", fill_value=0))(per_generation, slots)
