"""The embedded world as a benchmark: success in the executable shop, and how true rehearsals are.

A task succeeds when the shop ends in the recorded final state and every reply states what the recorded one does. The
floors say what these figures are worth: a clerk that does nothing, and how often nothing had to change. Fidelity is
teacher-forced, over the calls of the expert and of clerks with mixed habits, who ask for what the expert never would.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from envace_jax.chat import ChatTokenizer
from envace_jax.config import Config, RolloutConfig
from envace_jax.errors import ConfigError
from envace_jax.evaluate.agreement import agreement
from envace_jax.evaluate.rehearsals import rehearse_recorded
from envace_jax.evaluate.statistics import share
from envace_jax.rollout import RealWorld, Trajectory, make_rules, run_episodes
from envace_jax.sampling import Engine
from envace_jax.tasks import Task
from envace_jax.tasks.mini import WRITES, mini_tasks
from envace_jax.tasks.mini.demos import HABIT_WEIGHTS, play_task
from envace_jax.tasks.mini.generate import HELD_OUT
from envace_jax.tasks.mini.policies import states
from models.qwen3 import Qwen3

SETTINGS = RolloutConfig(
    group_size=1,
    temperature=1.0,  # instead of it, evaluations say theirs
    thinking=False,
    max_turns=16,
    max_length=768,
    turn_tokens=128,
    response_tokens=96,
    look_every=32,
    engine="hosted",
)
SLOTS = 128
FIDELITY_TASKS = 200


def evaluate_mini(
    model: Qwen3,
    engine: Engine,
    chat: ChatTokenizer,
    tasks: Sequence[Task],
    *,
    settings: RolloutConfig = SETTINGS,
    temperature: float = 0.6,
    top_p: float = 0.95,
    seed: int = 0,
    greedy: bool = True,
    fidelity_tasks: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Figures by name, all floats: a function of its arguments alone. Several processes share the tasks.

        eval/success (+ _low, _high: Wilson, 95 %)        share of tasks solved at `temperature`; 0 is greedy
        eval/success/KIND, eval/success/held_out          of tasks with a goal of that kind; with a held-out pair
        eval/success_greedy                               with `greedy`
        eval/state                                        final state right, whatever was said
        eval/reward, eval/parse_rate, eval/finish_done    checklist reward; turns that could be read; whole episodes
        eval/do_nothing, eval/state_unchanged             floors: without a word; tasks whose final state is the first
        eval/fidelity_exact, eval/fidelity_nll            rehearsals against real responses; nats a token
        eval/fidelity_exact/SUBSET                        expert, habits, after_write, refused, by tool

        eval/rehearsed_reward, eval/replayed_reward, ...  of rehearsed episodes, and what they are worth in the shop
                                                          (`evaluate.agreement`)

    fidelity_tasks: how many of the tasks fidelity and agreement are measured on; None: all, 0: none.
    """
    # Both ways to sample share one prefill of each prompt, as the members of a group do.
    heats = (temperature, 0.0) if greedy and temperature > 0 else (temperature,)
    settings = dataclasses.replace(settings, group_size=len(heats), top_p=top_p)
    from envace_jax.train.processes import processes

    numbers = processes().share(len(tasks))
    own = tasks[numbers.start : numbers.stop]

    def played() -> list[dict[str, float]]:
        world = RealWorld()
        episodes = run_episodes(
            engine,
            model,
            chat,
            own,
            settings=settings,
            world=world,
            seed=seed,
            first_episode=numbers.start * len(heats),
            temperature=heats,
            progress=progress,
        )
        return [
            _score(t, task, list(world.started[t.trajectory].records.values()))
            for t, task in zip(episodes, (task for task in own for _ in heats), strict=True)
        ]

    everything = [score for scores in processes().each("evaluation", played, repeatable=True) for score in scores]
    by_heat = [everything[member :: len(heats)] for member in range(len(heats))]
    episodes = by_heat[0]
    solved = [score["solved"] for score in episodes]
    figures = _share("eval/success", solved)
    if len(by_heat) > 1:
        figures |= _share("eval/success_greedy", [score["solved"] for score in by_heat[1]])
    for name, chosen in _kinds(tasks).items():
        figures |= _share(f"eval/success/{name}", [solved[i] for i in chosen])
    generations = sum(score["generations"] for score in episodes)
    figures |= {
        "eval/tasks": float(len(tasks)),
        "eval/state": _mean([score["state"] for score in episodes]),
        "eval/reward": _mean([score["reward"] for score in episodes]),
        "eval/parse_rate": sum(score["parsed"] for score in episodes) / max(generations, 1),
        "eval/finish_done": _mean([score["done"] for score in episodes]),
        "eval/turns": generations / max(len(tasks), 1),
        "eval/do_nothing": _mean([_do_nothing(task) for task in tasks]),
        "eval/state_unchanged": _mean([task.meta["records"] == task.meta["final_records"] for task in tasks]),
    }
    chosen = tasks if fidelity_tasks is None else tasks[:fidelity_tasks]
    if chosen:
        figures |= _fidelity(engine, model, chat, chosen, settings, seed)
        alone = dataclasses.replace(settings, group_size=1)
        numbers = processes().share(len(chosen))

        def rehearsed() -> list[dict[str, Any]]:
            episodes = run_episodes(
                engine,
                model,
                chat,
                chosen[numbers.start : numbers.stop],
                settings=alone,
                seed=seed,
                first_episode=numbers.start,
                temperature=temperature,
            )
            return [{"reward": float(t.reward), "messages": list(t.messages)} for t in episodes]

        parts = processes().each("evaluation of rehearsed episodes", rehearsed, repeatable=True)
        figures |= agreement([SimpleNamespace(**t) for part in parts for t in part], chosen)
    return figures


