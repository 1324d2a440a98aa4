"""The embedded world: what the shop answers, that the expert solves every task, and what the splits keep apart."""

import itertools
import json
import random

import jsonschema
import pytest

from envace_jax.tasks import parse_task
from envace_jax.tasks.mini import RESULT_SCHEMAS, Shop, mini_tasks
from envace_jax.tasks.mini.demos import demonstrations, drills, play_task
from envace_jax.tasks.mini.generate import HELD_OUT, SPLITS, record_names
from envace_jax.tasks.mini.policies import QUIT_REPLY, states

RECORDS = (
    {"order": 111, "item": "lamp", "qty": 2, "price": 3, "status": "new"},
    {"order": 222, "item": "rug", "qty": 1, "price": 5, "status": "paid"},
    {"order": 333, "item": "desk", "qty": 4, "price": 9, "status": "shipped"},
    {"order": 444, "item": "vase", "qty": 3, "price": 2, "status": "cancelled"},
)


def pairs(task) -> tuple[str, ...]:
    return tuple(goal["kind"] for goals in task.meta["goals"] for goal in goals)


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("get_order", {"order": 111}, RECORDS[0]),
        ("get_order", {"order": 999}, {"error": "no such order"}),
        ("get_total", {"order": 333}, RECORDS[2] | {"total": 36}),
        ("pay_order", {"order": 111}, RECORDS[0] | {"status": "paid"}),
        ("pay_order", {"order": 222}, RECORDS[1] | {"error": "not new"}),
        ("ship_order", {"order": 222}, RECORDS[1] | {"status": "shipped"}),
        ("ship_order", {"order": 111}, RECORDS[0] | {"error": "not paid"}),
        ("ship_order", {"order": 333}, RECORDS[2] | {"error": "already shipped"}),
        ("cancel_order", {"order": 222}, RECORDS[1] | {"status": "cancelled"}),
        ("cancel_order", {"order": 444}, RECORDS[3] | {"error": "already cancelled"}),
        ("change_qty", {"order": 111, "qty": 5}, RECORDS[0] | {"qty": 5}),
        ("change_qty", {"order": 222, "qty": 5}, RECORDS[1] | {"error": "not new"}),
    ],
)
def test_what_the_shop_answers(name, arguments, answer):
    assert Shop(RECORDS).call(name, arguments) == answer


def test_the_shop_lists_its_orders_with_their_statuses():
    listed = Shop(RECORDS).call("list_orders", {})["orders"]
    assert listed == [{"order": r["order"], "status": r["status"]} for r in RECORDS]


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("fly", {}, "TOOL_NOT_AVAILABLE"),
        ("get_order", {}, "INVALID_PARAMETERS"),
        ("get_order", {"order": "111"}, "INVALID_PARAMETERS"),
        ("get_order", {"order": 111, "more": 1}, "INVALID_PARAMETERS"),
        ("change_qty", {"order": 111, "qty": 6}, "INVALID_PARAMETERS"),
        ("list_orders", {"status": "paid"}, "INVALID_PARAMETERS"),
    ],
)
def test_calls_against_the_protocol_change_nothing(name, arguments, code):
    shop = Shop(RECORDS)
    assert shop.call(name, arguments)["error_tool_call"]["code"] == code
    assert list(shop.records.values()) == list(RECORDS)


def test_writes_are_seen_by_later_reads():
    shop = Shop(RECORDS)
    shop.call("pay_order", {"order": 111})
    shop.call("ship_order", {"order": 111})
    assert shop.call("get_order", {"order": 111})["status"] == "shipped"
    assert RECORDS[0]["status"] == "new"  # the records it started from are not its own


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("visibility", ["full", "partial"])
def test_the_expert_solves_every_task_when_its_calls_are_made_again(split, visibility):
    for task in mini_tasks(split, 60, visibility=visibility):
        shop, replies = Shop(task.meta["records"]), []
        pending = []
        for message in task.messages:
            if message["role"] == "assistant":
                calls = [c["function"] for c in message.get("tool_calls", ())]
                pending = [shop.call(c["name"], json.loads(c["arguments"])) for c in calls]
                if not calls:
                    replies.append(message["content"])
            elif message["role"] == "tool":
                assert json.loads(message["content"]) == pending.pop(0)
        assert list(shop.records.values()) == task.meta["final_records"]
        assert all(states(*pair) for pair in zip(replies, task.meta["replies"], strict=True))
        assert parse_task(json.loads(json.dumps(task.to_json()))).checklist == task.checklist


