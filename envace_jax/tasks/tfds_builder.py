"""Task data as a TensorFlow Datasets data set: converted once, then read at random from ArrayRecord files.

TensorFlow is not needed, neither to write nor to read. Each example is a task's id and its record as JSON text in the
annotation spelling, so that the format on disk is the public one.

    build({"train": "tasks.parquet"}, "data/tasks")     once
    TfdsTasks("data/tasks", "train")[17]                a task, read from disk
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec.core

from envace_jax.tasks.records import Task, TaskError
from envace_jax.tasks.spill import Spill

if TYPE_CHECKING:
    from envace_jax.tasks.files import Record

NAME, VERSION = "checklist_tasks", "1.0.0"
INFO = "dataset_info.json"
# Examples of one file. TFDS holds those of a file in memory while it writes them; its builder that does without a
# number of files holds all, or needs TensorFlow to put them aside.
SHARD = 1000

Example = tuple[int, dict[str, str]]


def is_tfds(path: str) -> bool:
    """Whether the path is a TFDS data set, or a directory that `build` made one in."""
    return _data_set(path) is not None


def _data_set(path: str) -> str | None:
    """The version directory that `path` means: itself or, somewhere below, that of the checklist tasks."""
    try:
        system, plain = fsspec.core.url_to_fs(str(path))
        plain = plain.rstrip("/")
        for below in ("", f"/{VERSION}", f"/{NAME}/{VERSION}"):
            if system.isfile(f"{plain}{below}/{INFO}"):
                return system.unstrip_protocol(plain + below) if "://" in str(path) else plain + below
    except (OSError, ImportError, ValueError):
        pass  # whoever opens the path as a file says what is wrong with it
    return None


class TfdsTasks:
    """The tasks of one split, at random access; nothing is kept in memory. `tasks[i]` raises `TaskError`."""

    def __init__(self, path: str, split: str = "train"):
        self.path, self._split = str(path), split
        directory = _data_set(self.path)
        if directory is None:
            raise TaskError(f"{path}: no TFDS data set there; `envace data build` makes one")
        tfds = _tfds()
        try:
            builder = tfds.builder_from_directory(directory)
            splits = ", ".join(builder.info.splits)
            self._source = builder.as_data_source(split)
        except ValueError as error:
            raise TaskError(f"{path}: no split {split!r}; there are {splits}; check tasks.split") from error
        except Exception as error:  # tfds and its readers raise what they please
            raise TaskError(f"{path}: not a data set that can be read ({' '.join(str(error).split())})") from error

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Task:
        return self.record(index).task()

    def record(self, index: int) -> Record:
        """The record of one example, decoded."""
        from envace_jax.tasks.files import Record
        from envace_jax.tasks.shapes import Fault, decode_json

        try:
            return Record(self.path, index + 1, decode_json(self._source[index]["task"].decode(), "the record"))
        except (KeyError, Fault, UnicodeDecodeError) as error:
            return Record(self.path, index + 1, reason=f"not a checklist task ({error})")


def read_records(path: str, split: str = "train") -> Iterator[Record]:
    """The records of one split, in order."""
    tasks = TfdsTasks(path, split)
    return (tasks.record(i) for i in range(len(tasks)))


def build(
    sources: Mapping[str, str],
    out: str | Path,
    *,
    on_error: Callable[[TaskError], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Converts the task files of each split into a data set below `out`, and returns the number of tasks by split.

    The order of the tasks is kept. A record that cannot be used stops the conversion, and nothing is left of it;
    with `on_error` it is handed there and left out. progress: called with the number of tasks converted so far.

    Raises TaskError, also where `out` holds a data set already.
    """
    from envace_jax.tasks.files import expand, opened, read_tasks

    if is_tfds(str(out)):
        raise TaskError(f"{out}: holds a data set already; remove it or choose another directory")
    for source in sources.values():
        if not is_tfds(source):
            for name in expand(source):
                with opened(name):
                    pass
    tfds = _tfds()
    # All of the sources first: nothing is written of one that turns out bad, and the number of files is known then.
    texts: dict[str, Spill] = {}
    done = 0
    for split, source in sources.items():
        texts[split] = Spill()
        for task in read_tasks(source, on_error=on_error):
            done += 1
            if progress is not None:
                progress(done)
            texts[split].append(task.id.encode())
            texts[split].append(json.dumps(task.to_json(), ensure_ascii=False).encode())
        if not len(texts[split]):
            raise TaskError(f"{source}: no task to convert for the split {split!r}")
        texts[split].flush()

    class ChecklistTasks(tfds.core.ShardBasedBuilder, skip_registration=True):
        name = NAME

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict({"id": tfds.features.Text(), "task": tfds.features.Text()})
            description = "Agentic tasks with checklists; `task` is JSON: uuid, messages, tools, checklists."
            return tfds.core.DatasetInfo(builder=self, description=description, features=features)

        def _shard_iterators_per_split(self, manager: Any) -> dict[str, list[Callable[[], Iterator[Example]]]]:
            return {
                split: [partial(_examples, spill, start) for start in range(0, len(spill) // 2, SHARD)]
                for split, spill in texts.items()
            }

    ChecklistTasks.VERSION = tfds.core.Version(VERSION)
    try:
        # There are no downloads, but tfds makes their directory and talks about them all the same.
        with tempfile.TemporaryDirectory() as downloads, contextlib.redirect_stdout(io.StringIO()):
            builder = ChecklistTasks(data_dir=os.fspath(out), file_format="array_record")
            builder.download_and_prepare(download_dir=downloads)
    except Exception as error:
        raise TaskError(f"{out}: the data set could not be written ({' '.join(str(error).split())})") from error
    finally:
        for spill in texts.values():
            spill.close()
    return {split: info.num_examples for split, info in builder.info.splits.items()}


def _examples(texts: Spill, start: int) -> Iterator[Example]:
    """The examples of one file; `texts` holds id and record of each task in turn."""
    for i in range(start, min(start + SHARD, len(texts) // 2)):
        yield i, {"id": texts[2 * i].decode(), "task": texts[2 * i + 1].decode()}


def _tfds() -> Any:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()  # ours says more
    return tfds
