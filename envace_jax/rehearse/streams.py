"""Streams that go on: a plan's next turn is sampled where its last one ended, not after its whole history again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Wanted:
    """What is to be sampled: after `tokens` int32[T], by `params` (`envace_jax.sampling.SamplingParams`).

    name: equal for the turns of one stream, which draw with one `key` uint32[2].
    """

    name: Hashable
    tokens: np.ndarray
    params: Any
    key: np.ndarray


class Streams:
    """The slots of an engine, each keeping what it holds until it is needed for another stream.

    A stream goes on in its slot when the slot holds a prefix of it, and begins anew otherwise: what is sampled is the
    same either way, since a draw depends on key and position alone.
    """

    def __init__(self, engine: Any, model: Any):
        self._engine, self._model, self._state = engine, model, None
        self._slots: dict[Hashable, int] = {}  # the longest unused first
        self._held: dict[int, np.ndarray] = {}  # tokens in a slot
        self.forwarded = 0  # tokens that prefill and extension forwarded, those of shared prompts once

    def sample(self, wanted: Sequence[Wanted]) -> list[np.ndarray]:
        """What is sampled after each, int32[T]. Names must differ; more than there are slots are taken in turn."""
        out: list[np.ndarray] = []
        for first in range(0, len(wanted), self._engine.slots):
            out += self._batch(wanted[first : first + self._engine.slots])
        return out

    def _batch(self, wanted: Sequence[Wanted]) -> list[np.ndarray]:
        if self._state is None:
            self._state = self._engine.start()
        slots = self._place(wanted)
        grown: dict[int, np.ndarray] = {}
        fresh: dict[int, Wanted] = {}
        for slot, want in zip(slots, wanted, strict=True):
            held = self._held.get(slot)
            if held is not None and len(held) <= len(want.tokens) and np.array_equal(held, want.tokens[: len(held)]):
                grown[slot] = want.tokens[len(held) :]
            else:
                fresh[slot] = want
        if fresh:
            prompts = {slot: want.tokens for slot, want in fresh.items()}
            keys = {slot: want.key for slot, want in fresh.items()}
            self._state = self._engine.prefill_groups(self._model, self._state, prompts, keys)
            self.forwarded += sum(map(len, {prompt.tobytes(): prompt for prompt in prompts.values()}.values()))
        if grown:
            self._state = self._engine.extend(self._model, self._state, grown)
            self.forwarded += sum(map(len, grown.values()))
        params = {slot: want.params for slot, want in zip(slots, wanted, strict=True)}
        completions = self._decode(params)
        for slot, want in zip(slots, wanted, strict=True):
            self._held[slot] = np.concatenate([want.tokens, completions[slot]])
        return [completions[slot] for slot in slots]

    def _decode(self, params: Mapping[int, Any]) -> dict[int, np.ndarray]:
        """What is sampled in each slot. When half of them have ended, the others go on as a smaller batch."""
        drawn = {slot: np.zeros(0, np.int32) for slot in params}
        left = dict(params)
        while left:
            budgets = {slot: p.max_new_tokens - len(drawn[slot]) for slot, p in left.items()}
            unbounded = {slot: replace(p, max_new_tokens=None) for slot, p in left.items()}
            half = -(-len(left) // 2)
            self._state, out = self._engine.decode(self._model, self._state, budgets, unbounded, enough=half)
            for slot, completion in out.items():
                drawn[slot] = np.concatenate([drawn[slot], completion.tokens])
                if completion.finish_reason is not None:
                    del left[slot]
        return drawn

    def _place(self, wanted: Sequence[Wanted]) -> list[int]:
        """A slot for each: its own, else an empty one, else that of the stream that was longest unused."""
        names = [want.name for want in wanted]
        free = [slot for slot in range(self._engine.slots) if slot not in self._slots.values()]
        missing = [name for name in names if name not in self._slots]
        for name in [name for name in self._slots if name not in names][: max(0, len(missing) - len(free))]:
            slot = self._slots.pop(name)
            del self._held[slot]
            free.append(slot)
        for name in names:
            self._slots[name] = self._slots.pop(name) if name in self._slots else free.pop(0)
        return [self._slots[name] for name in names]
