"""Task records: both public spellings load, and a bad record is named with its place and what to do."""

import json
import re

import pytest

from envace_jax.tasks import TaskError, parse_task, read_tasks


def record(**changes) -> dict:
    item = {"id": "a", "question": "?", "focus_on": "assistant.content", "pass_condition": "p", "weight": 1.0}
    base = {
        "uuid": "t1",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u0"},
            {"role": "assistant", "content": "a0"},
            {"role": "user", "content": "u1"},
            {"role": "assistant", "content": "a1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "checklists": [[[item], [{**item, "id": "b", "required_for_next_turn": True}]]],
    }
    return base | changes


def with_item(**changes) -> dict:
    item = record()["checklists"][0][0][0] | changes
    return record(checklists=[[[item], [item | {"weight": 1.0, "focus_on": "tool.content"}]]])


def test_the_annotation_spelling():
    task = parse_task(record())
    assert (task.id, task.user_turns) == ("t1", ("u0", "u1"))
    assert task.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "u0"}]
    assert [[i.id for i in turn] for turn in task.checklist] == [["a"], ["b"]]
    assert task.checklist[1][0].required_for_next_turn


def test_the_parquet_spelling_is_the_same_task():
    plain = record()
    row = {
        "messages": plain["messages"][:2],
        "extra_info": {
            "index": 3,
            "original_index": "t1",
            "tools": json.dumps(plain["tools"]),
            "messages": plain["messages"],
            "interaction_kwargs": {"checklist_list": plain["checklists"]},
        },
    }
    assert parse_task(row) == parse_task(plain)


def test_a_task_survives_being_written_and_read(tmp_path):
    task = parse_task(record(meta={"k": 1}))
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task.to_json()) + "\n\n" + json.dumps(task.to_json()) + "\n")
    assert list(read_tasks(str(path))) == [task, task]


def test_only_the_first_checklist_counts():
    first = record()["checklists"][0]
    other = [[item | {"id": "other"} for item in turn] for turn in first]
    assert parse_task(record(checklists=[first, other])) == parse_task(record())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([1], "JSON object list"),
        (record(uuid=7), "uuid str int"),
        (record(messages=7), "messages list int"),
        (record(checklists=[]), "checklists empty"),
        (record(checklists=[[[]]]), "1 turns 2 user turns"),
        (record(messages=[{"role": "robot"}]), "message 0 role"),
        (record(messages=[{"role": "user", "content": None}]), "message 0 user content"),
        (record(messages=[{"role": "system", "content": "s"}]), "no user message"),
        (
            record(messages=[{"role": "user", "content": "u"}, {"role": "tool", "content": "r"}]),
            "message 1 tool result without call",
        ),
        (with_item(weight=0.5), "weights turn 0 0.5"),
        (with_item(weight="much"), "turn 0 item 0 weight 'much'"),
        (with_item(focus_on="user.content"), "turn 0 item 0 focus_on user.content assistant.tool_calls"),
        ({"extra_info": {"tools": "[", "messages": []}}, "extra_info"),
        (record(checklists=[[[{"id": "a"}], []]]), "turn 0 item 0 lacks question weight"),
    ],
)
def test_a_bad_record_is_named_with_its_place_and_what_is_wrong(bad, words):
    with pytest.raises(TaskError) as caught:
        parse_task(bad, where="tasks.jsonl, line 4")
    assert str(caught.value).startswith("tasks.jsonl, line 4")
    assert [word for word in words.split() if word not in str(caught.value)] == []


def test_a_bad_line_is_named_by_number_and_can_be_skipped(tmp_path):
    path = tmp_path / "tasks.jsonl"
    good = json.dumps(record())
    path.write_text(f"{good}\n{{broken\n{good}\n{json.dumps(with_item(weight=2))}\n")
    with pytest.raises(TaskError, match=r"tasks.jsonl, line 2: .*not JSON .*; set tasks.skip_bad=true"):
        list(read_tasks(str(path)))
    errors = []
    assert len(list(read_tasks(str(path), on_error=errors.append))) == 2
    assert [re.search(r"line \d", str(e)).group() for e in errors] == ["line 2", "line 4"]


def test_a_file_that_is_not_there():
    with pytest.raises(TaskError, match="nowhere.jsonl: cannot be read .*check"):
        next(read_tasks("nowhere.jsonl"))
