"""Does the reward of a rehearsed episode mean anything? The same calls and replies, with real results in their place.

An episode that the policy rehearsed is replayed: its calls are executed in the real shop, in order, and its checklist
is answered anew. A truer world makes the two rewards agree; a more convenient one raises the rehearsed reward alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envace_jax.evaluate.statistics import share
from envace_jax.rewards import RuleJudge, Step, episode_reward, judge_turn
from envace_jax.rollout import Trajectory
from envace_jax.tasks import Task
from envace_jax.tasks.mini import Shop

FULL = 1.0 - 1e-6


@dataclass(frozen=True)
class Replay:
    """messages: as in the episode, with what the shop answered. state_right: of the shop at the end."""

    messages: list[dict[str, Any]]
    reward: float
    state_right: bool


def replay(task: Task, messages: Sequence[Mapping[str, Any]]) -> Replay:
    """What the calls and replies of `messages` would have been worth in the real shop."""
    shop = Shop(task.meta["records"])
    real: list[dict[str, Any]] = []
    steps: list[Step] = []
    scores: list[float] = []
    start, failed_before = 0, False

    def settle() -> None:
        nonlocal failed_before
        if steps:
            history = real[:start]
            scores.append(judge_turn(task, len(scores), history, steps, RuleJudge(), failed_before=failed_before).score)
            failed_before = failed_before or any(step.failed for step in steps)

    for message in messages:
        if message["role"] == "tool":
            continue  # what was rehearsed
        if message["role"] == "user":
            settle()
            steps = []
            real.append(dict(message))
            start = len(real)
            continue
        real.append(dict(message))
        if message["role"] != "assistant":
            continue
        results = []
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            results.append({"role": "tool", "content": json.dumps(shop.call(name, arguments))})
        real += results
        failed = any("error_tool_call" in json.loads(result["content"]) for result in results)
        steps.append(Step(message, tuple(results), failed))
    settle()
    state_right = list(shop.records.values()) == task.meta["final_records"]
    return Replay(real, episode_reward(scores, len(task.user_turns)), state_right)


def agreement(episodes: Sequence[Trajectory], tasks: Sequence[Task]) -> dict[str, float]:
    """Figures of rehearsed episodes, one of each task:

    eval/rehearsed_reward, eval/replayed_reward             means: as rehearsed, and with real results
    eval/reward_agreement (+ _low, _high, _count)           share of episodes that have full marks in both or in neither
    eval/reward_correlation                                 0 where one of the two never varies
    """
    rehearsed = np.array([t.reward for t in episodes])
    replayed = np.array([replay(task, t.messages).reward for task, t in zip(tasks, episodes, strict=True)])
    varies = len(episodes) > 1 and rehearsed.std() > 0 and replayed.std() > 0
    both = share(int(np.sum((rehearsed > FULL) == (replayed > FULL))), len(episodes))
    return {
        "eval/rehearsed_reward": float(rehearsed.mean()),
        "eval/replayed_reward": float(replayed.mean()),
        "eval/reward_agreement": both.value,
        "eval/reward_agreement_low": both.low,
        "eval/reward_agreement_high": both.high,
        "eval/reward_agreement_count": float(both.count),
        "eval/reward_correlation": float(np.corrcoef(rehearsed, replayed)[0, 1]) if varies else 0.0,
    }
