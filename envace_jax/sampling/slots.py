"""The engine's device state and the pure functions that move it; `engine` jits them and decides shapes.

A slot is a row of the KV cache with the length of its stream, the hidden state after the last token, and the key of
its sequence. Every token of a stream is in the cache and the hidden state after the last one is kept, so sampling,
forking and appending all begin from the same invariant. What lies in a row beyond its length is never read: a token
attends to cache slots up to its own position only.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.qwen3 import CacheRows, KVCache, LayeredCache, Qwen3, Qwen3Config, Unrolled, init_cache
from models.qwen3.sharding import batch_axes, cache_spec

from .params import SlotSampling, token_keys
from .sampler import sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Streams on the device, one a row. An empty slot has length 0."""

    cache: KVCache | LayeredCache  # k, v [L, slots, Hkv, S, Dh], or by layers and blocks of S
    hidden: jax.Array  # float32[slots, D], after the last token
    lengths: jax.Array  # int32[slots]
    keys: jax.Array  # uint32[slots, 2]

    @property
    def count(self) -> int:
        return self.cache.batch

    @property
    def max_length(self) -> int:
        return self.cache.max_length


class Sampled(NamedTuple):
    """What one chunk of decoding drew; slot s drew the first `counts[s]` columns of its row."""

    tokens: jax.Array  # int32[slots, C]
    logps: jax.Array  # float32[slots, C]
    log_kept_mass: jax.Array  # float32[slots, C]
    counts: jax.Array  # int32[slots]
    stopped: jax.Array  # bool[slots], drew one of its stop ids


def empty_slots(
    config: Qwen3Config, slots: int, windows: Sequence[int], dtype, mesh: Mesh | None, layered: bool = False
) -> Slots:
    """Empty slots of `windows[-1]` tokens, placed on the mesh when there is one.

    layered: each layer's cache is kept in arrays of its own, one from each window to the next.
    """
    if layered:
        cache = LayeredCache.empty(config, slots, windows, dtype)
    else:
        cache = init_cache(config, slots, windows[-1], dtype, mesh=mesh)
    state = Slots(
        cache=cache,
        hidden=jnp.zeros((slots, config.hidden_size), jnp.float32),
        lengths=jnp.zeros(slots, jnp.int32),
        keys=jnp.zeros((slots, 2), jnp.uint32),
    )
    if mesh is None:
        return state
    place = jax.device_put((state.hidden, state.lengths, state.keys), _placements(mesh, slots))
    return dataclasses.replace(state, hidden=place[0], lengths=place[1], keys=place[2])


def _placements(mesh: Mesh, slots: int) -> tuple[NamedSharding, NamedSharding, NamedSharding]:
    """Of hidden (rows as the cache's), lengths and keys (everywhere: every host reads them)."""
    everywhere = NamedSharding(mesh, P())
    return NamedSharding(mesh, P(batch_axes(mesh, slots), None)), everywhere, everywhere


def pin(state: Slots, mesh: Mesh | None) -> Slots:
    """Keep the layout of the state the same from call to call, or each call would compile anew."""
    if mesh is None:
        return state
    cache = jax.lax.with_sharding_constraint(state.cache, NamedSharding(mesh, cache_spec(mesh, state.count)))
    hidden, lengths, keys = jax.lax.with_sharding_constraint(
        (state.hidden, state.lengths, state.keys), _placements(mesh, state.count)
    )
    return Slots(cache, hidden, lengths, keys)


def everywhere(values, mesh: Mesh | None):
    """Replicate what the host reads, so that every process of a pod can."""
    return values if mesh is None else jax.lax.with_sharding_constraint(values, NamedSharding(mesh, P()))


def append(
    model: Qwen3 | Unrolled,
    state: Slots,
    tokens: jax.Array,
    rows: jax.Array | None,
    starts: jax.Array,
    counts: jax.Array,
    window: int,
) -> Slots:
    """Append right-padded `tokens` int32[R, T] to the streams of `rows`, from position `starts[r]` on.

    rows: int32[R]; a row number outside the slots is padding. None: one row of tokens for every slot, in place (rows
    that are sharded over devices stay there), where `counts` 0 leaves a slot alone.
    starts: 0 restarts a stream. window: static; holds every start + count.
    """
    count, limit = state.count, state.max_length
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.where(steps < counts[:, None], starts[:, None] + steps, limit)
    if rows is None:
        hidden, cache = model(tokens, positions, cache=state.cache, window=window)
        last = _after_last(hidden, counts)
        written = counts > 0
        return dataclasses.replace(
            state,
            cache=cache,
            hidden=jnp.where(written[:, None], last, state.hidden),
            lengths=jnp.where(written, starts + counts, state.lengths),
        )
    if isinstance(model, Unrolled):
        hidden, cache = model(tokens, positions, cache=state.cache, window=window, rows=rows)
    else:
        # The cost is that of R rows, not of all slots.
        hidden, part = model(tokens, positions, cache=CacheRows(state.cache, rows), window=window)
        cache = part.cache
    return dataclasses.replace(
        state,
        cache=cache,
        hidden=state.hidden.at[rows].set(_after_last(hidden, counts), mode="drop"),
        lengths=state.lengths.at[jnp.where(rows < count, rows, count)].set(starts + counts, mode="drop"),
    )


