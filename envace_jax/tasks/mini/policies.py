"""Scripted actors of the embedded world: the expert, and the habits a beginner is taught beside it.

A scripted actor plays one user turn as a generator: it yields a list of calls (one assistant turn), receives their
results, and finally returns its reply to the user. The expert looks before it acts. The habits are the ways a clerk
goes wrong: acting *blind*, working on the *wrong* record, or giving up (*quit*).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.tasks.mini.shop import MAX_QTY, PRICES, STATUSES

Call = tuple[str, dict[str, Any]]
Actor = Generator[list[Call], list[Any], str]

HABITS = ("right", "blind", "wrong", "quit")
QUIT_REPLY = "Sorry, I cannot do that."


@dataclass(frozen=True)
class Goal:
    """What a user wants: `kind`, the order it is about, and the new quantity where the kind is `change`."""

    kind: str
    order: int = 0
    qty: int = 0


def expert(goal: Goal) -> Actor:
    """Looks first, then does what the state of the order allows, and tells how things stand."""
    if goal.kind == "total":
        (result,) = yield [("get_total", {"order": goal.order})]
        return _cost(goal.order, result.get("total"))
    if goal.kind == "ship_all":
        (result,) = yield [("list_orders", {})]
        orders = [r["order"] for r in result.get("orders", []) if r["status"] == "paid"]
        if orders:
            yield [("ship_order", {"order": order}) for order in orders]
        return _shipped(orders)
    (record,) = yield [("get_order", {"order": goal.order})]
    status = record.get("status", "unknown")
    if goal.kind == "ship":
        if status == "new":
            (paid,) = yield [("pay_order", {"order": goal.order})]
            status = paid.get("status", status)
        if status == "paid":
            (shipped,) = yield [("ship_order", {"order": goal.order})]
            status = shipped.get("status", status)
    elif goal.kind == "cancel" and status in ("new", "paid"):
        (cancelled,) = yield [("cancel_order", {"order": goal.order})]
        status = cancelled.get("status", status)
    elif goal.kind == "change" and status == "new":
        (changed,) = yield [("change_qty", {"order": goal.order, "qty": goal.qty})]
        if "qty" in changed and "error" not in changed:
            return _quantity(goal.order, changed["qty"])
    return _state(goal.order, status)


def blind(goal: Goal, rng: random.Random, orders: Sequence[int]) -> Actor:
    """Acts without looking and reports success whatever came back; answers questions from nowhere."""
    if goal.kind == "total":
        return _cost(goal.order, rng.randint(1, MAX_QTY) * rng.choice(PRICES))
    if goal.kind == "status":
        return _state(goal.order, rng.choice(STATUSES))
    if goal.kind == "ship_all":
        guess = rng.choice(orders)
        yield [("ship_order", {"order": guess})]
        return _shipped([guess])
    if goal.kind == "ship":
        yield [("ship_order", {"order": goal.order})]
        return _state(goal.order, "shipped")
    if goal.kind == "cancel":
        yield [("cancel_order", {"order": goal.order})]
        return _state(goal.order, "cancelled")
    yield [("change_qty", {"order": goal.order, "qty": goal.qty})]
    return _quantity(goal.order, goal.qty)


def quit_early(goal: Goal, rng: random.Random) -> Actor:
    """Gives up, at once or after a first look."""
    if rng.random() < 0.5:
        first = next(expert(goal))
        yield first
    return QUIT_REPLY


def habit(name: str, goal: Goal, rng: random.Random, orders: Sequence[int]) -> Actor:
    """The actor of one habit for one user turn; `orders` are the ids in the prompt."""
    if name == "blind":
        return blind(goal, rng, orders)
    if name == "wrong":
        others = [o for o in orders if o != goal.order]
        if goal.kind == "ship_all":
            return blind(goal, rng, orders)
        return expert(Goal(goal.kind, rng.choice(others), goal.qty))
    if name == "quit":
        return quit_early(goal, rng)
    return expert(goal)


def statements(reply: str) -> list[str]:
    """The sentences of a reply, without their full stops."""
    return [s for s in (part.strip() for part in reply.split(".")) if s]


def states(reply: str, wanted: Sequence[str]) -> bool:
    """True when `reply` says every statement of `wanted`, and nothing else that names an order, number or status."""
    said = statements(reply)
    return set(wanted) <= set(said) and not any(_is_claim(s) for s in said if s not in wanted)


def _is_claim(statement: str) -> bool:
    return any(word.isdigit() or word in STATUSES for word in statement.replace(",", " ").split())


def _state(order: int, status: Any) -> str:
    return f"Order {order} is {status}."


def _cost(order: int, total: Any) -> str:
    return f"Order {order} costs {total}."


def _quantity(order: int, qty: Any) -> str:
    return f"Order {order} has {qty}."


def _shipped(orders: Sequence[int]) -> str:
    return f"Shipped {', '.join(map(str, orders))}." if orders else "Shipped nothing."
