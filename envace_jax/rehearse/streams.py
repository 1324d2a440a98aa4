"""Streams that go on: a plan's next turn is sampled where its last one ended, not after its whole history again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
        self._begun: dict[Hashable, tuple[Wanted, np.ndarray]] = {}  # what has been drawn, and is not all
        self.forwarded = 0  # tokens that prefill and extension forwarded, those of shared prompts once

    def sample(self, wanted: Sequence[Wanted]) -> list[np.ndarray | None]:
        """What is sampled after each, int32[T]; None for those that need more time, to be asked for again.

        It returns when an eighth of them is complete, so that what follows on these need not wait for the longest.
        Names must differ; of more than there are slots, the last wait for a slot. What was begun and is not asked for
        again (as the same object) is given up.
        """
        if self._state is None:
            self._state = self._engine.start()
        asked = {want.name: want for want in wanted}
        for name in [name for name, (want, _) in self._begun.items() if asked.get(name) is not want]:
            self._leave(name)
        room = self._engine.slots - len(self._begun)
        fresh = [want for want in wanted if want.name not in self._begun][:room]
        self._begin(fresh)
        done = self._draw() if self._begun else {}
        return [done.get(want.name) for want in wanted]

    def _begin(self, wanted: Sequence[Wanted]) -> None:
        """Bring each stream into a slot of its own, up to where sampling begins."""
        grown: dict[int, np.ndarray] = {}
        fresh: dict[int, Wanted] = {}
        for slot, want in zip(self._place(wanted), wanted, strict=True):
            held = self._held.get(slot)
            if held is not None and len(held) <= len(want.tokens) and np.array_equal(held, want.tokens[: len(held)]):
                grown[slot] = want.tokens[len(held) :]
            else:
                fresh[slot] = want
            self._begun[want.name] = want, np.zeros(0, np.int32)
        if fresh:
            prompts = {slot: want.tokens for slot, want in fresh.items()}
            keys = {slot: want.key for slot, want in fresh.items()}
            self._state = self._engine.prefill_groups(self._model, self._state, prompts, keys)
            self.forwarded += sum(map(len, {prompt.tobytes(): prompt for prompt in prompts.values()}.values()))
        if grown:
            self._state = self._engine.extend(self._model, self._state, grown)
            self.forwarded += sum(map(len, grown.values()))

    def _draw(self) -> dict[Hashable, np.ndarray]:
        """Go on with what has begun until an eighth of it is complete, and return that."""
        budgets = {self._slots[name]: w.params.max_new_tokens - len(drawn) for name, (w, drawn) in self._begun.items()}
        params = {self._slots[name]: replace(w.params, max_new_tokens=None) for name, (w, _) in self._begun.items()}
        enough = -(-len(budgets) // 8)
        self._state, out = self._engine.decode(self._model, self._state, budgets, params, enough=enough)
        done = {}
        for name, (want, drawn) in list(self._begun.items()):
            completion = out[self._slots[name]]
            self._begun[name] = want, np.concatenate([drawn, completion.tokens])
            if completion.finish_reason is not None:
                done[name] = self._leave(name)
        return done

    def _leave(self, name: Hashable) -> np.ndarray:
        """What was drawn for a stream, which from here on rests in its slot."""
        want, drawn = self._begun.pop(name)
        self._held[self._slots[name]] = np.concatenate([want.tokens, drawn])
        return drawn

    def _place(self, wanted: Sequence[Wanted]) -> list[int]:
        """A slot for each: its own, else an empty one, else that of the resting stream that was longest unused."""
        names = [want.name for want in wanted]
        free = [slot for slot in range(self._engine.slots) if slot not in self._slots.values()]
        missing = [name for name in names if name not in self._slots]
        resting = [name for name in self._slots if name not in names and name not in self._begun]
        for name in resting[: max(0, len(missing) - len(free))]:
            slot = self._slots.pop(name)
            del self._held[slot]
            free.append(slot)
        for name in names:
            self._slots[name] = self._slots.pop(name) if name in self._slots else free.pop(0)
        return [self._slots[name] for name in names]
