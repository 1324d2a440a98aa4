"""What the LLM judge is shown. The wording lies in `prompts/`; here it is filled in, and its reply is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from envace_jax.rewards.checklist import Message, Question

ANALYSES = (
    "high_level_understanding_of_the_question",
    "analysis_of_if_focus_on",
    "analysis_of_pass_condition",
    "analysis_of_failure_examples",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {**{name: {"type": "string"} for name in ANALYSES}, "answer": {"type": "boolean"}},
    "required": [*ANALYSES, "answer"],
    "additionalProperties": False,
}

_DIRECTORY = Path(__file__).parent / "prompts"
_THINKING = re.compile(r"\A\s*<think>(.*?)</think>", re.DOTALL)


class VerdictError(ValueError):
    """A reply that is no verdict."""


def judge_messages(question: Question) -> list[dict[str, str]]:
    """The request for one verdict: the messages before the turn, the turn up to the step, and the item."""
    history = list(question.history)
    opening = [history.pop()] if history and history[-1]["role"] == "user" else []
    turn = [_line(message) for message in opening]
    for number, step in enumerate(question.steps):
        turn += [_line(step.message, step=number), *(_line(result) for result in step.results)]
    item = question.item
    criterion = {
        "question": item.question,
        "focus_on": item.focus_on,
        "pass_condition": item.pass_condition,
        "failure_examples": list(item.failure_examples),
        "reference_snippets": [e["snippet"] for e in item.evidence if e.get("snippet")],
    }
    text = Template(_text("judge_user.txt")).substitute(
        before="\n".join(_line(message) for message in history) or "(none)",
        turn="\n".join(turn),
        step=len(question.steps) - 1,
        criterion=_json(criterion, indent=1),
    )
    return [{"role": "system", "content": _text("judge_system.txt")}, {"role": "user", "content": text}]


def read_verdict(text: Any) -> bool:
    """The answer of a reply that is a JSON object with all fields of `SCHEMA`, thinking before it aside.

    Raises VerdictError for anything else: half an object, a missing field, "yes" or 1 where true should stand.
    """
    if not isinstance(text, str) or not text.strip():
        raise VerdictError("the reply is empty")
    try:
        reply = json.loads(_THINKING.sub("", text))
    except (ValueError, RecursionError):
        raise VerdictError(f"the reply is not JSON: {text[:80]!r}") from None
    if not isinstance(reply, dict):
        raise VerdictError(f"the reply is no JSON object: {text[:80]!r}")
    wrong = [name for name in ANALYSES if not isinstance(reply.get(name), str)]
    if wrong:
        raise VerdictError(f"the reply lacks {', '.join(wrong)}")
    if not isinstance(reply.get("answer"), bool):
        raise VerdictError(f"the answer is {reply.get('answer')!r}, neither true nor false")
    return reply["answer"]


def _line(message: Message, step: int | None = None) -> str:
    shown: dict[str, Any] = {"role": message["role"]}
    content = message.get("content") or ""
    if message["role"] == "assistant":
        if step is not None:
            shown["step"] = step
        found = _THINKING.match(content)
        thinking = message.get("reasoning_content") or (found.group(1).strip() if found else "")
        shown["content"] = {"thinking": thinking, "user_visible_reply": _THINKING.sub("", content).strip()}
        shown["tool_calls"] = list(_calls(message))
    else:
        shown["content"] = content
    return _json(shown)


def _calls(message: Message) -> Iterator[Mapping[str, Any]]:
    for call in message.get("tool_calls") or ():
        yield {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def _json(value: Any, indent: int | None = None) -> str:
    # No text of a conversation can close the tag it stands in.
    return json.dumps(value, ensure_ascii=False, indent=indent).replace("<", "\\u003c")


@cache
def _text(name: str) -> str:
    return (_DIRECTORY / name).read_text(encoding="utf-8")
