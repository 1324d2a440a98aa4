"""Every setting of the method through the real engine, two steps each: judges, worlds, roles, terms of the objective.

The policy is a scripted Qwen3 (see `chain`), so that calls are made, responses are rehearsed, and episodes end in every
way. What it says of a token must be what the trainer says of it: `logps/sampler_trainer_diff` tells whether rows,
segments and parameters are those that the token was sampled with.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from envace_jax.errors import EndpointError
from envace_jax.tasks import read_tasks
from envace_jax.train import load_model, run
from envace_jax.train.optim import named
from envace_jax.train.record import read_metrics
from tests.rewards.endpoint import Endpoint, says, status
from tests.train.chain import (
    DREAMT,
    EVERY_TERM,
    SCRIPTS,
    TAGGED,
    THOUGHT,
    VERL,
    decide,
    make_run,
    save_scripted,
    write_tasks,
)

pytestmark = pytest.mark.slow(reason="compiles rollout and update")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "scripted.jsonl")


@pytest.fixture(scope="module")
def policies(scripted, tmp_path_factory) -> dict[str, Path]:
    """By `world.form`."""
    return {form: save_scripted(tmp_path_factory.mktemp(form), form, scripted) for form in SCRIPTS}


@pytest.fixture
def train(policies, scripted, tmp_path):
    """train(tasks=..., **sections) -> (run directory, its metrics), of two steps."""

    def start(tasks=scripted, **sections):
        policy = policies[sections.get("world", {}).get("form", "inline")]
        out = run(make_run(policy, tmp_path / "run", tasks, **sections))
        return out, read_metrics(out)

    return start


def episodes(out, step):
    return [json.loads(line) for line in (out / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def results(out, steps=(1, 2)):
    """Contents of all tool messages that actors saw."""
    return [m["content"] for s in steps for t in episodes(out, s) for m in t["messages"] if m["role"] == "tool"]


def assert_scored_as_sampled(lines, *names):
    for name in ("logps/sampler_trainer_diff", *names):
        assert all(line[name] < 1e-4 for line in lines), name


@pytest.fixture
def judge():
    endpoint = Endpoint(decide)
    yield endpoint
    endpoint.close()


def test_a_judge_scores_public_tasks_and_a_run_that_goes_on_asks_it_nothing_twice(train, judge):
    reward = {"judge": {"base_url": judge.url, "model": "m"}}
    out, lines = train(tasks=VERL, reward=reward)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["judge/questions"] > 0 and line["judge/no_verdict"] == 0 for line in lines)
    assert all(line["episodes/valid_fraction"] == 1.0 for line in lines)
    assert sum(line["reward/std"] for line in lines) > 0 and max(line["grad/norm"] for line in lines) > 0
    assert_scored_as_sampled(lines)
    assert {t["task"] for step in (1, 2) for t in episodes(out, step)} <= {task.id for task in read_tasks(str(VERL))}
    assert all(request["response_format"]["type"] == "json_schema" for request in judge.requests)

    # As if the process had been killed when step 2 was judged and not yet saved.
    before = len(judge.requests)
    shutil.rmtree(out / "checkpoints" / "2")
    _, again = train(tasks=VERL, reward=reward)
    assert len(judge.requests) == before
    assert again[1]["judge/requests"] == 0 and again[1]["judge/cache_hits"] == again[1]["judge/questions"]
    same = ("reward/mean", "loss/total", "grad/norm", "judge/questions")
    assert [again[1][name] for name in same] == [lines[1][name] for name in same]
    shown = [json.dumps(request["messages"]) for request in judge.requests]
    assert len(shown) == len(set(shown))


def test_a_judge_that_is_down_stops_the_run_before_it_trains_on_noise(train, tmp_path):
    down = Endpoint(status(500))
    with pytest.raises(EndpointError, match=r"have no verdict, more than reward.max_unjudged_fraction=0\.2; .*500"):
        train(tasks=VERL, reward={"judge": {"base_url": down.url, "model": "m", "tries": 1}})
    down.close()
    assert read_metrics(tmp_path / "run") == []


@pytest.mark.parametrize("form", ["inline", "simulator"])
def test_two_copies_rehearse_and_act_by_their_own_parameters(train, policies, form):
    references = {"reference_results": True} if form == "simulator" else {}
    out, lines = train(world={"form": form, "split_parameters": True, **references})
    assert all(line["tokens/act"] > 0 and line["tokens/rehearse"] > 0 for line in lines)
    assert DREAMT in results(out)
    # In the second step both have moved: who had sampled by the other's parameters would be found out.
    assert_scored_as_sampled(lines, "rehearser/logps/sampler_trainer_diff")
    start, actor, rehearser = (named(nnx.state(load_model(p))) for p in (policies[form], out, out / "rehearser"))
    moved = [any(np.any(a[k] != b[k]) for k in a) for a, b in ((start, actor), (start, rehearser), (actor, rehearser))]
    assert all(moved)
    assert (out / "checkpoints" / "2").is_dir() and (out / "rehearser" / "checkpoints" / "2").is_dir()


@pytest.mark.parametrize("form", ["inline", "simulator"])
def test_some_responses_are_real_and_the_others_rehearsed(train, form):
    out, lines = train(world={"kind": "mixed", "form": form, "real_fraction": 0.5})
    seen = results(out)
    assert DREAMT in seen and any('"item": "lamp"' in result for result in seen)
    assert all(line["tokens/rehearse"] > 0 for line in lines)
    assert_scored_as_sampled(lines)


def test_another_model_simulates_and_earlier_reasoning_is_dropped(train):
    simulator = Endpoint(says(TAGGED))
    world = {"kind": "external", "history_reasoning": "drop", "endpoint": {"base_url": simulator.url, "model": "m"}}
    out, lines = train(world=world)
    simulator.close()
    assert len(simulator.requests) == len(results(out)) > 0 and set(results(out)) == {DREAMT}
    assert all(line["tokens/rehearse"] == 0 and line["grad/norm"] > 0 for line in lines)
    # A second user turn begins a prompt of its own, in which no earlier thought is left.
    second = [t for step in (1, 2) for t in episodes(out, step) if t["text"].count("Do 1.") == 1]
    prompts = [t["text"].rpartition("<|im_start|>system")[2].partition("Do 1.")[0] for t in second]
    assert any(THOUGHT in t["text"].partition("Do 1.")[0] for t in second)
    assert prompts and not any(THOUGHT in prompt for prompt in prompts)
    assert_scored_as_sampled(lines)


def test_every_term_of_the_objective_is_reached_by_configuration(train):
    _, lines = train(**EVERY_TERM)
    for role in ("", "act_", "rehearse_"):
        for name in (
            "clip/{}fraction",
            "clip/{}dual_fraction",
            "ratio/{}mean",
            "advantage/{}abs",
            "kl/{}reference",
            "entropy/{}mean",
            "correction/{}weight",
            "correction/{}capped_fraction",
            "logps/{}approx_kl",
            "logps/{}sampler_trainer_kl",
        ):
            assert all(np.isfinite(line[name.format(role)]) for line in lines), name.format(role)
    first, second = lines
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-6), "the policy begins as its reference"
    assert second["kl/reference"] > 1e-6, "and the reference stays"
    assert first["entropy/act_mean"] > 0 and first["correction/weight"] == pytest.approx(1.0, abs=1e-3)
    assert first["advantage/rehearse_abs"] > 0
    assert all(0 < line["batch/pad_fraction"] < 1 for line in lines)


def test_episodes_that_a_budget_cut_are_left_out_where_they_are_masked(train):
    out, lines = train(reward={"overlong": "mask"}, rollout={"max_length": 100})
    cut = [line["finish/length"] for line in lines]
    assert min(cut) > 0 and all(line["episodes/valid_fraction"] == 1.0 for line in lines)
    for step in (1, 2):
        for t in episodes(out, step):
            assert t["valid"] == (t["finish"] != "length")
            assert t["valid"] or not any(t["advantages"].values())
