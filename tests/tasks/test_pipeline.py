"""The tasks of a step depend on data, seed and step alone: however many processes, wherever the run went on from."""

import json
from collections import Counter

import pytest

from envace_jax.tasks import TaskError, read_tasks
from envace_jax.tasks.pipeline import SpilledTasks, TaskSteps, open_tasks
from envace_jax.tasks.synthetic import annotations, write

PER_STEP, COUNT = 4, 10


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("tasks"), annotations(COUNT))[1])


@pytest.fixture(scope="module")
def source(path):
    return open_tasks(path)


@pytest.fixture(scope="module")
def steps(source):
    """steps(...) -> ids of the tasks of a step, from a fresh pipeline unless one is given."""

    def make(**settings):
        pipeline = TaskSteps(source, range(COUNT), **{"per_step": PER_STEP, "seed": 3, **settings})
        return lambda step: [task.id for task in pipeline(step)]

    return make


def test_any_file_is_at_random_access(source, path):
    tasks = list(read_tasks(path))
    assert len(source) == COUNT
    assert [source[i] for i in (9, 0, 4)] == [tasks[i] for i in (9, 0, 4)]
    assert len(open_tasks(path, limit=3)) == 3


def test_bad_records_stop_or_are_left_out(path, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n" + open(path).read())
    with pytest.raises(TaskError, match="bad.jsonl, line 1"):
        open_tasks(str(bad))
    errors = []
    assert len(open_tasks(str(bad), on_error=errors.append)) == COUNT and len(errors) == 1


def test_five_steps_of_four_are_two_passes_over_ten_tasks_in_two_orders(steps):
    ids = [task for step in map(steps(), range(5)) for task in step]
    assert Counter(ids[:COUNT]) == Counter(ids[COUNT:]) == Counter(set(ids)) and len(set(ids)) == COUNT
    assert ids[:COUNT] != ids[COUNT:]


def test_a_step_may_be_one_task(steps):
    one = steps(per_step=1)
    assert [one(i) for i in range(2 * PER_STEP)] == [[task] for i in range(2) for task in steps()(i)]


def test_seeds_give_orders(steps):
    assert [steps()(i) for i in range(3)] == [steps()(i) for i in range(3)]
    assert [steps()(i) for i in range(3)] != [steps(seed=4)(i) for i in range(3)]


def test_one_integer_is_enough_to_go_on(source, steps):
    straight = steps()
    expected = [straight(i) for i in range(8)]
    pipeline = TaskSteps(source, range(COUNT), PER_STEP, seed=3)
    for step in range(3):
        pipeline(step)
    position = json.loads(json.dumps(pipeline.position))
    again = TaskSteps(source, range(COUNT), PER_STEP, seed=3)
    assert position == 3
    assert [[t.id for t in again(i)] for i in range(position, 8)] == expected[3:]
    assert steps()(6) == expected[6]


@pytest.mark.parametrize("processes", [2, 3, 4, 5])
def test_the_shares_of_processes_make_up_the_step(steps, processes):
    shares = [steps(process=p, processes=processes) for p in range(processes)]
    for step in (0, 3):
        assert [task for share in shares for task in share(step)] == steps()(step)


def test_only_chosen_tasks_are_drawn(source):
    pipeline = TaskSteps(source, [7, 2], 2, seed=0)
    assert {t.id for t in pipeline(0)} == {source[7].id, source[2].id}
    with pytest.raises(ValueError, match="no task"):
        TaskSteps(source, [], 2)


def test_what_is_spilled_is_not_kept_in_memory(path):
    tasks = SpilledTasks(read_tasks(path))
    assert tasks[2] == tasks[2] and tasks[2] is not tasks[2]
