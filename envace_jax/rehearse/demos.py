"""Supervised episodes with a rehearsal memory in context, for a policy of the embedded world.

A policy uses notes as it was taught to. Here clerks of mixed habits make one to three plans, in a shop whose answers
are sometimes wrong, as a rehearser's are. The memory of the plans stands below the last user message, and the clerk who
acts follows one of them: where a plan looked first and was right mostly that one, whatever the others say, with an eye
on what really comes back; else the one that most plans agree with, to the letter.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.chat import ToolCall
from envace_jax.rehearse.memory import condense, vote
from envace_jax.rehearse.plans import Plan, Rehearsed
from envace_jax.rehearse.policy import with_note
from envace_jax.tasks.mini import Shop, mini_tasks
from envace_jax.tasks.mini.demos import HABIT_WEIGHTS, play_task
from envace_jax.tasks.mini.generate import in_sequence, play
from envace_jax.tasks.mini.policies import HABITS, Actor, Goal, habit
from envace_jax.tasks.mini.shop import MAX_QTY, PRICES, STATUSES

PLANS = (1, 2, 2, 3)
DISCERNING = 0.75  # how often a right plan is followed, where there is one
UNTRUE = 0.12  # of rehearsed results
_WRONG = {"status": STATUSES, "qty": tuple(range(1, MAX_QTY + 1)), "price": PRICES}


def remembering(
    seed: int, *, start: int = 0, habits: Mapping[str, float] = HABIT_WEIGHTS
) -> Iterator[list[dict[str, Any]]]:
    """Endless conversations over training tasks, each with a memory; i depends on (seed, habits, i) alone."""
    index = start
    while True:
        rng = random.Random(f"remembering/{seed}/{index}")
        (task,) = mini_tasks("train", 1, seed=2_000_000 + seed, start=index)
        yield _conversation(task.messages, task.meta, rng, habits)
        index += 1


@dataclass
class _Hazy:
    """A shop as a rehearser remembers it: now and then one value of a result is another."""

    shop: Shop
    rng: random.Random
    untrue: int = 0

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        result = self.shop.call(name, arguments)
        rows = [row for row in (result, *result.get("orders", ())) if "status" in row]
        if not rows or self.rng.random() >= UNTRUE:
            return result
        row = self.rng.choice(rows)
        key = self.rng.choice([k for k in _WRONG if k in row])
        row[key] = self.rng.choice([v for v in _WRONG[key] if v != row[key]])
        self.untrue += 1
        return result


def _conversation(
    messages: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], rng: random.Random, habits: Mapping[str, float]
) -> list[dict[str, Any]]:
    *earlier, goals = [[Goal(**goal) for goal in goals] for goals in meta["goals"]]
    users = [m for m in messages if m["role"] == "user"]
    before = {"records": meta["records"], "goals": meta["goals"][:-1]}
    conversation, shop = play_task([messages[0], *users[:-1]], before, rng, habits)
    orders = list(shop.records)
    plans, right = [], []
    for _ in range(rng.choice(PLANS)):
        drawn = rng.choices(HABITS, weights=[habits.get(h, 0.0) for h in HABITS], k=len(goals))
        hazy = _Hazy(Shop(shop.records.values()), rng)
        plans.append(_plan([habit(h, g, rng, orders) for h, g in zip(drawn, goals, strict=True)], hazy))
        right.append(set(drawn) == {"right"} and not hazy.untrue)
    if any(right) and rng.random() < DISCERNING:
        actor = in_sequence([habit("right", goal, rng, orders) for goal in goals])
    else:
        actor = _to_the_letter(plans[vote(plans)])
    conversation = with_note([*conversation, dict(users[-1])], condense(plans, None, len).text)
    play(actor, shop, conversation)
    return conversation


def _plan(actors: Sequence[Actor], shop: Any) -> Plan:
    said: list[dict[str, Any]] = []
    play(in_sequence(actors), shop, said)
    turns: list[list[Rehearsed]] = []
    waiting: list[ToolCall] = []
    for message in said:
        if message["role"] == "assistant" and message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            waiting = [ToolCall(f["name"], json.loads(f["arguments"])) for f in functions]
            turns.append([])
        elif message["role"] == "tool":
            turns[-1].append(Rehearsed(waiting.pop(0), json.loads(message["content"])))
    return Plan(tuple(map(tuple, turns)), reply=said[-1]["content"])


def _to_the_letter(plan: Plan) -> Actor:
    for turn in plan.turns:
        yield [(made.call.name, made.call.arguments) for made in turn]
    return plan.reply
