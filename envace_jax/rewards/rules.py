"""Verdicts by program: the rules that checklist items of the embedded world carry.

Each rule looks at the messages alone, never at an executable world, and can hold only at the step that ends the user
turn, when everything the turn did is on the table. `results_true` holds a result against the one recorded for the
same call made in the same state (that is, after the same writes): a form of supervision. Every other result must fit
its schema and be grounded: its values stand in the conversation before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema

from envace_jax.rewards.checklist import Message, Question, Step
from envace_jax.tasks.mini.policies import states
from envace_jax.tasks.mini.shop import RESULT_SCHEMAS, WRITES

Call = tuple[str, dict[str, Any]]


class RuleJudge:
    """Answers items that carry a `rule`. An item without one, or of an unknown kind, has no verdict."""

    def answer(self, questions: Sequence[Question]) -> list[bool | None]:
        return [self._verdict(question) for question in questions]

    def _verdict(self, question: Question) -> bool | None:
        rule = question.item.rule
        check = _RULES.get(rule["kind"]) if rule else None
        if check is None:
            return None
        return question.ends_turn and check(rule, question)


def _calls_made(rule: Mapping[str, Any], question: Question) -> bool:
    made = [[name, arguments] for name, arguments in _turn_calls(question.steps)]
    return all(call in made for call in rule["calls"])


def _writes_exactly(rule: Mapping[str, Any], question: Question) -> bool:
    made = [[name, arguments] for name, arguments in _turn_calls(question.steps) if name in WRITES]
    return made == rule["calls"]


def _reply_states(rule: Mapping[str, Any], question: Question) -> bool:
    reply = question.steps[-1].message
    return not reply.get("tool_calls") and states(reply["content"], rule["statements"])


def _results_true(rule: Mapping[str, Any], question: Question) -> bool:
    recorded = dict(_results_by_state(question.task.messages))
    messages = [*question.history, *(m for s in question.steps for m in (s.message, *s.results))]
    before_turn = sum(m["role"] == "tool" for m in question.history)
    references = 0
    for i, (key, result) in enumerate(_results_by_state(messages)):
        if i < before_turn:
            continue
        if key in recorded:
            references += 1
            if result != recorded[key]:
                return False
        elif not _plausible(key, result, messages, i):
            return False
    return references > 0


_RULES = {
    "calls_made": _calls_made,
    "writes_exactly": _writes_exactly,
    "results_true": _results_true,
    "reply_states": _reply_states,
}


def _turn_calls(steps: Sequence[Step]) -> Iterator[Call]:
    for step in steps:
        yield from _message_calls(step.message)


def _message_calls(message: Message) -> list[Call]:
    return [
        (call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]


def _arguments(arguments: Any) -> dict[str, Any]:
    return json.loads(arguments) if isinstance(arguments, str) else dict(arguments)


def _results_by_state(messages: Sequence[Message]) -> Iterator[tuple[tuple[str, str], Any]]:
    """((call, the writes made before it), result) for each answered call, in order.

    Results are decoded JSON; text that is not JSON stays text. Only writes that were not refused change the state.
    """
    writes: list[str] = []
    pending: list[Call] = []
    for message in messages:
        if message["role"] == "assistant":
            pending = _message_calls(message)
        elif message["role"] == "tool" and pending:
            name, arguments = pending.pop(0)
            call = json.dumps([name, arguments], sort_keys=True)
            result = _decoded(message["content"])
            yield (call, "\n".join(writes)), result
            if name in WRITES and not (isinstance(result, dict) and "error" in result):
                writes.append(call)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plausible(key: tuple[str, str], result: Any, messages: Sequence[Message], index: int) -> bool:
    """Fits the schema of its tool, echoes the order it was asked about, and says nothing from nowhere."""
    name, arguments = json.loads(key[0])
    schema = RESULT_SCHEMAS.get(name)
    if schema is None or not jsonschema.Draft202012Validator(schema).is_valid(result):
        return False
    if "order" in result and result["order"] != arguments.get("order"):
        return False
    known = _words_before(messages, index)
    for field, value in _leaves(result):
        if field == "total":
            if value != result["qty"] * result["price"]:
                return False
        elif field not in ("status", "error") and str(value) not in known:
            return False
    return True


def _leaves(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field, value in result.items():
        if isinstance(value, list):
            for entry in value:
                yield from _leaves(entry)
        else:
            yield field, value


def _words_before(messages: Sequence[Message], index: int) -> set[str]:
    """Words and numbers of everything before the index-th tool message, calls included."""
    seen = -1
    words: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            seen += 1
            if seen == index:
                break
        text = message.get("content") or ""
        calls = " ".join(str(c["function"]["arguments"]) for c in message.get("tool_calls") or ())
        words.update(re.findall(r"\w+", f"{text} {calls}"))
    return words