def during_training(config: Config) -> Callable[[Qwen3, int], Mapping[str, float]] | None:
    """The evaluation callback of a run, (model, step) -> figures; None where `evaluation.every` is 0.

    The embedded world is measured whatever the run trains on, with the run's budgets and without thinking if it has
    none. The engine, and with it the compiled programs, is made at the first call.
    """
    if config.evaluation.every == 0:
        return None
    wanted = config.evaluation
    tasks = list(mini_tasks(wanted.split, wanted.tasks))
    settings = dataclasses.replace(config.rollout, engine="hosted", top_k=0)
    made: dict[str, Any] = {}

    def evaluate(model: Qwen3, step: int) -> dict[str, float]:
        if not made:
            from envace_jax.train import tokenizer_directory
            from envace_jax.train.job import read_tokenizer

            made["chat"] = read_tokenizer(tokenizer_directory(config.model), model.config)
            made["engine"] = _make_engine(model, made["chat"], tasks, settings)
        return evaluate_mini(
            model,
            made["engine"],
            made["chat"],
            tasks,
            settings=settings,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=config.seed,
            greedy=False,
            fidelity_tasks=32,
        )

    return evaluate


def mini(
    model: str,
    *,
    tasks: int = 64,
    split: str = "test",
    temperature: float = 0.6,
    top_p: float = 0.95,
    seed: int = 0,
    visibility: str = "full",
    thinking: bool = False,
    max_length: int = 768,
    as_json: bool = False,
    out: str | Path | None = None,
) -> dict[str, float]:
    """`envace evaluate mini MODEL`: measures a Hugging Face directory or a run directory, prints and returns figures.

    Raises EnvaceError for a model that cannot be loaded, ConfigError for an unknown split.
    """
    from envace_jax.evaluate.results import Result, from_figures, report
    from envace_jax.evaluate.show import progress_bar
    from envace_jax.train import load_model, tokenizer_directory
    from envace_jax.train.job import read_tokenizer

    try:
        chosen = list(mini_tasks(split, tasks, visibility=visibility))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    policy = load_model(model)
    chat = read_tokenizer(tokenizer_directory(model), policy.config)
    settings = dataclasses.replace(SETTINGS, thinking=thinking, max_length=max_length)
    engine = _make_engine(policy, chat, chosen, settings)
    with progress_bar("episodes") as progress:
        figures = evaluate_mini(
            policy,
            engine,
            chat,
            chosen,
            settings=settings,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            fidelity_tasks=FIDELITY_TASKS,
            progress=progress,
        )
    setting = {
        "model": model,
        "split": split,
        "tasks": tasks,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "visibility": visibility,
    }
    measures = from_figures(figures)
    floors = {"do_nothing": {"success": measures["do_nothing"].value, "state": measures["state_unchanged"].value}}
    report(Result("mini", setting, measures, floors), as_json=as_json, out=out)
    return figures


