"""Supervised episodes of the embedded world: what the shipped beginner learned from.

Three kinds, all plain conversations. *Readings* repeat the lines of the prompt in random order: the densest practice in
finding a record by its id. *Drills* are long runs of random calls, answered by the executable shop: practice for the
rehearsal role, which has to copy values out of the right record and to remember earlier writes. *Demonstrations* are
tasks of the training split played by clerks of mixed habits, so that good and bad behaviour are both in reach.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envace_jax.tasks.mini.generate import (
    HIDDEN_FIELDS,
    in_sequence,
    make_records,
    mini_tasks,
    play,
    record_names,
    system_message,
)
from envace_jax.tasks.mini.policies import HABITS, Actor, Call, Goal, habit
from envace_jax.tasks.mini.shop import MAX_QTY, TOOLS, Shop, record_line

# How often a demonstrator follows each habit: `right` is common enough to be found, rare enough to leave RL a choice.
HABIT_WEIGHTS: Mapping[str, float] = {"right": 0.33, "blind": 0.37, "wrong": 0.15, "quit": 0.15}
PARTIAL_FRACTION = 0.15


def demonstrations(
    seed: int, *, start: int = 0, habits: Mapping[str, float] = HABIT_WEIGHTS
) -> Iterator[list[dict[str, Any]]]:
    """Endless conversations over training tasks; conversation i depends on (seed, habits, i) alone."""
    index = start
    while True:
        rng = random.Random(f"demonstration/{seed}/{index}")
        visibility = "partial" if rng.random() < PARTIAL_FRACTION else "full"
        (task,) = mini_tasks("train", 1, seed=1_000_000 + seed, visibility=visibility, start=index)
        yield play_task(task.messages, task.meta, rng, habits)[0]
        index += 1


def play_task(
    messages: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], rng: random.Random, habits: Mapping[str, float]
) -> tuple[list[dict[str, Any]], Shop]:
    """A task's conversation as clerks of the given habits play it in the real shop, one habit drawn for each goal.

    The shop is returned beside it, as they left it.
    """
    shop = Shop(meta["records"])
    orders = list(shop.records)
    users = [dict(m) for m in messages if m["role"] == "user"]
    conversation = [dict(messages[0])]
    for user, goals in zip(users, meta["goals"], strict=True):
        conversation.append(user)
        drawn = rng.choices(HABITS, weights=[habits.get(h, 0.0) for h in HABITS], k=len(goals))
        actors = [habit(name, Goal(**goal), rng, orders) for name, goal in zip(drawn, goals, strict=True)]
        play(in_sequence(actors), shop, conversation)
    return conversation, shop


def drills(seed: int, *, start: int = 0, calls: tuple[int, int] = (8, 14)) -> Iterator[list[dict[str, Any]]]:
    """Endless conversations of one user turn with many random calls; drill i depends on (seed, calls, i) alone."""
    names = record_names("train")
    index = start
    while True:
        rng = random.Random(f"drill/{seed}/{index}")
        records = make_records(rng, names, rng.randint(3, 5))
        hidden = {}
        if rng.random() < PARTIAL_FRACTION:
            hidden = {r["order"]: HIDDEN_FIELDS for r in records if rng.random() < 0.5}
        conversation = [system_message(records, hidden), {"role": "user", "content": "Practice."}]
        play(_random_calls(rng, [r["order"] for r in records], names, rng.randint(*calls)), Shop(records), conversation)
        yield conversation
        index += 1


def readings(seed: int, *, start: int = 0, lines: int = 10) -> Iterator[list[dict[str, Any]]]:
    """Endless conversations in which the assistant reads records out; each by (seed, lines, its index) alone."""
    names = record_names("train")
    index = start
    while True:
        rng = random.Random(f"reading/{seed}/{index}")
        records = make_records(rng, names, rng.randint(2, 4))
        text = "\n".join(record_line(rng.choice(records)) for _ in range(lines))
        asked = {"role": "user", "content": "Read out."}
        yield [system_message(records, {}), asked, {"role": "assistant", "content": text}]
        index += 1


def _random_calls(rng: random.Random, orders: list[int], names: list[int], count: int) -> Actor:
    while count > 0:
        together = min(count, rng.choice((1, 1, 2, 3)))
        yield [_random_call(rng, orders, names) for _ in range(together)]
        count -= together
    return "Done."


def _random_call(rng: random.Random, orders: list[int], names: list[int]) -> Call:
    order = rng.choice(names) if rng.random() < 0.05 else rng.choice(orders)
    name = rng.choices([t["function"]["name"] for t in TOOLS], weights=(6, 3, 4, 2, 2, 1, 4))[0]
    if name == "list_orders":
        return name, {}
    if name == "change_qty":
        # One call in ten breaks the schema, so that the rehearser knows a violation when it sees one.
        return name, {"order": order, "qty": rng.randint(1, MAX_QTY) if rng.random() < 0.9 else rng.choice((0, 9))}
    return name, {"order": order}
