"""Every setting of the method through the real engine, two steps each: judges, worlds, roles, terms of the objective.

The policy is a scripted Qwen3 (see `chain`), so that calls are made, responses are rehearsed, and episodes end in every
way. What it says of a token must be what the trainer says of it: `logps/sampler_trainer_diff` tells whether rows,
segments and parameters are those that the token was sampled with.
"""

import dataclasses
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from envace_jax.errors import EndpointError
from envace_jax.rollout import Simulator
from envace_jax.tasks import read_tasks
from envace_jax.train import load_model, run
from envace_jax.train.optim import named
from envace_jax.train.record import read_metrics
from tests.rewards.endpoint import Endpoint, says, status, verdict
from tests.rollout.conftest import make_task
from tests.train.chain import save_chain
from tests.train.runs import make_config

pytestmark = pytest.mark.slow(reason="compiles rollout and update")

CALL = '{"name": "get_order", "arguments": {"order": 111}}'
DREAMT, REJECTED = '{"dreamt": 1}', '{"error_tool_call": {}}'
TAGGED = f"<execution_result>{DREAMT}</execution_result>"
REPLY, THOUGHT = "Done 0.", "Let me see."
ACTS = {
    "call_open": {CALL: 1.0},
    CALL: {"call_close": 1.0},
    "call_close": {"im_end": 0.8, "call_open": 0.2},
    "think_open": {THOUGHT: 1.0},
    THOUGHT: {"think_close": 1.0},
    "think_close": {REPLY: 0.6, "call_open": 0.4},
    REPLY: {"im_end": 0.9, "endoftext": 0.1},
}
INLINE = ACTS | {
    "\n\n": {"call_open": 0.5, REPLY: 0.3, "think_open": 0.2},  # the actor begins
    "\n": {DREAMT: 0.9, REJECTED: 0.1},  # the rehearser begins
    DREAMT: {"response_close": 1.0},
    REJECTED: {"response_close": 1.0},
}
# Under prompts of their own rehearsals begin as acts do.
PROMPTED = ACTS | {
    "\n\n": {"call_open": 0.4, REPLY: 0.2, TAGGED: 0.4},
    TAGGED: {"im_end": 1.0},
}


@pytest.fixture(scope="module")
def verl(fixtures_dir) -> Path:
    """Tasks in the public format, whose items only a judge can answer."""
    return fixtures_dir / "tasks" / "verl.parquet"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> Path:
    """Two tasks of two user turns, with rules and an executable environment."""
    path = tmp_path_factory.mktemp("tasks") / "scripted.jsonl"
    items = [{"id": "a", "question": "?", "focus_on": "assistant.content", "pass_condition": "p", "weight": 1.0}]
    items[0]["rule"] = {"kind": "reply_states", "statements": ["Done 0"]}
    task = make_task(2, [items, items])
    records = [dataclasses.replace(task, id=name).to_json() for name in ("one", "two")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def policies(verl, scripted, tmp_path_factory) -> dict[str, Path]:
    """By `world.form`."""
    tasks = [task for path in (verl, scripted) for task in read_tasks(str(path))]
    prompts = [m["content"] for task in tasks for m in task.messages]
    prompts += [json.dumps(tool) for task in tasks for tool in task.tools]
    prompts += [m["content"] for m in Simulator().messages(tasks[-1], [], "", call())]
    made = {"inline": INLINE, "simulator": PROMPTED}
    return {form: save_chain(tmp_path_factory.mktemp(form), script, prompts) for form, script in made.items()}


def call():
    from envace_jax.chat import ToolCall

    return ToolCall("get_order", {"order": 111})


@pytest.fixture
def train(policies, scripted, tmp_path):
    """train(steps=2, **sections) -> (run directory, its metrics)."""

    def start(steps=2, tasks=scripted, **sections):
        form = sections.get("world", {}).get("form", "inline")
        length = {"inline": 256, "simulator": 512}[form]
        rollout = dict(
            group_size=4, tasks_per_step=2, max_length=length, turn_tokens=12, response_tokens=8, max_turns=5
        )
        settings = {
            "tasks": {"kind": "checklist", "path": str(tasks)},
            "rollout": rollout | sections.pop("rollout", {}),
            "train": {"save_every": 1, "micro_batch": 4, "learning_rate": 1e-3} | sections.pop("train", {}),
            "logging": {"trajectories_every": 1},
        }
        out = run(make_config(policies[form], tmp_path / "run", steps, **settings, **sections))
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
    """A judge whose verdict depends on what it is shown alone."""

    def decide(handler):
        handler.reply(verdict(zlib.crc32(handler.asked["messages"][1]["content"].encode()) % 3 > 0))

    endpoint = Endpoint(decide)
    yield endpoint
    endpoint.close()


def test_a_judge_scores_public_tasks_and_a_run_that_goes_on_asks_it_nothing_twice(train, verl, judge):
    reward = {"judge": {"base_url": judge.url, "model": "m"}}
    out, lines = train(tasks=verl, reward=reward)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["judge/questions"] > 0 and line["judge/no_verdict"] == 0 for line in lines)
    assert all(line["episodes/valid_fraction"] == 1.0 for line in lines)
    assert sum(line["reward/std"] for line in lines) > 0 and max(line["grad/norm"] for line in lines) > 0
    assert_scored_as_sampled(lines)
    assert {t["task"] for step in (1, 2) for t in episodes(out, step)} <= {task.id for task in read_tasks(str(verl))}
    assert all(request["response_format"]["type"] == "json_schema" for request in judge.requests)

    # As if the process had been killed when step 2 was judged and not yet saved.
    before = len(judge.requests)
    shutil.rmtree(out / "checkpoints" / "2")
    _, again = train(tasks=verl, reward=reward)
    assert len(judge.requests) == before
    assert again[1]["judge/requests"] == 0 and again[1]["judge/cache_hits"] == again[1]["judge/questions"]
    same = ("reward/mean", "loss/total", "grad/norm", "judge/questions")
    assert [again[1][name] for name in same] == [lines[1][name] for name in same]
    shown = [json.dumps(request["messages"]) for request in judge.requests]
    assert len(shown) == len(set(shown))


def test_a_judge_that_is_down_stops_the_run_before_it_trains_on_noise(train, verl, tmp_path):
    down = Endpoint(status(500))
    with pytest.raises(EndpointError, match=r"have no verdict, more than reward.max_unjudged_fraction=0\.2; .*500"):
        train(tasks=verl, reward={"judge": {"base_url": down.url, "model": "m", "tries": 1}})
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
    out, lines = train(
        rollout={"max_refills": 1, "max_length": 160},
        reward={"overlong": "shape", "overlong_buffer": 160},
        advantage={"baseline": "generation", "scale_by_std": True, "leave_one_out": True},
        grpo={
            "ratio": "sequence",
            "aggregate": "seq-mean-token-mean",
            "kl": "k3+",
            "kl_coef": 0.1,
            "sampler_correction": "sequence",
            "entropy_coef": 0.01,
            "role_weights": [1.0, 0.5],
        },
        train={"old_logps": "recompute", "updates_per_batch": 2},
    )
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
