"""Tasks of the embedded world: seeded, split by record names, solved once by the expert to record its references.

Each task is an ordinary checklist task (`envace_jax.tasks.Task`). Its `meta` carries the full records, so that an
executable `Shop` can be started from it, the goals, the final state and what each reply must state.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from envace_jax.tasks.mini.policies import Actor, Goal, expert, statements
from envace_jax.tasks.mini.shop import ITEMS, MAX_QTY, PRICES, STATUSES, TOOLS, WRITES, Shop, record_line
from envace_jax.tasks.records import ChecklistItem, Task

SPLITS = ("train", "validation", "test")
KINDS = ("status", "total", "ship", "cancel", "change", "ship_all")
HELD_OUT = (("change", "total"), ("cancel", "ship_all"), ("status", "change"))
HIDDEN_FIELDS = ("price", "status")
MAX_CALLS = 6  # of the expert; longer tasks are drawn again
SYSTEM = "You run the back office of a shop. These are its orders."

_ASK = {
    "status": ("What is the status of order {order}?", "How far is order {order}?"),
    "total": ("What does order {order} cost?", "Tell me the total of order {order}."),
    "ship": ("Ship order {order}, take payment first if needed.", "Send out order {order}, paid or not."),
    "cancel": ("Cancel order {order}.", "The customer does not want order {order} any more."),
    "change": ("Change order {order} to {qty} pieces.", "Make it {qty} pieces in order {order}."),
    "ship_all": ("Ship all paid orders.", "Send out everything that is paid."),
}


def record_names(split: str) -> list[int]:
    """The order ids of a split: a fixed seventh of all ids is validation, another is test, the rest train."""
    every = list(range(100, 1000))
    random.Random("record names").shuffle(every)
    share = len(every) // 7
    return {"validation": every[:share], "test": every[share : 2 * share], "train": every[2 * share :]}[split]


def mini_tasks(split: str, count: int, *, seed: int = 0, visibility: str = "full", start: int = 0) -> Iterator[Task]:
    """`count` tasks of a split from index `start` on; task i depends on (split, seed, visibility, i) alone.

    visibility: "full" shows every field of every record in the system message; "partial" hides price and status of
    each record with probability one half, so that a rehearser must commit to something plausible.
    Raises ValueError for an unknown split or visibility.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    if visibility not in ("full", "partial"):
        raise ValueError(f"unknown visibility {visibility!r}: use full or partial")
    names = record_names(split)
    for index in range(start, start + count):
        yield _make_task(split, names, index, seed, visibility)


def make_records(rng: random.Random, names: list[int], count: int) -> list[dict[str, Any]]:
    """`count` orders with distinct ids of `names` and distinct items."""
    return [
        {
            "order": order,
            "status": rng.choices(STATUSES, weights=(3, 3, 2, 1))[0],
            "item": item,
            "qty": rng.randint(1, MAX_QTY),
            "price": rng.choice(PRICES),
        }
        for order, item in zip(rng.sample(names, count), rng.sample(ITEMS, count), strict=True)
    ]


def system_message(records: list[dict[str, Any]], hidden: dict[int, tuple[str, ...]]) -> dict[str, str]:
    """The system message that shows `records`; `hidden` names the fields left out, by order id."""
    lines = [record_line(r, hidden.get(r["order"], ())) for r in records]
    return {"role": "system", "content": "\n".join([SYSTEM, *lines])}


def play(actor: Actor, shop: Shop, messages: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], Any]]:
    """Runs one scripted user turn in `shop`, appends its messages, and returns its calls with their results."""
    made = []
    results: Any = None
    while True:
        try:
            calls = actor.send(results)
        except StopIteration as stop:
            messages.append({"role": "assistant", "content": stop.value})
            return made
        messages.append({"role": "assistant", "content": "", "tool_calls": [_call_json(*call) for call in calls]})
        results = [shop.call(name, arguments) for name, arguments in calls]
        messages += [{"role": "tool", "content": json.dumps(result)} for result in results]
        made += [(name, arguments, result) for (name, arguments), result in zip(calls, results, strict=True)]


def _make_task(split: str, names: list[int], index: int, seed: int, visibility: str) -> Task:
    rng = random.Random(f"mini/{split}/{seed}/{visibility}/{index}")
    while True:
        task = _draw_task(rng, names, split, visibility, task_id=f"mini-{split}-{seed}-{visibility}-{index}")
        if sum(len(m.get("tool_calls", ())) for m in task.messages) <= MAX_CALLS:
            return task


