"""Checklist rewards: how verdicts become scores, with judges that answer as they are told."""

import dataclasses

import pytest

from envace_jax.rewards import Step, episode_reward, judge_turn
from envace_jax.tasks import parse_task


class Told:
    """Answers by (item, step); None is no verdict."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def answer(self, questions):
        self.asked += [(q.item.id, q.step) for q in questions]
        return [self.answers.get(q.item.id, {}).get(q.step, False) for q in questions]


def make_task(*items):
    base = {"question": "?", "pass_condition": "p", "focus_on": "assistant.content"}
    return parse_task(
        {
            "uuid": "t",
            "messages": [{"role": "user", "content": "u"}],
            "tools": [],
            "checklists": [[[base | item for item in items]]],
        }
    )


TWO = make_task({"id": "a", "weight": 0.75}, {"id": "b", "weight": 0.25})
FOCUSED = make_task(
    {"id": "call", "weight": 0.5, "focus_on": "assistant.tool_calls"},
    {"id": "result", "weight": 0.25, "focus_on": "tool.content"},
    {"id": "text", "weight": 0.25},
)
OK = Step({"role": "assistant", "content": ""})
BAD = Step({"role": "assistant", "content": ""}, (), failed=True)


def judged(task, steps, judge, failed_before=False):
    return judge_turn(task, 0, task.prompt, steps, judge, failed_before=failed_before)


def test_an_item_is_satisfied_when_any_step_satisfies_it():
    verdict = judged(TWO, [OK, OK, OK], Told(a={1: True}))
    assert (verdict.score, verdict.satisfied, verdict.valid) == (0.75, ("a",), True)


def test_weights_of_satisfied_items_add_up():
    assert judged(TWO, [OK], Told(a={0: True}, b={0: True})).score == 1.0


def test_every_pair_of_step_and_item_is_asked_once():
    judge = Told()
    judged(TWO, [OK, OK], judge)
    assert sorted(judge.asked) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_calls_and_results_of_a_failed_step_are_not_asked_about():
    judge = Told(text={0: True})
    verdict = judged(FOCUSED, [BAD, OK], judge)
    assert sorted(judge.asked) == [("call", 1), ("result", 1), ("text", 0), ("text", 1)]
    assert verdict.satisfied == ("text",)


def test_a_failed_call_makes_the_turn_worth_nothing_now_and_later():
    everything = Told(a={0: True, 1: True}, b={0: True, 1: True})
    assert judged(TWO, [OK, BAD], everything).score == 0.0
    assert judged(TWO, [OK], everything, failed_before=True).score == 0.0


def test_a_required_item_decides_whether_the_next_turn_begins():
    task = make_task({"id": "a", "weight": 0.5, "required_for_next_turn": True}, {"id": "b", "weight": 0.5})
    assert not judged(task, [OK], Told(b={0: True})).proceed
    assert judged(task, [OK], Told(a={0: True})).proceed


def test_no_verdict_is_not_a_zero():
    assert not judged(TWO, [OK], Told(a={0: None})).valid
    assert not judged(TWO, [OK, OK], Told(a={0: False, 1: None})).valid


def test_no_verdict_does_not_matter_where_another_step_satisfies_the_item_or_the_score_is_zero_anyway():
    verdict = judged(TWO, [OK, OK], Told(a={0: None, 1: True}))
    assert (verdict.valid, verdict.score) == (True, 0.75)
    assert judged(TWO, [BAD, OK], Told(a={0: None})).valid


def test_a_turn_without_items_scores_nothing_and_goes_on():
    verdict = judged(dataclasses.replace(TWO, checklist=((),)), [OK], Told())
    assert (verdict.score, verdict.proceed, verdict.valid) == (0.0, True, True)


@pytest.mark.parametrize(
    ("scores", "turns", "reward"), [([1.0, 0.5], 2, 0.75), ([1.0], 4, 0.25), ([], 2, 0.0), ([], 0, 0.0)]
)
def test_turns_not_reached_count_nothing(scores, turns, reward):
    assert episode_reward(scores, turns) == reward
