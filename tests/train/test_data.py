"""The tasks of a step depend on its number alone."""

import json
from collections import Counter

import pytest

from envace_jax.config import TasksConfig
from envace_jax.tasks import TaskError
from envace_jax.tasks.mini import mini_tasks
from envace_jax.train.data import task_batches


class Words:
    """Stands in for a tokenizer: a token a word."""

    def render(self, messages, tools, add_generation_prompt, enable_thinking):
        return " ".join(m["content"] for m in messages).split()


def ids(tasks):
    return [task.id for task in tasks]


@pytest.fixture
def file(tmp_path):
    """Ten tasks, one a line."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task.to_json()) + "\n" for task in mini_tasks("train", 10)))
    return path


def test_the_embedded_world_makes_new_tasks_for_ever():
    batches = task_batches(TasksConfig(), 3, Words())
    assert ids(batches(0) + batches(1)) == ids(mini_tasks("train", 6))
    assert ids(batches(100)) == ids(mini_tasks("train", 3, start=300))


def test_or_repeats_the_first_of_them():
    batches = task_batches(TasksConfig(size=4), 3, Words())
    first = ids(mini_tasks("train", 4))
    assert ids(batches(0) + batches(1)) == [*first, *first[:2]]


def test_tasks_of_a_file_come_once_each_time_through_in_a_new_order(file):
    config = TasksConfig(kind="checklist", path=str(file), seed=1)
    batches = task_batches(config, 5, Words())
    first, second = ids(batches(0) + batches(1)), ids(batches(2) + batches(3))
    assert sorted(first) == sorted(second) == sorted(ids(mini_tasks("train", 10))) and first != second
    assert ids(task_batches(config, 5, Words())(3)) == second[5:], "a later process must see the same order"
    assert Counter(ids(task_batches(config, 3, Words())(i // 3)[i % 3] for i in range(10))) == Counter(first)


def test_prompts_that_are_too_long_are_left_out(file):
    lengths = {t.id: len(Words().render(t.prompt, t.tools, True, True)) for t in mini_tasks("train", 10)}
    limit = sorted(lengths.values())[4]
    config = TasksConfig(kind="checklist", path=str(file), max_prompt_tokens=limit)
    batches = task_batches(config, 10, Words())
    assert set(ids(batches(0))) == {name for name, length in lengths.items() if length <= limit}
    with pytest.raises(TaskError, match="10 with a first prompt over tasks.max_prompt_tokens=1"):
        task_batches(TasksConfig(kind="checklist", path=str(file), max_prompt_tokens=1), 1, Words())


def test_an_unreadable_record_is_refused_or_left_out_as_the_setting_says(file):
    with open(file, "a") as lines:
        lines.write("{half\n")
    with pytest.raises(TaskError, match="tasks.skip_bad"):
        task_batches(TasksConfig(kind="checklist", path=str(file)), 1, Words())
    batches = task_batches(TasksConfig(kind="checklist", path=str(file), skip_bad=True), 10, Words())
    assert len(set(ids(batches(0)))) == 10
