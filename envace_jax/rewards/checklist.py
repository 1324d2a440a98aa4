"""Checklist rewards: from verdicts on single questions to the reward of an episode.

After each user turn every (assistant step, checklist item) pair is a `Question`; a `Judge` answers it true, false, or
None when it has no verdict. An item is satisfied if any step of the turn satisfies it; the turn scores the weights of
its satisfied items; the episode's reward is the sum of turn scores over the number of turns of the task, in [0, 1].
The rules are those of the method's release (first checklist only):

- focus on a tool call or a tool result whose step has an error result: false without asking;
- any failed tool call so far: the turn scores 0;
- an item `required_for_next_turn` unsatisfied: the episode ends there, and turns not reached score 0;
- no verdict is not a zero: the episode is left out of baselines and loss (`valid` is false).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envace_jax.tasks import ChecklistItem, Task

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One assistant message and the tool messages that answer it. `failed`: a result is a protocol error."""

    message: Message
    results: tuple[Message, ...] = ()
    failed: bool = False


@dataclass(frozen=True)
class Question:
    """Does step `step` of user turn `turn` satisfy `item`? `steps` are the steps of the turn up to it, inclusive."""

    task: Task
    turn: int
    step: int
    item: ChecklistItem
    history: Sequence[Message]
    steps: Sequence[Step]
    ends_turn: bool


class Judge(Protocol):
    """Answers questions, in order. None is no verdict (unreachable, unparsable), never a zero."""

    def answer(self, questions: Sequence[Question]) -> Sequence[bool | None]: ...


@dataclass(frozen=True)
class TurnVerdict:
    """Score of one user turn in [0, 1]; `proceed`: the next user turn may begin; `valid`: all verdicts were had."""

    score: float
    proceed: bool
    valid: bool = True
    satisfied: tuple[str, ...] = ()


def judge_turn(
    task: Task, turn: int, history: Sequence[Message], steps: Sequence[Step], judge: Judge, *, failed_before: bool
) -> TurnVerdict:
    """The verdict on user turn `turn`: `history` are the messages before it, its user message included.

    failed_before: a tool call failed in an earlier turn of the episode.
    """
    items = task.checklist[turn] if turn < len(task.checklist) else ()
    # By place, not by id: two items of a turn may share one.
    asked = [
        (i, Question(task, turn, s, item, history, steps[: s + 1], ends_turn=s == len(steps) - 1))
        for i, item in enumerate(items)
        for s, step in enumerate(steps)
        if not (step.failed and item.focus_on.startswith(("assistant.tool_calls", "tool")))
    ]
    satisfied: set[int] = set()
    unknown: set[int] = set()
    for (i, _), verdict in zip(asked, judge.answer([question for _, question in asked]), strict=True):
        if verdict is None:
            unknown.add(i)
        elif verdict:
            satisfied.add(i)
    failed = failed_before or any(step.failed for step in steps)
    score = 0.0 if failed else sum(item.weight for i, item in enumerate(items) if i in satisfied)
    return TurnVerdict(
        score=score,
        proceed=all(i in satisfied for i, item in enumerate(items) if item.required_for_next_turn),
        # A failed call makes the score 0 whatever the judge would have said.
        valid=failed or not (unknown - satisfied),
        satisfied=tuple(item.id for i, item in enumerate(items) if i in satisfied),
    )


def episode_reward(scores: Sequence[float], turns: int) -> float:
    """Sum of turn scores over the task's number of user turns; turns not reached count 0."""
    return float(sum(scores)) / turns if turns else 0.0
