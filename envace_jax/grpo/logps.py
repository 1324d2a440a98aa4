"""Log-probabilities of given tokens under a model, without ever holding [B, T, vocab]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from envace_jax.grpo.batch import CONTEXT, TokenBatch

CHUNK = 256  # positions of a row at a time
_PARTS = 4  # of a row, at least, where not all of it is needed
Score = Callable[..., tuple[jax.Array, ...]]  # (states [B, C, D], ids [B, C], *constants) -> [B, C] each


def token_logps(
    model: Any,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    *,
    needed: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk: int = CHUNK,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """log p(tokens[b, t] | before) at the sampling temperature, normalised over ids below `vocab_size`.

    The same convention as the sampler's: tempered, the model's padded ids masked, not truncated. The head and the
    softmax run over `chunk` positions of every row at a time, and once more in the backward pass, so neither pass holds
    more logits than [B, chunk, V]. Positions whose values nobody needs are put behind the others, and left out.

    Args:
        model: model(tokens, positions, segments) -> ([B, T, D], _), model.head() -> [V, D] or the like, and
            model.logits([..., D], head) -> float32 [..., V]. A model on a mesh also says where B rows lie,
            model.row_sharding(B): then the head is gathered once, and its gradient added up once, not for every piece.
        tokens: int32 [B, T].
        positions: int32 [B, T], handed to the model.
        segments: int32 [B, T], 0 = padding, handed to the model.
        needed: bool [B, T], the tokens whose values are needed; None: all. As many rounds are made as the row needs
            that has most of them.
        temperature: divides the logits; may be traced.
        vocab_size: how many ids the tokenizer has; None: all the model has.
        with_entropy: also return the entropy of the distribution each token was drawn from.
        chunk: positions of a row per step.

    Returns:
        float32 [B, T], or a pair (logps, entropy) of them. Where nothing comes before (position 0, the first token of
        each segment), in padding, and where not needed: 0.0.

    Raises:
        ValueError: `temperature` or `chunk` not positive.
    """
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"token_logps: temperature = {temperature}: expected a number > 0")
    if chunk < 1:
        raise ValueError(f"token_logps: chunk = {chunk}: expected a number of positions >= 1")
    hidden, _ = model(tokens, positions, segments)
    # Position t predicts token t + 1: shifted on the target's side, the last position has nothing to predict.
    follows = jnp.ones(tokens.shape, bool).at[:, -1].set(False)
    if segments is not None:
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        follows = follows.at[:, :-1].set(same)
    if needed is not None:
        follows &= jnp.roll(needed, -1, axis=1)
    # What attention makes of padding may be NaN, and 0 x NaN would carry it into the head's gradient.
    hidden = jnp.where(follows[..., None], hidden, jnp.zeros((), hidden.dtype))
    targets = jnp.roll(tokens, -1, axis=1)

    width = tokens.shape[1]
    size = min(chunk, width if needed is None else -(-width // _PARTS))
    count = -(-(width if needed is None else jnp.max(jnp.sum(follows, axis=1))) // size)

    def score(states: jax.Array, ids: jax.Array, head: jax.Array) -> tuple[jax.Array, ...]:
        return _score(model.logits(states, head), ids, temperature, vocab_size, with_entropy)

    def score_rows(
        hidden: jax.Array, targets: jax.Array, follows: jax.Array, count: int | jax.Array, head: jax.Array
    ) -> tuple[jax.Array, ...]:
        if needed is not None:
            order = jnp.argsort(~follows, axis=1)  # stable
            back = jnp.argsort(order, axis=1)
            hidden, targets = _permuted(hidden, order, back), jnp.take_along_axis(targets, order, axis=1)
        states, ids = _split(hidden, size), _split(targets, size)
        converted, constants = jax.closure_convert(score, states[0], ids[0], head)
        outputs = [_join(x, width) for x in _in_turn(converted, count, states, ids, (head, *constants))]
        if needed is not None:
            outputs = [jnp.take_along_axis(x, back, axis=1) for x in outputs]
        return tuple(_follow(x, follows) for x in outputs)

    place = model.row_sharding(len(tokens)) if hasattr(model, "row_sharding") else None
    if place is not None:
        # Each shard's rows by themselves, and only the vocabulary left to the partitioner: it would add up the
        # gradient of the head over the shards after every piece.
        score_rows = jax.shard_map(
            score_rows,
            mesh=place.mesh,
            in_specs=(place.spec, place.spec, place.spec, P(), P()),
            out_specs=place.spec,
            axis_names=set(place.spec[0]),
            check_vma=False,
        )
    outputs = score_rows(hidden, targets, follows, count, model.head())
    return outputs if with_entropy else outputs[0]


def trained_logps(model: Any, batch: TokenBatch, **settings: Any) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`token_logps` of the trained tokens of a batch, those of either role; `settings` are its other arguments."""
    needed = batch.roles != CONTEXT
    return token_logps(model, batch.tokens, batch.positions, batch.segments, needed=needed, **settings)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_turn(
    score: Score, count: int | jax.Array, states: jax.Array, ids: jax.Array, constants: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """score(states[i], ids[i], *constants) of the first `count` of N pieces, one after the other: [N, B, C] each, zeros
    behind. What a piece is computed from is kept for the backward pass, and nothing else."""
    shapes = jax.eval_shape(score, states[0], ids[0], *constants)
    nothing = tuple(jnp.zeros((len(states), *x.shape), x.dtype) for x in shapes)

    def fill(i: jax.Array, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(out.at[i].set(x) for out, x in zip(outputs, score(states[i], ids[i], *constants), strict=True))

    return jax.lax.fori_loop(0, count, fill, nothing)


def _in_turn_forward(score: Score, *arguments: Any) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    values = jax.tree.map(lambda x: x.value, arguments)  # beside each says whether it has a derivative
    return _in_turn(score, *values), values


def _in_turn_backward(score: Score, arguments: tuple[Any, ...], gradients: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    count, states, ids, constants = arguments
    # An output that the loss does not look at, the entropy that is merely shown, costs no pass.
    used = [i for i, g in enumerate(gradients) if not isinstance(g, SymbolicZero)]

    def add(i: jax.Array, so_far: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        of_states, of_constants = so_far
        _, pull = jax.vjp(lambda x, *more: [score(x, ids[i], *more)[u] for u in used], states[i], *constants)
        of_piece, *more = pull([gradients[u][i] for u in used])
        return of_states.at[i].set(of_piece), [x + y for x, y in zip(of_constants, more, strict=True)]

    # Over many pieces a sum in 16 bits would stop growing.
    wide = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in constants]
    of_states, of_constants = jax.lax.fori_loop(0, count, add, (jnp.zeros_like(states), wide))
    of_constants = tuple(x.astype(c.dtype) for x, c in zip(of_constants, constants, strict=True))
    return None, of_states, None, of_constants


_in_turn.defvjp(_in_turn_forward, _in_turn_backward, symbolic_zeros=True)


@jax.custom_vjp
def _permuted(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """x [B, T, D] with the positions of each row in `order` [B, T], whose inverse is `back`; gathers both ways."""
    return jnp.take_along_axis(x, order[..., None], axis=1)


_permuted.defvjp(
    lambda x, order, back: (_permuted(x, order, back), back),
    lambda back, gradient: (jnp.take_along_axis(gradient, back[..., None], axis=1), None, None),
)


def _score(
    logits: jax.Array, ids: jax.Array, temperature: float | jax.Array, vocab_size: int | None, with_entropy: bool
) -> tuple[jax.Array, ...]:
    """Log-probability of each id, and the entropy where asked: logits [B, C, V], ids [B, C] -> [B, C]."""
    logits = logits.astype(jnp.float32) / temperature
    allowed = jnp.arange(logits.shape[-1]) < (logits.shape[-1] if vocab_size is None else vocab_size)
    logits = jnp.where(allowed, logits, -jnp.inf)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    if not with_entropy:
        return (chosen - normaliser,)
    # H = log Z - E[logit]; ids that are not allowed have probability 0, and 0 x -inf must not be formed.
    weighted = jnp.exp(logits - normaliser[..., None]) * jnp.where(allowed, logits, 0.0)
    return chosen - normaliser, normaliser - jnp.sum(weighted, axis=-1)


def _split(x: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [ceil(T / size), B, size, ...], zeros behind."""
    pad = -x.shape[1] % size
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) if pad else x
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _join(x: jax.Array, width: int) -> jax.Array:
    """[N, B, size] -> [B, T], the inverse of `_split`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :width]


def _follow(predicted: jax.Array, follows: jax.Array) -> jax.Array:
    """Move what position t predicts to the token it predicts; 0 where a token follows nothing."""
    return jnp.roll(jnp.where(follows, predicted, 0.0), 1, axis=1)
