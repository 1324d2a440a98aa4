"""What the supervised warm start imitates, step by step: a batch depends on (data settings, step) alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from envace_jax.chat import ChatTokenizer
from envace_jax.config import SFTDataConfig
from envace_jax.rehearse.demos import remembering
from envace_jax.rollout.recorded import encode_conversation
from envace_jax.rollout.trajectory import REHEARSE, Trajectory
from envace_jax.tasks import TaskError, read_tasks
from envace_jax.tasks.mini import TOOLS
from envace_jax.tasks.mini.demos import demonstrations, drills, readings

Batches = Callable[[int], list[Trajectory]]
BARE_DRILL_CALLS, DRILL_CALLS = (6, 9), (3, 5)  # as many as fill a row: without tools in the prompt, and with


def batches(config: SFTDataConfig, chat: ChatTokenizer) -> Batches:
    """A function from the step to its trajectories: `conversations` of them."""
    return _mini(config, chat) if config.kind == "mini" else _recorded(config, chat)


def _mini(config: SFTDataConfig, chat: ChatTokenizer) -> Batches:
    """Readings for `reading_steps`, drills until `drill_steps`, then demonstrations with `drill_fraction` of drills.

    Of the demonstrations `memory_fraction` have a rehearsal memory in context.
    """

    def encode(messages: list[dict], tools: tuple[dict, ...] | None) -> Trajectory:
        return encode_conversation(chat, messages, tools, thinking=config.thinking)

    def practice_only(drill: Trajectory) -> Trajectory:
        # The calls of a drill are random: nothing for the actor to learn.
        trained = drill.roles == REHEARSE
        return replace(
            drill, roles=np.where(trained, drill.roles, 0), generations=np.where(trained, drill.generations, 0)
        )

    def batch(step: int) -> list[Trajectory]:
        count, start = config.conversations, step * config.conversations
        if step < config.reading_steps:  # half as long as the others
            return [encode(m, None) for m in itertools.islice(readings(config.seed, start=2 * start), 2 * count)]
        practice = count if step < config.drill_steps else round(count * config.drill_fraction)
        bare = practice if step < config.drill_steps else practice // 2
        noted = round((count - practice) * config.memory_fraction)
        shown = itertools.islice(demonstrations(config.seed, start=start), count - practice - noted)
        remembered = itertools.islice(remembering(config.seed, start=start), noted)
        dense = itertools.islice(drills(config.seed, start=start, calls=BARE_DRILL_CALLS), bare)
        full = itertools.islice(drills(config.seed, start=start, calls=DRILL_CALLS), practice - bare)
        return [
            *(encode(m, TOOLS) for m in itertools.chain(shown, remembered)),
            *(practice_only(encode(m, None)) for m in dense),
            *(practice_only(encode(m, TOOLS)) for m in full),
        ]

    return batch


def _recorded(config: SFTDataConfig, chat: ChatTokenizer) -> Batches:
    """Recorded conversations of checklist tasks, in order, over and over."""
    tasks = list(read_tasks(config.path))
    if not tasks:
        raise TaskError(f"{config.path}: holds no task; check data.path")

    def batch(step: int) -> list[Trajectory]:
        return list(itertools.islice(cycle(step * config.conversations), config.conversations))

    def cycle(start: int) -> Iterator[Trajectory]:
        for i in itertools.count(start):
            task = tasks[i % len(tasks)]
            yield encode_conversation(chat, task.messages, task.tools, thinking=config.thinking, task_id=task.id)

    return batch
