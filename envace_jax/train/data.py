"""Which tasks a step trains on: a function of its number alone, so that any run can go on from any step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from envace_jax.chat import ChatTokenizer
from envace_jax.config import TasksConfig
from envace_jax.tasks import Task, TaskError
from envace_jax.tasks.inspection import counting, prompt_length
from envace_jax.tasks.mini import mini_tasks
from envace_jax.tasks.pipeline import TaskSteps, open_tasks


@dataclass(frozen=True)
class TaskBatches:
    """batches(step) -> the tasks of that step. `unruled`: the id of a task that only a judge can score, if any."""

    read: Callable[[int], list[Task]]
    unruled: str | None = None

    def __call__(self, step: int) -> list[Task]:
        return self.read(step)


def task_batches(
    config: TasksConfig,
    per_step: int,
    chat: ChatTokenizer,
    *,
    thinking: bool = True,
    share: range | None = None,
) -> TaskBatches:
    """batches(step) -> the `per_step` tasks of that step, or those of them with numbers in `share`.

    The embedded world makes new tasks for ever, or repeats its first `tasks.size`. Tasks from a file come in an order
    that is shuffled anew each time through; those with a first prompt over `tasks.max_prompt_tokens` are left out.

    Raises TaskError for a file that cannot be read or has no task left.
    """
    if config.kind == "mini":

        def made(step: int) -> list[Task]:
            indices = [step * per_step + i for i in (range(per_step) if share is None else share)]
            if config.size is not None:
                indices = [i % config.size for i in indices]
            tasks = []
            for i in indices:
                tasks += mini_tasks(config.split, 1, seed=config.seed, visibility=config.visibility, start=i)
            return tasks

        return TaskBatches(made)

    bad: list[TaskError] = []
    limit, fits, unruled = config.max_prompt_tokens, [], None
    with counting(f"tasks of {config.path}") as progress:
        source = open_tasks(
            config.path, config.split, limit=config.size, on_error=bad.append if config.skip_bad else None
        )
        size = len(source) if config.size is None else min(len(source), config.size)
        for i in range(size):
            progress(i + 1)
            try:
                task = source[i]
            except TaskError as error:
                if not config.skip_bad:
                    raise
                bad.append(error)
                continue
            if limit is None or prompt_length(task, chat, thinking) <= limit:
                fits.append(i)
                unruled = task.id if unruled is None and task.needs_judge else unruled
    if not fits:
        raise TaskError(
            f"{config.path}: no task to train on ({len(bad)} unreadable, {size - len(fits)} with a first prompt "
            f"over tasks.max_prompt_tokens={limit})"
        )
    steps = TaskSteps(source, fits, per_step, seed=config.seed, share=share)
    return TaskBatches(steps, unruled)
