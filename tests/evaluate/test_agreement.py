"""Rehearsed episodes replayed in the real shop: the same calls, what the shop answers, the checklist answered anew."""

import copy
import json
from types import SimpleNamespace

import pytest

from envace_jax.evaluate.agreement import agreement, replay
from envace_jax.tasks.mini import mini_tasks

TASKS = list(mini_tasks("test", 24))


def with_wrong_results(task):
    """The expert's conversation as a rehearser would have it that always says `cancelled`."""
    messages = [copy.deepcopy(dict(m)) for m in task.messages]
    for message in messages:
        if message["role"] == "tool":
            result = json.loads(message["content"])
            if "status" in result:
                message["content"] = json.dumps({**result, "status": "cancelled"})
    return messages


def test_the_experts_episode_is_worth_full_marks_and_ends_in_the_right_state():
    for task in TASKS:
        found = replay(task, task.messages)
        assert found.reward == pytest.approx(1.0) and found.state_right
        assert [m["content"] for m in found.messages] == [m["content"] for m in task.messages]


def test_what_was_rehearsed_does_not_count():
    for task in TASKS:
        assert replay(task, with_wrong_results(task)) == replay(task, task.messages)


def test_replies_count_as_they_were_given():
    task = next(t for t in TASKS if len(t.user_turns) == 1)
    silent = [*task.messages[:-1], {"role": "assistant", "content": "Sorry, I cannot do that."}]
    assert replay(task, silent).reward == pytest.approx(0.7)  # the weight of the reply is 0.3


def test_turns_not_reached_count_nothing():
    task = next(t for t in TASKS if len(t.user_turns) == 2)
    second = [i for i, m in enumerate(task.messages) if m["role"] == "user"][1]
    assert replay(task, task.messages[:second]).reward == pytest.approx(0.5)


def episode(task, messages, reward):
    return SimpleNamespace(messages=messages, reward=reward)


def test_agreement_is_of_full_marks():
    right = [episode(t, t.messages, 1.0) for t in TASKS[:3]]
    task = TASKS[3]
    convenient = episode(task, [*task.messages[:-1], {"role": "assistant", "content": "Done."}], 1.0)
    figures = agreement([*right, convenient], TASKS[:4])
    assert figures["eval/reward_agreement"] == 0.75 and figures["eval/reward_agreement_count"] == 4
    assert figures["eval/rehearsed_reward"] == 1.0 and figures["eval/replayed_reward"] < 1.0
    assert figures["eval/reward_correlation"] == 0.0  # the rehearsed rewards are all the same


def test_rewards_that_go_together_correlate():
    bad = [*TASKS[0].messages[:2], {"role": "assistant", "content": "Sorry, I cannot do that."}]
    episodes = [episode(TASKS[0], bad, 0.2), *(episode(t, t.messages, 1.0) for t in TASKS[1:4])]
    assert agreement(episodes, TASKS[:4])["eval/reward_correlation"] > 0.9
