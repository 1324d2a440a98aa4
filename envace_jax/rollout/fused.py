"""Episodes that act and rehearse inside one jitted loop; the host looks in every so many tokens.

    begin        waiting episodes in free slots
    run          all running slots, forced headers included, until enough of them need the host
    catch up     each `Episode` reads the generations that were completed, and may turn out to have been cut earlier
    next turn    user messages for the slots that replied, once they are judged

The device knows the grammar alone. Where an episode is cut because a call or a response cannot be read, what the device
sampled after it is dropped. So the episodes are those of the hosted path, token by token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from weakref import WeakKeyDictionary

import numpy as np

from envace_jax.rollout.episode import Episode
from envace_jax.rollout.hosted import Keys
from envace_jax.rollout.judging import Bench
from envace_jax.sampling import Engine, FusedLoop, Grammar, Recorded, Report, SamplingParams, Status
from models.qwen3 import Qwen3

# A loop holds compiled programs; one serves all steps of a run.
_LOOPS: WeakKeyDictionary[Engine, dict[tuple, FusedLoop]] = WeakKeyDictionary()


def run_fused(
    engine: Engine,
    model: Qwen3,
    episodes: Sequence[Episode],
    keys: Keys,
    sampling: Sequence[SamplingParams],
    *,
    look_every: int = 64,
    judge_pool: Executor | None = None,
    rehearser: Qwen3 | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run all episodes to their end.

    keys: (episodes' numbers, sequence) -> uint32[N, 2]. sampling: of each episode, the same for all.
    rehearser: the parameters that rehearse, where they are not `model`.
    progress: called with how many have finished.

    Raises ValueError for an episode that needs the host between two tokens (`fits_fused` says which do not), and where
    not all are sampled alike.
    """
    if len(set(sampling)) > 1:
        raise ValueError("the fused loop samples all episodes alike: run episodes of several temperatures hosted")
    if not all(map(fits_fused, episodes)):
        raise ValueError("the fused loop rehearses every response, in one stream: run the other episodes hosted")
    waiting = deque(i for i, episode in enumerate(episodes) if episode.finish is None)
    if not waiting:
        return
    loop = _loop(engine, episodes[0].rules.grammar, sampling[0], look_every)
    bench = Bench(judge_pool)
    live: dict[int, int] = {}  # slot → episode
    unread: dict[int, list[Recorded]] = {}
    parked: set[int] = set()
    state = loop.start(split=rehearser is not None)
    while waiting or live:
        free = [slot for slot in range(engine.slots) if slot not in live]
        fresh = {slot: waiting.popleft() for slot in free[: len(waiting)]}
        if fresh:
            prompts = {slot: episodes[i].prompt for slot, i in fresh.items()}
            names = dict(zip(fresh, keys(list(fresh.values()), 0), strict=True))
            state = loop.begin(model, state, prompts, names, rehearser=rehearser)
            live.update(fresh)
            unread.update({slot: [] for slot in fresh})
        if running := len(live) - len(parked):
            state, report = loop.run(model, state, enough=max(1, running // 4), rehearser=rehearser)
            for slot in live.keys() - parked:
                episode = episodes[live[slot]]
                unread[slot] = _catch_up(episode, [*unread[slot], loop.harvest(slot)], report, slot)
                if episode.replied:
                    bench.submit(slot, episode)
                    parked.add(slot)
        parked.difference_update(judged := bench.collect(block=len(parked) == len(live)))
        turns = {slot: episodes[live[slot]].take_context() for slot in judged if episodes[live[slot]].finish is None}
        if turns:
            state = loop.next_turn(model, state, turns, rehearser=rehearser)
            for slot in turns:
                loop.harvest(slot)  # the message, which the episode has already
        if over := [slot for slot, i in live.items() if episodes[i].finish is not None]:
            state = loop.end(state, over)
            for slot in over:
                del live[slot], unread[slot]
            if progress is not None:
                progress(len(episodes) - len(waiting) - len(live))


def fits_fused(episode: Episode) -> bool:
    """Whether an episode can run inside the loop: nobody but the policy answers, and the history is never rewritten."""
    one_stream = episode.rules.history_reasoning == "keep" or len(episode.task.user_turns) == 1
    return episode.responder is None and episode.rules.simulator is None and one_stream


def _loop(engine: Engine, grammar: Grammar, sampling: SamplingParams, look_every: int) -> FusedLoop:
    loops = _LOOPS.setdefault(engine, {})
    name = (grammar, sampling, look_every)
    if name not in loops:
        loops[name] = FusedLoop(engine, grammar, sampling, look_every=look_every)
    return loops[name]


def _catch_up(episode: Episode, parts: Sequence[Recorded], report: Report, slot: int) -> list[Recorded]:
    """Let the episode take the generations that are complete; what remains of the record is returned."""
    record = Recorded(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    record = Recorded(*(column[record.generations > 0] for column in record))
    running = report.status[slot] == Status.RUNNING
    current = int(report.machine.generation[slot])
    read = 0
    for number in np.unique(record.generations).tolist():
        if episode.finish is not None or (running and number >= current):
            break
        at = np.flatnonzero(record.generations == number)
        read = int(at[-1]) + 1
        episode.take(record.tokens[at], record.logps[at], record.log_kept_mass[at])
        episode.take_context()  # the device has forced it
    return [Recorded(*(column[read:] for column in record))]
