"""What a caller asks of the sampler and what it gets back, and the keys that decide every draw.

A draw depends on its sequence's key and its position in the sequence, on nothing else: not on the slot, the
neighbours in the batch, the chunking or the buckets. That is what makes the hosted and the fused rollout, a resumed
run and a run on another number of devices sample the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The implementation is named so that `jax_default_prng_impl`, which a user may set, does not change what is sampled.
PRNG_IMPL = "threefry2x32"


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    temperature: 0 is greedy. top_p: 1 is off. top_k: 0 is off. Where both are on, top-k comes first and top-p counts
    the mass that it left; ties at the boundary are all kept.
    max_new_tokens: None is as many as fit. min_new_tokens: stop ids are not sampled before.
    stop_ids: any of them ends the sequence, and is part of it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or positive, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], found {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, found {self.top_k}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be positive, found {self.max_new_tokens}")
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens must not be negative, found {self.min_new_tokens}")


@dataclass(frozen=True)
class Completion:
    """What was sampled after a prompt, the stop token included.

    logps: tempered (T = 1 where the temperature is 0), normalised over the tokenizer's ids, not truncated.
    log_kept_mass: log of the probability that top-p, top-k and the wait for `min_new_tokens` left to sample from; 0
    where nothing was cut. The token was drawn with log-probability `logps - log_kept_mass`.
    finish_reason: "stop" or "length"; None when `Engine.decode` ran out of steps and the sequence can go on.
    """

    tokens: np.ndarray  # int32[T]
    logps: np.ndarray  # float32[T]
    log_kept_mass: np.ndarray  # float32[T]
    finish_reason: str | None


class SlotSampling(NamedTuple):
    """Sampling parameters as traced values, one row a slot."""

    temperature: jax.Array  # float32[slots]
    top_p: jax.Array  # float32[slots]
    top_k: jax.Array  # int32[slots]
    stop_ids: jax.Array  # int32[slots, M], padded with -1


def slot_sampling(slots: int, params: dict[int, SamplingParams], stop_width: int = 8) -> SlotSampling:
    """Parameters by slot as arrays. The others are greedy, which costs least. M: `stop_width` times a power of two."""
    longest = max((len(p.stop_ids) for p in params.values()), default=0)
    while stop_width < longest:
        stop_width *= 2
    temperature = np.zeros(slots, np.float32)
    top_p = np.ones(slots, np.float32)
    top_k = np.zeros(slots, np.int32)
    stop_ids = np.full((slots, stop_width), -1, np.int32)
    for slot, p in params.items():
        temperature[slot], top_p[slot], top_k[slot] = p.temperature, p.top_p, p.top_k
        stop_ids[slot, : len(p.stop_ids)] = p.stop_ids
    return SlotSampling(temperature, top_p, top_k, stop_ids)


@jax.jit
def _fold(seed: jax.Array, steps: jax.Array, episodes: jax.Array, sequences: jax.Array) -> jax.Array:
    def one(step, episode, sequence):
        key = jax.random.key(seed, impl=PRNG_IMPL)
        for part in (step, episode, sequence):
            key = jax.random.fold_in(key, part)
        return jax.random.key_data(key)

    return jax.vmap(one)(steps, episodes, sequences)


def sequence_keys(seed: int, step: int, episodes: Sequence[int], sequences: Sequence[int] | int = 0) -> np.ndarray:
    """Keys of many sequences of one training step: uint32[N, 2]. See `sequence_key`."""
    count = len(episodes)
    padded = 1 << max(count - 1, 0).bit_length()  # few shapes, few compilations
    columns = np.zeros((3, padded), np.uint32)
    columns[0] = step
    columns[1, :count] = episodes
    columns[2, :count] = sequences
    return np.asarray(_fold(np.uint32(seed % 2**32), *columns))[:count]


def sequence_key(seed: int, step: int, episode: int, sequence: int = 0) -> np.ndarray:
    """The key of one sequence, uint32[2]: `fold_in` of the step, the episode and the sequence within the episode.

    Sequence 0 is the actor's stream. The token at position p of the sequence, the prompt included, is drawn with
    `fold_in(key, p)`.
    """
    return sequence_keys(seed, step, [episode], [sequence])[0]


def default_keys(seeds: Sequence[int]) -> np.ndarray:
    """`sequence_key(seed, 0, i)` of every prompt i: uint32[N, 2]."""
    keys = np.zeros((len(seeds), 2), np.uint32)
    for seed in set(seeds):
        mine = [i for i, s in enumerate(seeds) if s == seed]
        keys[mine] = sequence_keys(seed, 0, mine)
    return keys


def token_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """The keys of the tokens at `positions` int32[N] of the sequences with `keys` uint32[N, 2]: typed keys [N]."""
    typed = jax.random.wrap_key_data(jnp.asarray(keys), impl=PRNG_IMPL)
    return jax.vmap(jax.random.fold_in)(typed, positions)
