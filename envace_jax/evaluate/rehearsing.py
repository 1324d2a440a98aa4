"""`envace evaluate rehearse`: what rehearsal at test time is worth in the embedded world, and what it costs.

Every task is played in the real shop, once, all tasks side by side. Success is that of `envace evaluate mini`: the
right final state and the right replies. Beside it stand what it cost in sampled tokens and seconds, and how often
reality departed from what had been rehearsed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envace_jax.chat import ChatTokenizer
from envace_jax.config import ConfigError
from envace_jax.evaluate.mini import SETTINGS as MINI
from envace_jax.evaluate.mini import SLOTS, _do_nothing, _make_engine, _replies_right
from envace_jax.evaluate.results import Measure, Result, mean_measure, report, share_measure
from envace_jax.evaluate.show import progress_bar
from envace_jax.rehearse import (
    ACTOR,
    PLANNER,
    REHEARSER,
    Course,
    LocalPolicy,
    Policy,
    RehearseSettings,
    act_task,
    drive,
    save_decisions,
    together,
)
from envace_jax.tasks import Task
from envace_jax.tasks.mini import Shop, mini_tasks

MANY = 200  # tasks


def evaluate_rehearsal(
    policies: Mapping[str, Policy],
    tasks: Sequence[Task],
    settings: RehearseSettings,
    at_once: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Measure], list[Course]]:
    """Measures by name, and what happened in each task.

    policies: who acts, plans and rehearses, by those names. at_once: how many tasks go on side by side; None: all.
    progress: called with the numbers of finished and of all tasks.
    """
    shops = [Shop(task.meta["records"]) for task in tasks]
    began = time.perf_counter()
    courses = drive(
        together(
            [
                act_task(task.prompt, task.user_turns, task.tools, shop, settings, policies[ACTOR], episode=i)
                for i, (task, shop) in enumerate(zip(tasks, shops, strict=True))
            ],
            at_once,
            progress or (lambda ended, of: None),
        ),
        policies,
    )
    seconds = time.perf_counter() - began
    state = [list(s.records.values()) == t.meta["final_records"] for s, t in zip(shops, tasks, strict=True)]
    solved = [
        right and course.finish == "done" and _replies_right(task, course.messages)
        for right, course, task in zip(state, courses, tasks, strict=True)
    ]
    each = range(len(tasks))
    calls = sum(d.call is not None and bool(d.rehearsed) for c in courses for d in c.decisions)
    return {
        "success": share_measure(solved),
        "state": share_measure(state),
        "finish_done": share_measure([c.finish == "done" for c in courses]),
        "plan_tokens": mean_measure([c.plan_tokens for c in courses], each),
        "act_tokens": mean_measure([c.act_tokens for c in courses], each),
        "rehearsals": mean_measure([c.rehearsals for c in courses], each),
        "departures": Measure(sum(c.departures for c in courses) / max(calls, 1), count=calls),
        "seconds": Measure(seconds / max(len(tasks), 1)),
    }, courses


def rehearsal(
    model: str,
    *,
    base: str | None = None,
    base_plays: str = "rehearser",
    tasks: int = 64,
    split: str = "test",
    visibility: str = "full",
    seed: int = 0,
    settings: RehearseSettings | None = None,
    max_length: int = 1024,
    decisions: str | Path | None = None,
    as_json: bool = False,
    out: str | Path | None = None,
) -> Result:
    """Measures a model directory, prints the result and returns it.

    base: another model directory that takes a part: "rehearser" (it answers the calls of the plans) or "planner" (it
    makes whole plans). decisions: a new file for every decision, as JSON lines.
    Raises EnvaceError for a model or a setting that must be mended.
    """
    from envace_jax.train import load_model, tokenizer_directory

    settings = RehearseSettings() if settings is None else settings
    if base_plays not in (REHEARSER, PLANNER):
        raise ConfigError(f"base_plays is {REHEARSER} or {PLANNER}, found {base_plays!r}")
    try:
        chosen = list(mini_tasks(split, tasks, visibility=visibility))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    own = local_policy(
        load_model(model), ChatTokenizer.from_pretrained(tokenizer_directory(model)), chosen, max_length, seed
    )
    policies = dict.fromkeys((ACTOR, PLANNER, REHEARSER), own)
    if base is not None:
        chat = ChatTokenizer.from_pretrained(tokenizer_directory(base))
        other = local_policy(load_model(base), chat, chosen, max_length, seed)
        policies |= {REHEARSER: other} | ({PLANNER: other} if base_plays == PLANNER else {})
    with progress_bar("tasks") as progress:
        measures, courses = evaluate_rehearsal(policies, chosen, settings, side_by_side(settings), progress)
    if decisions is not None:
        Path(decisions).write_text("", encoding="utf-8")
        for course in courses:
            save_decisions(course.decisions, decisions)
    setting: dict[str, Any] = {"model": model, "base": base, "tasks": tasks, "split": split, "visibility": visibility}
    if base is not None:
        setting["base_plays"] = base_plays
    setting |= {"seed": seed, "max_length": max_length, **dataclasses.asdict(settings)}
    floor = sum(map(_do_nothing, chosen)) / len(chosen)
    result = Result("rehearse", setting, measures, {"do_nothing": {"success": floor}})
    report(result, as_json=as_json, out=out)
    return result


def side_by_side(settings: RehearseSettings) -> int:
    """Of how many tasks at once an engine's slots hold the streams that go on: the actor's, and those of the plans that
    are being made."""
    return max(1, SLOTS // (1 + (settings.plans if settings.mode == "parallel" else 1)))


def local_policy(model: Any, chat: ChatTokenizer, tasks: Sequence[Task], max_length: int, seed: int) -> LocalPolicy:
    """A model of this process as a policy, with an engine for `tasks` and without thinking."""
    settings = dataclasses.replace(MINI, max_length=max_length)
    # Streams grow by a few tokens again and again: over many tasks, programs for small pieces are worth compiling.
    engine = _make_engine(model, chat, tasks, settings, coarse=False if len(tasks) >= MANY else None)
    budgets = {"turn_tokens": MINI.turn_tokens, "response_tokens": MINI.response_tokens}
    return LocalPolicy(engine, model, chat, seed=seed, thinking=False, **budgets)