def _make_engine(
    model: Qwen3,
    chat: ChatTokenizer,
    tasks: Sequence[Task],
    settings: RolloutConfig,
    *,
    coarse: bool | None = None,
) -> Engine:
    """An engine whose prefill takes any of the prompts in one piece, with little padding, where the model lies.

    It compiles few programs, fewer still with `coarse`: a short evaluation is over before many would pay.
    """
    rules = make_rules(chat, settings)
    longest = max((len(rules.prompt(task)) for task in tasks), default=1)
    where = jax.tree.leaves(nnx.state(model))[0].sharding
    return Engine(
        model.config,
        slots=max(1, min(SLOTS, 2 * len(tasks))),
        max_length=settings.max_length,
        vocab_size=chat.vocab_size,
        prefill_chunk=min(-(-longest // 32) * 32, 512),
        min_window=512,
        compact=False,
        coarse=coarse,
        compile_ahead=settings.compile_ahead,
        mesh=where.mesh if isinstance(where, NamedSharding) else None,
    )


def _score(t: Trajectory, task: Task, final: list[Any]) -> dict[str, Any]:
    """What an evaluation counts of an episode that left the shop with the records `final`."""
    state = final == task.meta["final_records"]
    return {
        "state": state,
        "solved": state and t.finish == "done" and _replies_right(task, t.messages),
        "reward": float(t.reward),
        "parsed": int(t.info["parsed"]),
        "done": t.finish == "done",
        "generations": len(t.generation_roles()),
    }


def _replies_right(task: Task, messages: Sequence[Mapping[str, Any]]) -> bool:
    replies = _replies(messages)
    wanted = task.meta["replies"]
    return len(replies) == len(wanted) and all(states(*pair) for pair in zip(replies, wanted, strict=True))


def _replies(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the assistant told the user at the end of each user turn."""
    return [m["content"] or "" for m in messages if m["role"] == "assistant" and not m.get("tool_calls")]


def _do_nothing(task: Task) -> bool:
    """Whether a clerk that calls no tool and says nothing succeeds."""
    silent = [{"role": "assistant", "content": ""} for _ in task.user_turns]
    return task.meta["records"] == task.meta["final_records"] and _replies_right(task, silent)


def _kinds(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """Task numbers by kind of goal, a task with two goals under both, and those with a held-out pair."""
    kinds: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
        names = [goal["kind"] for goals in task.meta["goals"] for goal in goals]
        for name in sorted({*names, *(["held_out"] if tuple(names) in HELD_OUT else [])}):
            kinds.setdefault(name, []).append(i)
    return dict(sorted(kinds.items()))


def _fidelity(
    engine: Engine, model: Qwen3, chat: ChatTokenizer, tasks: Sequence[Task], settings: RolloutConfig, seed: int
) -> dict[str, float]:
    from envace_jax.train.processes import processes

    numbers = processes().share(len(tasks))
    own = tasks[numbers.start : numbers.stop]

    def rehearsed() -> list[dict[str, Any]]:
        if not own:  # more processes than tasks
            return []
        conversations = [(task.messages, task.tools) for task in own]
        for task in own:
            rng = random.Random(f"fidelity/{seed}/{task.id}")
            conversations.append((play_task(task.messages, task.meta, rng, HABIT_WEIGHTS)[0], task.tools))
        outcomes = rehearse_recorded(
            engine,
            model,
            chat,
            conversations,
            make_rules(chat, settings).grammar,
            writes=WRITES,
            thinking=settings.thinking,
        )
        return [
            {
                "expert": o.case.conversation < len(own),
                "after_write": o.case.after_write,
                "refused": o.case.refused,
                "tool": o.case.tool,
                "exact": bool(o.exact),
                "nll": float(o.nll),
                "tokens": int(o.tokens),
            }
            for o in outcomes
        ]

    outcomes = [o for part in processes().each("evaluation of rehearsals", rehearsed, repeatable=True) for o in part]
    subsets: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        "expert": lambda o: o["expert"],
        "habits": lambda o: not o["expert"],
        "after_write": lambda o: o["after_write"],
        "refused": lambda o: o["refused"],
    }
    figures = _share("eval/fidelity_exact", [o["exact"] for o in outcomes])
    figures["eval/fidelity_nll"] = sum(o["nll"] for o in outcomes) / max(sum(o["tokens"] for o in outcomes), 1)
    for name, belongs in subsets.items():
        figures |= _share(f"eval/fidelity_exact/{name}", [o["exact"] for o in outcomes if belongs(o)])
    for tool in sorted({o["tool"] for o in outcomes}):
        figures |= _share(f"eval/fidelity_exact/{tool}", [o["exact"] for o in outcomes if o["tool"] == tool])
    return figures


def _share(name: str, hits: Sequence[bool]) -> dict[str, float]:
    s = share(sum(map(bool, hits)), len(hits))
    return {name: s.value, f"{name}_low": s.low, f"{name}_high": s.high, f"{name}_count": float(s.count)}


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values) if values else 0.0
