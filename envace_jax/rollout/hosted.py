"""Episodes driven by the host: sample a little, look, append what comes next, sample on.

    refill     free slots; a group's prompt is prefilled once and forked to its members
    extend     forced headers, results of a real world, user turns: all that came due, in few calls
    decode     all live slots together, by a chunk of tokens or until some generations have ended
    rehearse   calls whose prompts are their own, all that are due together (`world.form: simulator`)

A sample depends on its episode's key and its position alone, so chunking and slots change nothing about the episodes;
the fused path gives the same ones. Any world will do: the host sees every call before its response is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from envace_jax.errors import EnvaceError
from envace_jax.rollout.endpoint import Endpoint
from envace_jax.rollout.episode import Answer, Episode
from envace_jax.rollout.judging import Bench
from envace_jax.rollout.trajectory import ACT, REHEARSE, TokenStream
from envace_jax.sampling import Completion, Engine, SamplingParams, Slots
from models.qwen3 import Qwen3

# Segments of the actor's stream count from 0; rehearsals under prompts of their own draw with sequences from here on.
FIRST_REHEARSAL = 1 << 16

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
    rehearser: Qwen3 | None = None,
    endpoint: Endpoint | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run all episodes to their end.

    keys: (episodes' numbers, sequence) -> uint32[N, 2]; segment s of an episode draws with its sequence s.
    sampling: temperature, top_p and top_k of each episode.
    rehearser: the parameters that rehearse, where they are not `model`.
    endpoint: who rehearses, where it is not the policy.
    progress: called with how many have finished.
    """
    speakers = Speakers(engine, model, rehearser if episodes and episodes[0].rules.simulator is None else None)
    bench = Bench(judge_pool, endpoint, None if endpoint is None else ThreadPoolExecutor(min(engine.slots, 64)))
    rehearsing: set[int] = set()  # slots whose calls the policy rehearses
    waiting = deque(i for i, episode in enumerate(episodes) if episode.finish is None)
    live: dict[int, int] = {}  # slot → episode
    parked: set[int] = set()
    parts: dict[int, list[Completion]] = {}
    while waiting or live:
        _refill(speakers, engine.slots, episodes, keys, waiting, live)
        idle = parked | rehearsing
        _append_due(speakers, episodes, keys, {slot: i for slot, i in live.items() if slot not in idle})
        speaking = {slot: episodes[i] for slot, i in live.items() if slot not in idle}
        if speaking:
            budgets = {s: e.allowance() - sum(len(p.tokens) for p in parts.get(s, ())) for s, e in speaking.items()}
            params = {slot: _params(sampling[live[slot]], episode) for slot, episode in speaking.items()}
            enough = max(1, len(speaking) // 8)
            roles = {slot: episode.role for slot, episode in speaking.items()}
            for slot, completion in speakers.decode(roles, budgets, params, look_every, enough).items():
                parts.setdefault(slot, []).append(completion)
                if completion.finish_reason is not None:
                    _take(speaking[slot], parts.pop(slot))
                    if speaking[slot].replied or (speaking[slot].asked and endpoint is not None):
                        bench.submit(slot, speaking[slot])
                        parked.add(slot)
                    elif speaking[slot].asked:
                        rehearsing.add(slot)
        # One batch for many calls: it waits until half of the episodes are at it, or nobody has anything else to say.
        if rehearsing and 2 * len(rehearsing) >= len(live) - len(parked):
            asking = {live[slot]: episodes[live[slot]] for slot in sorted(rehearsing)}
            _rehearse(engine, model if rehearser is None else rehearser, asking, keys, sampling)
            rehearsing.clear()
        parked.difference_update(bench.collect(block=len(parked) == len(live)))
        over = [slot for slot, i in live.items() if episodes[i].finish is not None]
        for slot in over:
            del live[slot]
        if over and progress is not None:
            progress(len(episodes) - len(waiting) - len(live))


class Speakers:
    """The streams of all slots, under the parameters of either role: one cache, or two where each role has its own."""

    def __init__(self, engine: Engine, model: Qwen3, rehearser: Qwen3 | None = None):
        self._engine = engine
        self._models = {ACT: model} if rehearser is None else {ACT: model, REHEARSE: rehearser}
        self._states: dict[int, Slots] = {role: engine.start() for role in self._models}
        # Tokens that a stream has and the cache of a role has not seen yet, by slot.
        self._unseen: dict[int, dict[int, np.ndarray]] = {role: {} for role in self._models}

    def prefill(self, prompts: Mapping[int, np.ndarray], keys: Mapping[int, np.ndarray]) -> None:
        for role, model in self._models.items():
            self._states[role] = self._engine.prefill_groups(model, self._states[role], prompts, keys)
            self._unseen[role] = {s: tokens for s, tokens in self._unseen[role].items() if s not in prompts}

    def extend(self, tokens: Mapping[int, np.ndarray]) -> None:
        for role in self._models:
            for slot, new in tokens.items():
                before = self._unseen[role].get(slot)
                self._unseen[role][slot] = new if before is None else np.concatenate([before, new])

    def decode(
        self,
        roles: Mapping[int, int],
        budgets: Mapping[int, int],
        params: Mapping[int, SamplingParams],
        steps: int,
        enough: int,
    ) -> dict[int, Completion]:
        """Sample in the slots of `roles`, slot → role, each under the parameters of its role."""
        out: dict[int, Completion] = {}
        for role, model in self._models.items():
            slots = [s for s, r in roles.items() if len(self._models) == 1 or r == role]
            due = {s: self._unseen[role].pop(s) for s in slots if s in self._unseen[role]}
            if due:
                self._states[role] = self._engine.extend(model, self._states[role], due)
            if not slots:
                continue
            mine = {s: budgets[s] for s in slots}, {s: params[s] for s in slots}
            enough = max(1, min(enough, len(slots)))
            state, sampled = self._engine.decode(model, self._states[role], *mine, steps=steps, enough=enough)
            self._states[role] = state
            out |= sampled
            for other in self._models.keys() - {role}:
                for slot, completion in sampled.items():
                    before = self._unseen[other].get(slot, completion.tokens[:0])
                    self._unseen[other][slot] = np.concatenate([before, completion.tokens])
        return out


def _refill(
    speakers: Speakers, slots: int, episodes: Sequence[Episode], keys: Keys, waiting: deque[int], live: dict[int, int]
) -> None:
    """Start waiting episodes in the free slots, an eighth of all at once: few calls, and groups stay together."""
    free = [slot for slot in range(slots) if slot not in live]
    if live and len(free) < min(len(waiting), slots // 8):
        return
    fresh = {slot: waiting.popleft() for slot in free[: len(waiting)]}
    live.update(fresh)
    if fresh:
        prompts = {slot: episodes[i].prompt for slot, i in fresh.items()}
        speakers.prefill(prompts, dict(zip(fresh, keys(list(fresh.values()), 0), strict=True)))


def _append_due(speakers: Speakers, episodes: Sequence[Episode], keys: Keys, slots: Mapping[int, int]) -> None:
    """Append what came due since the last look in `slots`, slot → episode; begin the segments that start anew."""
    anew = {slot: episodes[i].stream.segments for slot, i in slots.items() if episodes[i].restarts}
    due = {slot: episodes[i].take_context() for slot, i in slots.items() if len(episodes[i].context)}
    if anew:
        names = {slot: keys([slots[slot]], segments - 1)[0] for slot, segments in anew.items()}
        speakers.prefill({slot: due.pop(slot) for slot in anew}, names)
    if due:
        speakers.extend(due)


def _rehearse(
    engine: Engine, model: Qwen3, asking: Mapping[int, Episode], keys: Keys, sampling: Sequence[SamplingParams]
) -> None:
    """The policy answers all calls that wait, of the episodes `asking`, number → episode; one key for each call."""
    prompts: list[np.ndarray] = []
    params: list[SamplingParams] = []
    names: list[np.ndarray] = []
    counts: dict[int, int] = {}
    tasks: list[str] = []
    for i, episode in asking.items():
        rules = episode.rules
        own = [rules.simulator.render(rules.chat, prompt) for prompt in episode.asked]
        longest = max(map(len, own))
        if longest >= rules.grammar.budgets.max_length:
            episode.cannot_rehearse()
            continue
        counts[i] = len(own)
        for number, prompt in enumerate(own, start=episode.rehearsals):
            room = rules.grammar.budgets.max_length - len(prompt)
            budget = min(rules.grammar.budgets.response_tokens, room)
            params.append(replace(sampling[i], stop_ids=rules.chat.stop_ids, max_new_tokens=budget))
            names.append(keys([i], FIRST_REHEARSAL + number)[0])
        prompts += own
        tasks += [episode.task.id] * len(own)
    shared = _common_starts(prompts, tasks)
    completions = iter(zip(prompts, engine.generate(model, prompts, params, keys=names, shared=shared), strict=True))
    for i, count in counts.items():
        answers = []
        for _ in range(count):
            prompt, completion = next(completions)
            stream = TokenStream()
            stream.context(prompt)
            stream.generation(REHEARSE, completion.tokens, completion.logps, completion.log_kept_mass)
            ended = completion.finish_reason == "stop"
            answers.append(Answer(asking[i].rules.chat.decode(completion.tokens[: -1 if ended else None]), stream))
        asking[i].rehearsed(answers)


def _common_starts(prompts: Sequence[np.ndarray], tasks: Sequence[str]) -> list[int]:
    """How many tokens the prompts of each one's task begin with alike; all of one that is alone.

    Instructions, tools and references of a task come first in its prompts, so they are read once a batch.
    """
    common: dict[str, np.ndarray] = {}
    for prompt, task in zip(prompts, tasks, strict=True):
        start = common.setdefault(task, prompt)
        size = min(len(start), len(prompt))
        differs = np.flatnonzero(start[:size] != prompt[:size])
        common[task] = start[: differs[0] if len(differs) else size]
    return [len(common[task]) for task in tasks]


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
