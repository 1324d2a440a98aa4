"""What is kept of private plans: a rehearsal memory under a token budget of its own, and what the plans agree on.

Each plan is told at one of three levels of detail: calls with results, outcome and critique; calls and outcome; the
outcome alone. While the memory is too long, the oldest plan that still has detail loses one level, so that more plans
never crowd out the task. What the plans agree on is written first and given up last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envace_jax.rehearse.policy import prompt

if TYPE_CHECKING:
    from envace_jax.chat import ToolCall
    from envace_jax.rehearse.plans import Plan

FULL, BRIEF, OUTCOME, DROPPED = 3, 2, 1, 0


@dataclass(frozen=True)
class Memory:
    """text: what is put into a prompt, empty where nothing fits. tokens: its length. detail: the level of each plan."""

    text: str
    tokens: int
    detail: tuple[int, ...]


def condense(plans: Sequence[Plan], budget: int | None, count: Callable[[str], int]) -> Memory:
    """The memory of `plans`, oldest first, in at most `budget` tokens as `count` counts them; None: no budget."""
    if not plans:
        return Memory("", 0, ())
    detail = [FULL] * len(plans)
    while True:
        text = _write(plans, detail)
        tokens = count(text)
        if budget is None or tokens <= budget:
            return Memory(text, tokens, tuple(detail))
        level = max(detail)
        if level == DROPPED:
            return Memory("", 0, tuple(detail))
        detail[detail.index(level)] -= 1  # the oldest of the most detailed


def agreed_calls(plans: Sequence[Plan]) -> list[tuple[str, int]]:
    """(call, in how many plans) of the calls that more than half of the plans make, most common first."""
    made = Counter(call for plan in plans for call in dict.fromkeys(spell(m.call) for m in plan.calls))
    return [(call, n) for call, n in made.most_common() if 2 * n > len(plans) and n > 1]


def vote(plans: Sequence[Plan]) -> int:
    """The number of the plan that most plans agree with, the first of equals.

    Plans that ended well come before all others. Two plans agree on their calls in order and on their reply, and by
    half on one of the two.
    """
    if not plans:
        raise ValueError("there is no plan to vote for")

    def standing(k: int) -> tuple[bool, float]:
        agreement = sum(_agreement(plans[k], other) for other in plans if other.outcome == "done")
        return plans[k].outcome == "done", agreement

    return max(range(len(plans)), key=standing)


def spell(call: ToolCall) -> str:
    """A call as text, equal for equal calls."""
    return f"{call.name}({json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)})"


def _agreement(a: Plan, b: Plan) -> float:
    calls = [spell(m.call) for m in a.calls] == [spell(m.call) for m in b.calls]
    return 0.5 * calls + 0.5 * (a.reply == b.reply)


def _write(plans: Sequence[Plan], detail: Sequence[int]) -> str:
    lines = []
    agreed = agreed_calls(plans)
    if agreed:
        lines.append("Most plans make: " + "; ".join(f"{call} ({n} of {len(plans)})" for call, n in agreed))
    replies = Counter(plan.reply for plan in plans if plan.outcome == "done" and plan.reply)
    if replies and replies.most_common(1)[0][1] > 1:
        reply, n = replies.most_common(1)[0]
        lines.append(f"{n} of {len(plans)} plans end by saying: {reply}")
    for number, (plan, level) in enumerate(zip(plans, detail, strict=True), start=1):
        if level == DROPPED:
            continue
        lines.append(f"Plan {number}:")
        if level >= BRIEF:
            for made in plan.calls:
                result = f" -> {json.dumps(made.result, ensure_ascii=False)}" if level == FULL else ""
                lines.append(f"  {spell(made.call)}{result}")
        lines.append(f"  ends: {plan.reply if plan.outcome == 'done' else plan.outcome}")
        if level == FULL and plan.critique:
            lines.append(f"  review: {plan.critique}")
    # Not `str.format`: what was rehearsed may hold braces, and must not be read as a template.
    return prompt("memory").replace("{notes}", "\n".join(lines))
