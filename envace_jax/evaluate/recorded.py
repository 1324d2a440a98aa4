"""Recorded conversations that fidelity is measured on: the embedded world's, made on the fly, and those of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.config import ConfigError


@dataclass(frozen=True)
class Conversation:
    """A recorded conversation. `writes`: tools that change the world. `only_last`: earlier calls are history alone."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    writes: frozenset[str] = frozenset()
    only_last: bool = False


def mini_conversations(count: int, *, split: str, visibility: str = "full", seed: int = 0) -> list[Conversation]:
    """Of each task three: the expert's, one of a clerk with mixed habits, and one made to be hard to rehearse.

    That one is a change, the same again (which must fail), a look at it, and one at an order that is not there.
    """
    from envace_jax.tasks.mini import WRITES, Shop, mini_tasks
    from envace_jax.tasks.mini.demos import HABIT_WEIGHTS, play_task
    from envace_jax.tasks.mini.generate import play, record_names

    try:
        tasks = list(mini_tasks(split, count, visibility=visibility))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    experts, clerks, probes = [], [], []
    for task in tasks:
        rng = random.Random(f"fidelity/{seed}/{task.id}")
        experts.append(task.messages)
        clerks.append(play_task(task.messages, task.meta, rng, HABIT_WEIGHTS)[0])
        shop = Shop(task.meta["records"])
        absent = rng.choice([name for name in record_names(split) if name not in shop.records])
        probes.append(task.prompt)
        play(_probe(rng, list(shop.records), absent), shop, probes[-1])
    return [Conversation(m, tasks[0].tools, WRITES) for m in (*experts, *clerks, *probes)]


def _probe(rng: random.Random, orders: Sequence[int], absent: int):
    order = {"order": rng.choice(orders)}
    write = rng.choice(("pay_order", "ship_order", "cancel_order"))
    yield [(write, order)]
    yield [(write, order)]
    yield [(rng.choice(("get_order", "get_order", "get_total")), order)]
    yield [(rng.choice(("get_order", "get_total", "pay_order")), {"order": absent})]
    return "Done."


def from_record(record: Mapping[str, Any], where: str) -> Conversation:
    """The conversation of one `tools, history, call, response` record. Raises ConfigError that begins with `where`."""
    try:
        history, call, response = record["history"], record["call"], record["response"]
        function = {"name": call["name"], "arguments": call["arguments"]}
        if not any(message["role"] == "user" for message in history):
            raise ConfigError(f"{where}: the history holds no user message")
        if not isinstance(function["name"], str):
            raise ConfigError(f"{where}: the call's name must be text")
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{where}: needs tools, history, call (name, arguments) and response: {error}") from None
    text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
    messages = [
        *history,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": text},
    ]
    return Conversation(messages, record.get("tools"), frozenset(record.get("writes") or ()), only_last=True)
