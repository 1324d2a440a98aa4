"""Which judge answers what, what the configuration must say for it, and when too few verdicts stop a run."""

import pytest

from envace_jax.config import ConfigError, RewardConfig, from_dict
from envace_jax.errors import EndpointError
from envace_jax.rewards import Question, RoutedJudge, Step, make_judge, require_verdicts
from envace_jax.tasks import parse_task
from tests.rewards.endpoint import Endpoint, says, status, verdict


def questions(*rules):
    base = {"focus_on": "assistant.content", "pass_condition": "p", "weight": 1 / len(rules)}
    items = [
        {**base, "id": str(i), "question": f"{i}?"} | ({"rule": rule} if rule else {}) for i, rule in enumerate(rules)
    ]
    messages = [{"role": "user", "content": "u"}]
    task = parse_task({"uuid": "t", "messages": messages, "tools": [], "checklists": [[items]]})
    step = Step({"role": "assistant", "content": "Done."})
    return [Question(task, 0, 0, item, messages, [step], ends_turn=True) for item in task.checklist[0]]


class Always:
    def __init__(self, answer):
        self.verdict, self.asked = answer, []

    def answer(self, questions):
        self.asked += [q.item.id for q in questions]
        return [self.verdict] * len(questions)


RULE = {"kind": "calls_made", "calls": []}


def config(**values):
    return from_dict(RewardConfig, values)


@pytest.fixture
def endpoint():
    running = Endpoint(says(verdict()))
    yield running
    running.close()


def test_items_with_a_rule_are_not_asked_about():
    llm, rules = Always(True), Always(False)
    judge = RoutedJudge(llm, rules)
    assert judge.answer(questions(None, RULE, None)) == [True, False, True]
    assert (llm.asked, rules.asked) == (["0", "2"], ["1"])
    assert judge.answer([]) == []


def test_without_an_endpoint_rules_answer_and_the_rest_has_no_verdict():
    judge = make_judge(config())
    assert judge.answer(questions(RULE, None)) == [True, None]
    assert not judge.waits and judge.metrics() == {}


def test_a_task_that_nobody_can_judge_is_refused_naming_the_key():
    with pytest.raises(ConfigError, match=r"task 't9' .* set reward\.judge\.base_url"):
        make_judge(config(), unruled="t9")


def test_an_endpoint_needs_a_model():
    with pytest.raises(ConfigError, match=r"reward\.judge\.model"):
        make_judge(config(judge={"base_url": "http://127.0.0.1:1/v1"}))


def test_the_configured_endpoints_are_asked_in_turn_with_the_configured_sampling(endpoint, monkeypatch):
    other = Endpoint(says(verdict()))
    monkeypatch.setenv("JUDGE_KEY", "k1")
    settings = {
        "base_url": endpoint.url,
        "model": "m",
        "temperature": 0.1,
        "max_new_tokens": 9,
        "api_key_env": "JUDGE_KEY",
    }
    judge = make_judge(config(judge=settings, endpoints=[other.url, endpoint.url]), unruled="t")
    assert judge.waits and judge.answer(questions(None, None, None, None)) == [True] * 4
    judge.close()
    other.close()
    assert (len(endpoint.requests), len(other.requests)) == (2, 2)
    request = endpoint.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"], request["key"]) == (
        "m",
        0.1,
        9,
        "Bearer k1",
    )


def test_verdicts_are_kept_in_the_run_directory(endpoint, tmp_path):
    for _ in range(2):
        judge = make_judge(config(judge={"base_url": endpoint.url, "model": "m"}), tmp_path)
        assert judge.answer(questions(None)) == [True]
        figures = judge.metrics()
        judge.close()
    assert len(endpoint.requests) == 1 and (figures["judge/requests"], figures["judge/cache_hits"]) == (0, 1)
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 1


def test_verdicts_may_be_kept_elsewhere_and_by_process(endpoint, tmp_path):
    settings = config(judge={"base_url": endpoint.url, "model": "m"}, cache=str(tmp_path / "all" / "v.jsonl"))
    judge = make_judge(settings, tmp_path, process=3)
    judge.answer(questions(None))
    judge.close()
    assert [p.name for p in (tmp_path / "all").iterdir()] == ["v-3.jsonl"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"reward\.cache="):
        make_judge(config(judge={"base_url": endpoint.url, "model": "m"}, cache=str(tmp_path / "file" / "v.jsonl")))


def test_too_many_episodes_without_a_verdict_stop_the_run_with_the_reason():
    failing = Endpoint(status(503))
    settings = config(judge={"base_url": failing.url, "model": "m", "tries": 1}, max_unjudged_fraction=0.25)
    judge = make_judge(settings)
    judge.answer(questions(None))
    require_verdicts(2, 8, settings, judge)
    require_verdicts(0, 0, settings, judge)
    with pytest.raises(EndpointError, match=r"3 of 8 episodes .*max_unjudged_fraction=0\.25; .*503"):
        require_verdicts(3, 8, settings, judge)
    judge.close()
    failing.close()


@pytest.mark.parametrize(
    "values",
    [{"max_unjudged_fraction": 1.5}, {"judge": {"tries": 0}}, {"judge": {"timeout_s": 0}}, {"endpoints": "http://x"}],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        config(**values)
