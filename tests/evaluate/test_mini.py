"""Success in the embedded world, measured on clerks whose every word is prepared."""

import dataclasses
import io
import random

import pytest
from rich.console import Console

from envace_jax.config import Config, EvalConfig
from envace_jax.evaluate import during_training, evaluate_mini
from envace_jax.evaluate.mini import SETTINGS, _do_nothing
from envace_jax.evaluate.results import Result, from_figures, print_result
from envace_jax.rollout import ACT, encode_conversation
from envace_jax.tasks.mini import mini_tasks
from envace_jax.tasks.mini.demos import play_task
from tests.rollout.conftest import ScriptedEngine

TASKS = list(mini_tasks("test", 12))


def scripts(chat, conversations):
    out = []
    for task, messages in zip(TASKS, conversations, strict=True):
        t = encode_conversation(chat, messages, task.tools, thinking=False)
        out.append([t.tokens[t.generations == g] for g, role in t.generation_roles().items() if role == ACT])
    return out


def figures(chat, conversations):
    engine = ScriptedEngine(scripts(chat, conversations), slots=4, max_length=3000)
    settings = dataclasses.replace(SETTINGS, max_length=3000, turn_tokens=500)
    return evaluate_mini(None, engine, chat, TASKS, settings=settings, greedy=False, fidelity_tasks=0)


def test_the_expert_succeeds_everywhere(chat):
    found = figures(chat, [task.messages for task in TASKS])
    assert found["eval/success"] == found["eval/state"] == found["eval/parse_rate"] == found["eval/finish_done"] == 1.0
    assert found["eval/reward"] == pytest.approx(1.0)
    kinds = [name for name in found if name.startswith("eval/success/") and name.count("_") == name.count("ship_all")]
    assert kinds and all(found[name] == 1.0 for name in kinds)
    assert found["eval/success_count"] == 12


def test_a_clerk_who_gives_up_never_succeeds_but_leaves_the_state_that_nothing_would(chat):
    quits = [play_task(t.messages, t.meta, random.Random(0), {"quit": 1.0})[0] for t in TASKS]
    found = figures(chat, quits)
    assert found["eval/success"] == found["eval/do_nothing"] == 0.0
    unchanged = sum(t.meta["records"] == t.meta["final_records"] for t in TASKS) / len(TASKS)
    assert found["eval/state"] == found["eval/state_unchanged"] == pytest.approx(unchanged)


def test_doing_nothing_would_count_where_nothing_is_asked_for():
    task = TASKS[0]
    idle = {"final_records": task.meta["records"], "replies": [[] for _ in task.user_turns]}
    assert _do_nothing(dataclasses.replace(task, meta=task.meta | idle))
    assert not _do_nothing(task)


def test_a_right_reply_after_a_wrong_state_is_no_success(chat):
    """Saying that everything is done, without doing it."""
    told = [[m for m in task.messages if m["role"] in ("system", "user") or not m.get("tool_calls")] for task in TASKS]
    told = [[m for m in messages if m["role"] != "tool"] for messages in told]
    found = figures(chat, told)
    assert found["eval/success"] == found["eval/state_unchanged"]


def test_figures_print_as_a_table(chat):
    found = figures(chat, [task.messages for task in TASKS])
    text = io.StringIO()
    print_result(Result("mini", {"model": "m"}, from_figures(found)), Console(file=text, width=100))
    (row,) = [line for line in text.getvalue().splitlines() if "│ success " in line]
    assert "1.000" in row and "0.758 – 1.000" in row


def test_no_callback_where_a_run_does_not_evaluate():
    assert during_training(Config("m", "o")) is None
    assert during_training(Config("m", "o", evaluation=EvalConfig(every=5))) is not None
