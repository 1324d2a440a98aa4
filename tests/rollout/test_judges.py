"""The judge of a run: verdicts that do not come, and what becomes of those who wait for them."""

import threading
import time

import numpy as np
import pytest

from envace_jax.config import ConfigError, RewardConfig, from_dict
from envace_jax.errors import EndpointError
from envace_jax.rewards import Question, Step
from envace_jax.rollout import Trajectory
from envace_jax.rollout.judges import Judging
from envace_jax.tasks import parse_task
from tests.rewards.endpoint import Endpoint, slow, status, verdict


def episode(number, finish="done", valid=True):
    zeros = np.zeros(1, np.int32)
    return Trajectory(
        tokens=zeros,
        roles=zeros,
        generations=zeros,
        behavior_logps=zeros.astype(np.float32),
        trajectory=number,
        finish=finish,
        valid=valid,
    )


@pytest.fixture
def judging(tmp_path):
    """judging(endpoint) -> a `Judging` that asks there."""
    made = []

    def make(endpoint, **settings):
        section = {"judge": {"base_url": endpoint.url, "model": "m", "tries": 1}, **settings}
        made.append((endpoint, Judging(from_dict(RewardConfig, section), tmp_path, unruled="t", episodes=4)))
        return made[-1][1]

    yield make
    for endpoint, judging in made:
        judging.close()
        endpoint.close()


def question(reply):
    item = {"id": "a", "question": "?", "focus_on": "assistant.content", "pass_condition": "p", "weight": 1.0}
    messages = [{"role": "user", "content": "u"}]
    task = parse_task({"uuid": "t", "messages": messages, "tools": [], "checklists": [[[item]]]})
    return Question(task, 0, 0, task.checklist[0][0], messages, [Step({"role": "assistant", "content": reply})], True)


def test_a_task_that_nobody_can_judge_stops_the_run_at_its_start(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.judge\.base_url"):
        Judging(RewardConfig(), tmp_path, unruled="t", episodes=4)


def test_rules_need_no_threads_and_have_no_figures(tmp_path):
    with Judging(RewardConfig(), tmp_path, unruled=None, episodes=4) as judging:
        assert judging.pool is None and judging.check([episode(0)]) == {}
    assert list(tmp_path.iterdir()) == []


def test_episodes_without_a_verdict_are_counted_once_and_those_of_a_failed_world_not(judging):
    run = judging(Endpoint(status(500)), max_unjudged_fraction=0.25)
    run.judge.answer([question("a")])
    few = [episode(i) for i in range(4)] + [episode(4, "judge_failed", False), episode(5, "world_failed", False)]
    parts_of_one = [episode(4, "judge_failed", False)] * 3
    assert run.check(few + parts_of_one)["judge/no_verdict"] == 1
    with pytest.raises(EndpointError, match=r"2 of 7 episodes .*max_unjudged_fraction=0\.25.*500"):
        run.check([*few, episode(6, "done", False)])


def test_a_world_that_does_not_answer_stops_the_run_too(tmp_path):
    with Judging(RewardConfig(max_unjudged_fraction=0.5), tmp_path, unruled=None, episodes=4) as run:
        lost = [episode(i, "world_failed", False) for i in range(2)]
        assert run.check([*lost, episode(2), episode(3)]) == {}
        with pytest.raises(EndpointError, match=r"2 of 3 episodes .* no answer.*world\.endpoint"):
            run.check([*lost, episode(2)])


def test_verdicts_are_waited_for_side_by_side(judging):
    run = judging(Endpoint(slow(0.4, verdict())))
    began = time.monotonic()
    waiting = [run.pool.submit(run.judge.answer, [question(str(i))]) for i in range(4)]
    assert time.monotonic() - began < 0.4, "asking must not wait"
    assert [future.result() for future in waiting] == [[True]] * 4
    assert run.check([episode(0)])["judge/requests"] == 4


def test_closing_leaves_no_thread_behind_that_waits(judging):
    run = judging(Endpoint(slow(60, verdict())))
    waiting = [run.pool.submit(run.judge.answer, [question(str(i))]) for i in range(6)]
    time.sleep(0.3)
    run.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("verdict")]
    # Those in flight give up; one that had not begun is either cancelled or finds the judge closed.
    answers = [future.result() for future in waiting if not future.cancelled()]
    assert answers and all(answer == [None] for answer in answers)
