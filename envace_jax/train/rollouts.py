"""What samples the episodes of a run's steps: this process's share of them, on its own devices."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from envace_jax.chat import ChatTokenizer
from envace_jax.config import Config
from envace_jax.rewards import Judge, Question
from envace_jax.rollout.judges import Judging
from envace_jax.rollout.trajectory import Trajectory
from envace_jax.tasks import Task
from envace_jax.train.data import task_batches
from envace_jax.train.processes import Processes
from models.qwen3 import Qwen3, Qwen3Config

Rollout = Callable[[Qwen3, Sequence[Task], int], list[Trajectory]]  # (model, tasks, step) -> episodes


class Timed:
    """A judge whose time is taken."""

    def __init__(self, judge: Judge):
        self._judge, self._seconds, self._lock = judge, 0.0, threading.Lock()

    def answer(self, questions: Sequence[Question]) -> list[bool | None]:
        began = time.perf_counter()
        try:
            return self._judge.answer(questions)
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Seconds since the last call, of all threads together."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds


def make_rollout(
    config: Config,
    model_config: Qwen3Config,
    chat: ChatTokenizer,
    mesh: Mesh | None,
    everyone: Processes,
    rehearser: Callable[[], Qwen3] | None,
    given: Rollout | None,
) -> tuple[Callable[[int], list[Task]], Judging | None, Timed | None, Rollout]:
    """Where tasks come from, who judges (and as whom the episodes see it), and what samples this process's share of a
    step's episodes: `given`, or an engine on `mesh`.

    Shares are contiguous ranges of episodes, so that a group spans processes only where their numbers ask for it.
    """
    settings = config.rollout
    episodes = everyone.share(settings.tasks_per_step * settings.group_size)
    first, last = episodes.start // settings.group_size, -(-episodes.stop // settings.group_size)
    tasks = task_batches(
        config.tasks,
        settings.tasks_per_step,
        chat,
        thinking=settings.thinking,
        # Somebody else's rollout numbers its episodes itself, so it must see all tasks.
        share=None if given is not None or everyone.count == 1 else range(first, max(first, last)),
    )
    if given is not None:

        def own(model: Qwen3, tasks: Sequence[Task], step: int) -> list[Trajectory]:
            return [t for t in given(model, tasks, step) if t.trajectory in episodes]

        return tasks, None, None, given if everyone.count == 1 else own

    from envace_jax.rollout import make_world, run_episodes
    from envace_jax.sampling import Engine

    slots = -(-(settings.slots or settings.tasks_per_step * settings.group_size) // everyone.count)
    judging = Judging(
        config.reward, Path(config.output_dir), unruled=tasks.unruled, episodes=slots, process=everyone.index
    )
    timed = Timed(judging.judge)
    world = make_world(config.world, thinking=settings.thinking)
    engine = Engine(
        model_config,
        slots=slots,
        max_length=settings.max_length,
        vocab_size=chat.vocab_size,
        mesh=mesh,
        compile_ahead=settings.compile_ahead,
    )

    def run(model: Qwen3, tasks: Sequence[Task], step: int, **arguments: Any) -> list[Trajectory]:
        return run_episodes(
            engine,
            model,
            chat,
            tasks,
            settings=settings,
            world=world,
            seed=config.seed,
            step=step,
            judge=timed,
            judge_pool=judging.pool,
            empty_penalty=config.reward.empty_penalty,
            history_reasoning=config.world.history_reasoning,
            rehearser=None if rehearser is None else rehearser(),
            **arguments,
        )

    def share(model: Qwen3, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        # One task for each episode: a share may begin and end within a group.
        each = [tasks[number // settings.group_size - first] for number in episodes]
        sampled = run(model, each, step, group_size=1, first_episode=episodes.start)
        return [dataclasses.replace(t, group=t.trajectory // settings.group_size) for t in sampled]

    return tasks, judging, timed, run if everyone.count == 1 else share