def _after_last(hidden: jax.Array, counts: jax.Array) -> jax.Array:
    """hidden [R, T, D] -> float32[R, D] after each row's last real token."""
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, last, axis=1)[:, 0].astype(jnp.float32)


def _take_rows(cache: KVCache | LayeredCache, rows: jax.Array, window: int):
    """A cache of the rows int32[R], cut to `window` slots each."""
    if isinstance(cache, LayeredCache):
        return cache.take(rows, window)
    return jax.tree.map(lambda x: jnp.take(x[:, :, :, :window], rows, axis=1, mode="clip"), cache)


def _put_rows(cache: KVCache | LayeredCache, part: KVCache | LayeredCache, rows: jax.Array):
    """Write `part`, R rows of a window, into the given rows of `cache`, one row after the other and in place."""
    if isinstance(cache, LayeredCache):
        return cache.put(part, rows)
    window = part.max_length
    return jax.tree.map(lambda whole, new: whole.at[:, rows, :, :window].set(new, mode="drop"), cache, part)


def fork(state: Slots, sources: jax.Array, rows: jax.Array, keys: jax.Array, window: int) -> Slots:
    """Copy the streams of `sources` int32[R] to `rows` int32[R] (outside the slots: padding), with their own keys."""
    return Slots(
        cache=_put_rows(state.cache, _take_rows(state.cache, sources, window), rows),
        hidden=state.hidden.at[rows].set(state.hidden[sources], mode="drop"),
        lengths=state.lengths.at[rows].set(state.lengths[sources], mode="drop"),
        keys=state.keys.at[rows].set(keys, mode="drop"),
    )


def take(state: Slots, rows: jax.Array | None, window: int) -> Slots:
    """The streams of `rows` int32[R] (distinct slots) as a state of their own, R rows of `window` tokens; None: all."""
    if rows is None:
        return state
    return Slots(_take_rows(state.cache, rows, window), state.hidden[rows], state.lengths[rows], state.keys[rows])


def put(state: Slots, part: Slots, rows: jax.Array | None) -> Slots:
    """Write back what `take` took."""
    if rows is None:
        return part
    return dataclasses.replace(
        state,
        cache=_put_rows(state.cache, part.cache, rows),
        hidden=state.hidden.at[rows].set(part.hidden),
        lengths=state.lengths.at[rows].set(part.lengths),
    )


def draw(
    logits: jax.Array, state: Slots, sampling: SlotSampling, hold: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next token of every stream by its logits float32[slots, V], as `sample`."""
    return sample(logits, token_keys(state.keys, state.lengths), sampling, hold, vocab_size)


def push(model: Qwen3 | Unrolled, state: Slots, tokens: jax.Array, rows: jax.Array, window: int) -> Slots:
    """Append one token int32[slots] to the streams where `rows` bool[slots]."""
    positions = jnp.where(rows, state.lengths, state.max_length)
    hidden, cache = model(tokens[:, None], positions[:, None], cache=state.cache, window=window)
    return dataclasses.replace(
        state,
        cache=cache,
        hidden=jnp.where(rows[:, None], hidden[:, 0].astype(jnp.float32), state.hidden),
        lengths=state.lengths + rows,
    )


def decode(
    model: Qwen3 | Unrolled,
    state: Slots,
    sampling: SlotSampling,
    budgets: jax.Array,
    min_tokens: jax.Array,
    steps: jax.Array,
    enough: jax.Array,
    *,
    window: int,
    width: int,
    vocab_size: int,
    pin_state: Callable[[Slots], Slots],
) -> tuple[Slots, Sampled]:
    """Sample in every slot until a stop id or `budgets` int32[slots] tokens (0: not at all).

    The loop ends after `steps` (at most the static `width`) or when `enough` slots have finished, so that the host
    can refill them. min_tokens: int32[slots], tokens before the first allowed stop id.
    """
    out = Sampled(
        tokens=jnp.zeros((state.count, width), jnp.int32),
        logps=jnp.zeros((state.count, width), jnp.float32),
        log_kept_mass=jnp.zeros((state.count, width), jnp.float32),
        counts=jnp.zeros(state.count, jnp.int32),
        stopped=jnp.zeros(state.count, bool),
    )

    def running(out: Sampled) -> jax.Array:
        return ~out.stopped & (out.counts < budgets)

    def proceed(carry) -> jax.Array:
        step, _, out = carry
        live = running(out)
        finished = jnp.sum(~live & (budgets > 0))
        return (step < steps) & jnp.any(live) & (finished < enough)

    def body(carry):
        step, state, out = carry
        rows = running(out)
        tokens, logps, kept = draw(
            model.logits(state.hidden), state, sampling, rows & (out.counts < min_tokens), vocab_size
        )
        stops = jnp.any(tokens[:, None] == sampling.stop_ids, axis=-1)

        def record(buffer: jax.Array, values: jax.Array) -> jax.Array:
            return buffer.at[:, step].set(jnp.where(rows, values, 0).astype(buffer.dtype))

        out = Sampled(
            tokens=record(out.tokens, tokens),
            logps=record(out.logps, logps),
            log_kept_mass=record(out.log_kept_mass, kept),
            counts=out.counts + rows,
            stopped=out.stopped | (rows & stops),
        )
        return step + 1, pin_state(push(model, state, tokens, rows, window)), out

    _, state, out = jax.lax.while_loop(proceed, body, (jnp.int32(0), state, out))
    return state, out
