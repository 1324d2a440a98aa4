"""Supervised episodes with notes of a rehearsal in context: what the clerk who acts makes of them."""

import itertools
import json
from collections import Counter

import pytest

from envace_jax.rehearse.demos import remembering
from envace_jax.tasks.mini import Shop

RIGHT, WRONG = {"right": 1.0}, {"quit": 1.0}


def conversations(count=40, **settings):
    return list(itertools.islice(remembering(3, **settings), count))


def noted(messages):
    """Where the notes stand."""
    return [i for i, m in enumerate(messages) if m["role"] == "user" and "Private notes" in m["content"]]


def after_notes(messages):
    return messages[noted(messages)[0] + 1 :]


def test_the_notes_stand_below_the_last_user_message_and_nowhere_else():
    for messages in conversations():
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        assert noted(messages) == [last]
        assert messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]


def test_conversations_depend_on_their_index_alone():
    assert conversations(6)[4] == next(remembering(3, start=4))
    assert conversations(2) != list(itertools.islice(remembering(4), 2))


def test_what_comes_after_the_notes_really_happened():
    for messages in conversations():
        results = [json.loads(m["content"]) for m in messages if m["role"] == "tool"]
        calls = [c["function"] for m in messages if m["role"] == "assistant" for c in m.get("tool_calls", ())]
        records = [json.loads(line) for line in messages[0]["content"].split("\n")[1:]]
        shop = Shop(records)
        assert results == [shop.call(c["name"], json.loads(c["arguments"])) for c in calls]


def test_where_all_plans_give_up_so_does_the_clerk():
    for messages in conversations(20, habits=WRONG):
        assert "Sorry" in after_notes(messages)[-1]["content"]


def test_where_all_plans_are_right_the_clerk_looks_first():
    for messages in conversations(20, habits=RIGHT):
        first = after_notes(messages)[0]["tool_calls"][0]["function"]["name"]
        assert first in ("get_order", "get_total", "list_orders")


def test_a_right_plan_among_wrong_ones_is_mostly_followed():
    # Of one plan that looks and one or two that act blindly, the blind ones are never outvoted.
    followed = Counter()
    for messages in conversations(300, habits={"right": 0.4, "blind": 0.6}):
        notes = messages[noted(messages)[0]]["content"]
        plans = notes.split("Plan ")[1:]
        looks = ["get_" in p or "list_" in p for p in plans]
        if len(plans) == 3 and sum(looks) == 1 and "-> " in notes:
            followed["get_" in json.dumps(after_notes(messages)) or "list_" in json.dumps(after_notes(messages))] += 1
    assert followed.total() > 20
    assert followed[True] / followed.total() == pytest.approx(0.7, abs=0.25)


def test_some_rehearsed_results_are_untrue():
    untrue = total = 0
    for messages in conversations(100, habits=RIGHT):
        real = {m["content"] for m in after_notes(messages) if m["role"] == "tool"}
        notes = messages[noted(messages)[0]]["content"]
        rehearsed = [line.split(" -> ")[1] for line in notes.split("\n") if " -> " in line]
        total += len(rehearsed)
        untrue += sum(result not in real for result in rehearsed)
    assert 0.05 < untrue / total < 0.4  # one untrue result leads to others
