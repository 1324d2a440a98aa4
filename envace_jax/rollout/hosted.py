"""Episodes driven by the host: sample a little, look, append what comes next, sample on.

    refill     free slots; a group's prompt is prefilled once and forked to its members
    extend     forced headers, results of a real world, user turns: all that came due, in few calls
    decode     all live slots together, by a chunk of tokens or until some generations have ended

A sample depends on its episode's key and its position alone, so chunking and slots change nothing about the episodes;
the fused path gives the same ones. Any world will do: the host sees every call before its response is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from envace_jax.errors import EnvaceError
from envace_jax.rollout.episode import Episode
from envace_jax.rollout.judging import Bench
from envace_jax.sampling import Completion, Engine, SamplingParams, Slots
from models.qwen3 import Qwen3

Keys = Callable[[Sequence[int], int], np.ndarray]


def run_hosted(
    engine: Engine,
    model: Qwen3,
    episodes: Sequence[Episode],
    keys: Keys,
    sampling: Sequence[SamplingParams],
    *,
    look_every: int = 64,
    judge_pool: Executor | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run all episodes to their end.

    keys: (episodes' numbers, sequence) -> uint32[N, 2]; segment s of an episode draws with its sequence s.
    sampling: temperature, top_p and top_k of each episode.
    progress: called with how many have finished.
    """
    bench = Bench(judge_pool)
    waiting = deque(i for i, episode in enumerate(episodes) if episode.finish is None)
    live: dict[int, int] = {}  # slot → episode
    parked: set[int] = set()
    parts: dict[int, list[Completion]] = {}
    state = engine.start() if waiting else None
    while waiting or live:
        state = _refill(engine, model, state, episodes, keys, waiting, live)
        state = _append_due(engine, model, state, episodes, keys, {s: i for s, i in live.items() if s not in parked})
        speaking = {slot: episodes[i] for slot, i in live.items() if slot not in parked}
        if speaking:
            budgets = {s: e.allowance() - sum(len(p.tokens) for p in parts.get(s, ())) for s, e in speaking.items()}
            params = {slot: _params(sampling[live[slot]], episode) for slot, episode in speaking.items()}
            enough = max(1, len(speaking) // 8)
            state, sampled = engine.decode(model, state, budgets, params, steps=look_every, enough=enough)
            for slot, completion in sampled.items():
                parts.setdefault(slot, []).append(completion)
                if completion.finish_reason is not None:
                    _take(speaking[slot], parts.pop(slot))
                    if speaking[slot].replied:
                        bench.submit(slot, speaking[slot])
                        parked.add(slot)
        parked.difference_update(bench.collect(block=len(parked) == len(live)))
        over = [slot for slot, i in live.items() if episodes[i].finish is not None]
        for slot in over:
            del live[slot]
        if over and progress is not None:
            progress(len(episodes) - len(waiting) - len(live))


def _refill(
    engine: Engine,
    model: Qwen3,
    state: Slots,
    episodes: Sequence[Episode],
    keys: Keys,
    waiting: deque[int],
    live: dict[int, int],
) -> Slots:
    """Start waiting episodes in the free slots, an eighth of all at once: few calls, and groups stay together."""
    free = [slot for slot in range(engine.slots) if slot not in live]
    if live and len(free) < min(len(waiting), engine.slots // 8):
        return state
    fresh = {slot: waiting.popleft() for slot in free[: len(waiting)]}
    live.update(fresh)
    if not fresh:
        return state
    prompts = {slot: episodes[i].prompt for slot, i in fresh.items()}
    return engine.prefill_groups(model, state, prompts, dict(zip(fresh, keys(list(fresh.values()), 0), strict=True)))


def _append_due(
    engine: Engine, model: Qwen3, state: Slots, episodes: Sequence[Episode], keys: Keys, slots: Mapping[int, int]
) -> Slots:
    """Append what came due since the last look in `slots`, slot → episode; begin the segments that start anew."""
    anew = {slot: episodes[i].stream.segments for slot, i in slots.items() if episodes[i].restarts}
    due = {slot: episodes[i].take_context() for slot, i in slots.items() if len(episodes[i].context)}
    if anew:
        names = {slot: keys([slots[slot]], segments - 1)[0] for slot, segments in anew.items()}
        state = engine.prefill_groups(model, state, {slot: due.pop(slot) for slot in anew}, names)
    return engine.extend(model, state, due) if due else state


def _params(sampling: SamplingParams, episode: Episode) -> SamplingParams:
    """How the episode's next generation is sampled: it stops at the ids that end its role's."""
    return replace(sampling, stop_ids=episode.rules.grammar.stop_ids(episode.role))


def _take(episode: Episode, parts: Sequence[Completion]) -> None:
    tokens, logps, kept = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "logps", "log_kept_mass")
    )
    try:
        episode.take(tokens, logps, kept)
    except (EnvaceError, OSError):  # the world's endpoint failed, not the policy
        episode.abandon("world_failed")
