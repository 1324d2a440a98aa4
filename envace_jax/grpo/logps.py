"""Log-probabilities of given tokens under a model, without ever holding [B, T, vocab]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def token_logps(
    model: Any,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    *,
    temperature: float | jax.Array = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk: int = 256,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """log p(tokens[b, t] | before) at the sampling temperature, normalised over ids below `vocab_size`.

    The same convention as the sampler's: tempered, the model's padded ids masked, not truncated. The head and the
    softmax run over `chunk` positions of every row at a time, under remat, so neither pass holds more logits than
    [B, chunk, V].

    Args:
        model: model(tokens, positions, segments) -> ([B, T, D], _) and model.logits([..., D]) -> float32 [..., V].
        tokens: int32 [B, T].
        positions: int32 [B, T], handed to the model.
        segments: int32 [B, T], 0 = padding, handed to the model.
        temperature: divides the logits; may be traced.
        vocab_size: how many ids the tokenizer has; None: all the model has.
        with_entropy: also return the entropy of the distribution each token was drawn from.
        chunk: positions of a row per step.

    Returns:
        float32 [B, T], or a pair (logps, entropy) of them. Where nothing comes before (position 0, the first token of
        each segment) and in padding: 0.0.

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
        # What attention makes of padding may be NaN, and 0 x NaN would carry it into the head's gradient.
        hidden = jnp.where(follows[..., None], hidden, jnp.zeros((), hidden.dtype))
    targets = jnp.roll(tokens, -1, axis=1)

    def step(carry: None, piece: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
        states, ids = piece
        return carry, _score(model.logits(states), ids, temperature, vocab_size, with_entropy)

    width = tokens.shape[1]
    size = min(chunk, width)
    pieces = tuple(_split(x, size) for x in (hidden, targets))
    _, outputs = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), None, pieces)
    outputs = tuple(_follow(_join(x, width), follows) for x in outputs)
    return outputs if with_entropy else outputs[0]


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
