"""Verdicts by program: the expert gets everything, and each way to go wrong costs what it should."""

import copy
import json
import random

import pytest

from envace_jax.rewards import RuleJudge, Step, judge_turn
from envace_jax.tasks.mini import Shop, mini_tasks
from envace_jax.tasks.mini.demos import play_task
from envace_jax.tasks.mini.generate import play
from envace_jax.tasks.mini.policies import Goal, expert


def turns_of(messages):
    """(history, steps) of each user turn of a conversation."""
    out, history = [], []
    for message in messages:
        if message["role"] == "user":
            history.append(message)
            out.append((list(history), []))
            continue
        history.append(message)
        if message["role"] == "assistant":
            out[-1][1].append(Step(message))
        elif message["role"] == "tool":
            last = out[-1][1].pop()
            out[-1][1].append(Step(last.message, (*last.results, message)))
    return out


def verdicts(task, messages):
    return [
        judge_turn(task, t, history, steps, RuleJudge(), failed_before=False)
        for t, (history, steps) in enumerate(turns_of(messages))
    ]


def satisfied(task, messages) -> list[set[str]]:
    return [{name.split("_", 1)[1] for name in v.satisfied} for v in verdicts(task, messages)]


ALL = {"reads", "writes", "results", "reply"}


@pytest.fixture(scope="module")
def ship():
    """A task whose one goal is to ship an order that is new: look, pay, ship, tell."""
    for task in mini_tasks("train", 400):
        goals = task.meta["goals"]
        if len(goals) == 1 and len(goals[0]) == 1 and goals[0][0]["kind"] == "ship":
            (record,) = [r for r in task.meta["records"] if r["order"] == goals[0][0]["order"]]
            if record["status"] == "new":
                return task
    raise AssertionError("no such task among the first 400")


def changed(task, change):
    messages = copy.deepcopy(list(task.messages))
    change(messages)
    return satisfied(task, messages)[0]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("visibility", ["full", "partial"])
def test_the_recorded_conversation_scores_full_marks(split, visibility):
    for task in mini_tasks(split, 80, visibility=visibility):
        assert [v.score for v in verdicts(task, task.messages)] == pytest.approx([1.0] * len(task.user_turns))


def test_bad_habits_score_less_on_average():
    tasks = list(mini_tasks("train", 60))

    def mean(habit):
        scores = []
        for task in tasks:
            played = play_task(task.messages, task.meta, random.Random(task.id), {habit: 1.0})[0]
            scores += [v.score for v in verdicts(task, played)]
        return sum(scores) / len(scores)

    assert mean("right") == pytest.approx(1.0)
    assert max(mean("blind"), mean("wrong"), mean("quit")) < 0.7


def test_acting_without_looking_loses_the_reads(ship):
    def blind(messages):
        del messages[2:4]  # get_order and its result

    assert changed(ship, blind) == {"writes", "results", "reply"}


def test_a_write_that_was_not_asked_for_loses_the_writes(ship):
    order = ship.meta["goals"][0][0]["order"]
    shipped = next(r for r in ship.meta["final_records"] if r["order"] == order)

    def cancel_too(messages):
        call = {"type": "function", "function": {"name": "cancel_order", "arguments": json.dumps({"order": order})}}
        messages[-1:-1] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": json.dumps(shipped | {"error": "already shipped"})},
        ]

    assert changed(ship, cancel_too) == {"reads", "results", "reply"}


def test_a_result_that_differs_from_the_recorded_one_loses_the_results(ship):
    def lie(messages):
        messages[3]["content"] = messages[3]["content"].replace('"new"', '"paid"')

    assert changed(ship, lie) == {"reads", "writes", "reply"}


def test_a_result_that_is_not_json_loses_the_results(ship):
    def break_it(messages):
        messages[3]["content"] = "all fine"

    assert "results" not in changed(ship, break_it)


@pytest.mark.parametrize("reply", ["Sorry, I cannot do that.", "", "Order 999 is shipped."])
def test_a_wrong_reply_loses_the_reply(ship, reply):
    def say(messages):
        messages[-1]["content"] = reply

    assert changed(ship, say) == {"reads", "writes", "results"}


def test_a_turn_that_never_replies_has_nothing(ship):
    def stop(messages):
        del messages[-1]

    assert changed(ship, stop) <= {"reads", "writes", "results"}
    assert "reply" not in changed(ship, stop)


def test_without_any_reference_call_results_earn_nothing(ship):
    def silent(messages):
        del messages[2:-1]

    assert "results" not in changed(ship, silent)


@pytest.mark.parametrize(
    ("change", "plausible"),
    [
        ({}, True),
        ({"total": 1}, False),
        ({"order": 999}, False),
        ({"item": "spaceship"}, False),
        ({"status": "lost"}, False),  # not in the schema
        ({"more": 1}, False),
    ],
)
def test_results_of_other_calls_must_fit_their_schema_and_be_grounded(ship, change, plausible):
    order = ship.meta["goals"][0][0]["order"]
    record = next(r for r in ship.meta["final_records"] if r["order"] == order)
    result = record | {"total": record["qty"] * record["price"]} | change

    def ask_more(messages):
        call = {"type": "function", "function": {"name": "get_total", "arguments": json.dumps({"order": order})}}
        messages[-1:-1] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": json.dumps(result)},
        ]

    assert ("results" in changed(ship, ask_more)) is plausible


def test_the_true_result_of_another_call_is_plausible(ship):
    order = ship.meta["goals"][0][0]["order"]
    shop = Shop(ship.meta["records"])
    messages = list(copy.deepcopy(ship.messages[:2]))
    play(expert(Goal("total", order)), shop, messages)
    del messages[-1]
    play(expert(Goal("ship", order)), shop, messages)
    assert satisfied(ship, messages)[0] == ALL


def test_items_without_a_rule_have_no_verdict(ship):
    import dataclasses

    bare = tuple(dataclasses.replace(item, rule=None) for item in ship.checklist[0])
    task = dataclasses.replace(ship, checklist=(bare,))
    assert not verdicts(task, task.messages)[0].valid
