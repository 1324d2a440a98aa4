"""From task data to the tasks of a step: shuffled anew for every pass, sliced over processes, read ahead.

    source = open_tasks("data/tasks")                  any file; nothing but an index is kept in memory
    steps = TaskSteps(source, order, per_step=16, seed=0, process=0, processes=4)
    steps(7)                                           this process's tasks of step 7

The tasks of a step depend on (data, seed, step) alone, so that the step is the whole state of the pipeline: one integer
in a checkpoint, and as many processes as one likes when the run goes on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from envace_jax.tasks.files import read_tasks
from envace_jax.tasks.records import Task, TaskError, parse_task
from envace_jax.tasks.spill import Spill
from envace_jax.tasks.tfds_builder import TfdsTasks, is_tfds

READ_AHEAD = 2  # steps
_DRAWS = 1 << 50  # more than any run comes to; without an end grain cannot count the batches when a batch is one task


class TaskSource(Protocol):
    """Tasks at random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


class SpilledTasks:
    """Tasks of any file, kept in a nameless temporary file with an index of where each begins."""

    def __init__(self, tasks: Iterator[Task], where: str = "tasks"):
        self._texts = Spill()
        self._where = where
        for task in tasks:
            self._texts.append(json.dumps(task.to_json(), ensure_ascii=False).encode())
        self._texts.flush()

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Task:
        return parse_task(json.loads(self._texts[index]), where=f"{self._where}, record {index}")


def open_tasks(
    path: str,
    split: str = "train",
    *,
    limit: int | None = None,
    on_error: Callable[[TaskError], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> TaskSource:
    """The tasks of a file, or of one split of a TFDS directory; the first `limit` of them.

    A TFDS directory is read in place. Other files are gone through once: a record that cannot be used raises TaskError,
    or goes to `on_error` and is left out.
    """
    if is_tfds(path):
        return TfdsTasks(path, split)

    def counted() -> Iterator[Task]:
        for i, task in enumerate(itertools.islice(read_tasks(path, on_error=on_error), limit), start=1):
            if progress is not None:
                progress(i)
            yield task

    return SpilledTasks(counted(), path)


class TaskSteps:
    """steps(step) -> the tasks of that step that fall to this process; steps asked for in order are read ahead.

    Args:
        source: the tasks.
        chosen: which of them to draw from, by number; they come in an order shuffled anew each time through.
        per_step: tasks of a step, over all processes.
        seed: of the order.
        process, processes: the step's tasks are cut into contiguous shares, the first ones longer by one if need be.
        share: instead, which of the step's tasks are wanted.
    """

    def __init__(
        self,
        source: TaskSource,
        chosen: Sequence[int],
        per_step: int,
        *,
        seed: int = 0,
        process: int = 0,
        processes: int = 1,
        share: range | None = None,
    ):
        import grain  # brings jax along, which this package does without

        if not 0 <= process < processes:
            raise ValueError(f"process {process} of {processes}: must lie in 0..{processes - 1}")
        if not len(chosen):
            raise ValueError("there is no task to draw from")
        if share is None:
            small, longer = divmod(per_step, processes)
            start = process * small + min(process, longer)
            share = range(start, start + small + (process < longer))

        def read(numbers: Any) -> list[Task]:
            return [source[chosen[int(numbers[i])]] for i in share]

        order = grain.MapDataset.range(len(chosen)).shuffle(seed=seed).repeat(_DRAWS // len(chosen))
        self._steps = order.batch(per_step).map(read)
        self._ahead = self._steps.to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
        ).__iter__()
        self._next = 0

    @property
    def position(self) -> int:
        """The step that comes next: all there is to know to go on."""
        return self._next

    def __call__(self, step: int) -> list[Task]:
        if step != self._next:
            self._ahead.set_state({"next_index": step})
        self._next = step + 1
        return next(self._ahead)
