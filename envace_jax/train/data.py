"""Which tasks a step trains on: a function of its number alone, so that any run can go on from any step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import grain

from envace_jax.chat import ChatTokenizer
from envace_jax.config import TasksConfig
from envace_jax.tasks import Task, TaskError, read_tasks
from envace_jax.tasks.mini import mini_tasks

TaskBatches = Callable[[int], list[Task]]


def task_batches(config: TasksConfig, per_step: int, chat: ChatTokenizer, *, thinking: bool = True) -> TaskBatches:
    """batches(step) -> the `per_step` tasks of that step.

    The embedded world makes new tasks for ever, or repeats its first `tasks.size`. Tasks from a file come in an order
    that is shuffled anew each time through; those with a first prompt over `tasks.max_prompt_tokens` are left out.

    Raises TaskError for a file that cannot be read or has no task left.
    """
    if config.kind == "mini":

        def made(step: int) -> list[Task]:
            indices = range(step * per_step, (step + 1) * per_step)
            if config.size is not None:
                indices = [i % config.size for i in indices]
            tasks = []
            for i in indices:
                tasks += mini_tasks(config.split, 1, seed=config.seed, visibility=config.visibility, start=i)
            return tasks

        return made

    bad: list[TaskError] = []
    tasks = read_tasks(config.path, split=config.split, on_error=bad.append if config.skip_bad else None)
    read = list(itertools.islice(tasks, config.size))
    limit = config.max_prompt_tokens
    fits = [t for t in read if limit is None or len(chat.render(t.prompt, t.tools, True, thinking)) <= limit]
    if not fits:
        raise TaskError(
            f"{config.path}: no task to train on ({len(bad)} unreadable, {len(read) - len(fits)} with a first prompt "
            f"over tasks.max_prompt_tokens={limit})"
        )
    order = grain.MapDataset.range(len(fits)).shuffle(seed=config.seed).repeat()
    return lambda step: [fits[order[i]] for i in range(step * per_step, (step + 1) * per_step)]