def test_splits_share_no_record_names():
    names = {split: set(record_names(split)) for split in SPLITS}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not names[a] & names[b]
    for split in SPLITS:
        for task in mini_tasks(split, 40):
            assert {r["order"] for r in task.meta["records"]} <= names[split]


def test_held_out_pairs_of_goals_come_in_the_test_split_only():
    for split in ("train", "validation"):
        assert not any(pairs(task) in HELD_OUT for task in mini_tasks(split, 400))
    assert {pairs(task) for task in mini_tasks("test", 300)} >= set(HELD_OUT)


def test_a_task_depends_on_split_seed_and_index_alone():
    tasks = list(mini_tasks("train", 6, seed=3))
    assert list(mini_tasks("train", 2, seed=3, start=4)) == tasks[4:]
    assert [t.messages for t in mini_tasks("train", 6, seed=4)] != [t.messages for t in tasks]
    assert len({t.id for t in tasks}) == 6


def test_partial_visibility_hides_price_and_status_of_some_records():
    shown = [json.loads(line) for t in mini_tasks("train", 20, visibility="partial") for line in _lines(t)]
    assert {frozenset(r) for r in shown} == {
        frozenset({"order", "item", "qty", "price", "status"}),
        frozenset({"order", "item", "qty"}),
    }
    for task in mini_tasks("train", 5):
        assert [json.loads(line) for line in _lines(task)] == task.meta["records"]


def _lines(task) -> list[str]:
    return [line for line in task.messages[0]["content"].splitlines() if line.startswith("{")]


def test_doing_nothing_leaves_some_tasks_as_they_should_be_but_solves_none():
    """The floor of a measure that looks at the state alone; a reply is asked for in every task."""
    tasks = list(mini_tasks("test", 300))
    unchanged = sum(t.meta["records"] == t.meta["final_records"] for t in tasks) / len(tasks)
    assert 0.2 < unchanged < 0.7
    assert not any(states("", wanted) for t in tasks for wanted in t.meta["replies"])
    assert not any(states(QUIT_REPLY, wanted) for t in tasks for wanted in t.meta["replies"])


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("Order 111 is paid.", True),
        ("Of course. Order 111 is paid.", True),
        ("Order 111 is paid. Order 222 is paid.", False),
        ("Order 111 is paid. It costs 12.", False),
        ("Order 111 is shipped.", False),
        ("", False),
    ],
)
def test_a_reply_states_what_is_wanted_and_claims_nothing_else(reply, right):
    assert states(reply, ["Order 111 is paid"]) is right


@pytest.mark.parametrize("split", SPLITS)
def test_unknown_settings_are_refused(split):
    with pytest.raises(ValueError, match="use full or partial"):
        list(mini_tasks(split, 1, visibility="none"))
    with pytest.raises(ValueError, match="use one of train, validation, test"):
        list(mini_tasks("dev", 1))


def test_demonstrations_show_all_habits_on_training_records_and_fit_the_schemas():
    names = set(record_names("train"))
    replies = []
    for conversation in itertools.islice(demonstrations(0), 60):
        replies += [m["content"] for m in conversation if m["role"] == "assistant"]
        pending = []
        for message in conversation:
            if message["role"] == "assistant":
                pending = [c["function"]["name"] for c in message.get("tool_calls", ())]
            elif message["role"] == "tool":
                jsonschema.validate(json.loads(message["content"]), RESULT_SCHEMAS[pending.pop(0)])
        assert {r["order"] for r in map(json.loads, _records(conversation))} <= names
    assert QUIT_REPLY in " ".join(replies)


def _records(conversation) -> list[str]:
    return [line for line in conversation[0]["content"].splitlines() if line.startswith("{")]


def test_drills_hold_many_calls_some_of_which_break_the_protocol():
    results = [json.loads(m["content"]) for c in itertools.islice(drills(0), 40) for m in c if m["role"] == "tool"]
    assert len(results) > 40 * 7
    assert any("error_tool_call" in r for r in results)
    assert any("error" in r for r in results)


def test_the_right_habit_alone_plays_as_the_expert():
    for task in mini_tasks("train", 20):
        played = play_task(task.messages, task.meta, random.Random(0), {"right": 1.0})[0]
        assert [m["content"] for m in played] == [m["content"] for m in task.messages]