def _draw_task(rng: random.Random, names: list[int], split: str, visibility: str, task_id: str) -> Task:
    records = make_records(rng, names, rng.randint(3, 5))
    turns = _goals(rng, records, split)
    hidden = {}
    if visibility == "partial":
        hidden = {r["order"]: HIDDEN_FIELDS for r in records if rng.random() < 0.5}

    shop = Shop(records)
    messages: list[dict[str, Any]] = [system_message(records, hidden)]
    checklist, replies = [], []
    for turn, goals in enumerate(turns):
        messages.append({"role": "user", "content": " ".join(_ask(rng, goal) for goal in goals)})
        before = len(messages)
        made = play(in_sequence([expert(goal) for goal in goals]), shop, messages)
        replies.append(statements(messages[-1]["content"]))
        checklist.append(_checklist(turn, made, messages[before:]))
    return Task(
        id=task_id,
        messages=tuple(messages),
        tools=TOOLS,
        checklist=tuple(checklist),
        meta={
            "records": records,
            "goals": [[{"kind": g.kind, "order": g.order, "qty": g.qty} for g in goals] for goals in turns],
            "final_records": list(shop.records.values()),
            "replies": replies,
        },
    )


def in_sequence(actors: list[Actor]) -> Actor:
    """Several scripted actors, one after the other, in one user turn; their replies are joined."""
    replies = []
    for actor in actors:
        replies.append((yield from actor))
    return " ".join(replies)


def _goals(rng: random.Random, records: list[dict[str, Any]], split: str) -> list[list[Goal]]:
    """One goal, two in one user turn, or two in two user turns; held-out pairs of kinds come only in test."""
    single = rng.random() < 0.4
    while True:
        kinds = [rng.choice(KINDS)] if single else [rng.choice(KINDS), rng.choice(KINDS)]
        if single or split == "test" or tuple(kinds) not in HELD_OUT:
            break
    if not single and split == "test" and rng.random() < 0.2:
        kinds = list(rng.choice(HELD_OUT))
    first = rng.choice(records)["order"]
    goals = [_goal(rng, kinds[0], first)]
    if not single:
        second = first if rng.random() < 0.5 else rng.choice(records)["order"]
        goals.append(_goal(rng, kinds[1], second))
    return [goals] if rng.random() < 0.5 else [[g] for g in goals]


def _goal(rng: random.Random, kind: str, order: int) -> Goal:
    return Goal(kind, 0 if kind == "ship_all" else order, rng.randint(1, MAX_QTY) if kind == "change" else 0)


def _ask(rng: random.Random, goal: Goal) -> str:
    return rng.choice(_ASK[goal.kind]).format(order=goal.order, qty=goal.qty)


def _call_json(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _checklist(
    turn: int, made: list[tuple[str, dict[str, Any], Any]], messages: list[dict[str, Any]]
) -> tuple[ChecklistItem, ...]:
    """Four items a program can answer; each holds only at the reply that ends the user turn (see rewards.rules)."""
    reads = [[name, arguments] for name, arguments, _ in made if name not in WRITES]
    writes = [[name, arguments] for name, arguments, _ in made if name in WRITES]
    reply = messages[-1]["content"]
    evidence = ({"turn": turn, "step": len(messages) - 1, "from": "assistant.content", "snippet": reply},)
    return (
        ChecklistItem(
            id=f"t{turn}_reads",
            question="Did the assistant look up what the request needs?",
            focus_on="assistant.tool_calls",
            pass_condition=f"Calls made: {json.dumps(reads)}",
            weight=0.2,
            evidence=evidence,
            rule={"kind": "calls_made", "calls": reads},
        ),
        ChecklistItem(
            id=f"t{turn}_writes",
            question="Did the assistant change exactly what the request needs?",
            focus_on="assistant.tool_calls",
            pass_condition=f"Changes made, in order, and no others: {json.dumps(writes)}",
            failure_examples=("a change to another order", "a change that the request does not need"),
            weight=0.3,
            evidence=evidence,
            rule={"kind": "writes_exactly", "calls": writes, "writes": sorted(WRITES)},
        ),
        ChecklistItem(
            id=f"t{turn}_results",
            question="Is every result what the shop would answer?",
            focus_on="tool.content",
            pass_condition="Results of reference calls equal the recorded ones; others fit their schema, grounded",
            failure_examples=("a value that stands nowhere in the conversation",),
            weight=0.2,
            evidence=evidence,
            rule={"kind": "results_true", "writes": sorted(WRITES), "schemas": "mini"},
        ),
        ChecklistItem(
            id=f"t{turn}_reply",
            question="Does the reply state how things stand?",
            focus_on="assistant.content",
            pass_condition=f"Says, and claims nothing else: {reply}",
            weight=0.3,
            evidence=evidence,
            rule={"kind": "reply_states", "statements": statements(reply)},
        ),
    )
