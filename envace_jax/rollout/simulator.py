"""Rehearsal as a request of its own (`world.form: simulator`): the prompt for one call, and how its answer is read.

The texts lie in `prompts/`, and are plain. Everything quoted in the prompt (tools, references, the conversation, the
caller's message) is data: rendered for the policy it yields no control id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envace_jax.chat import ChatTokenizer, ToolCall, parse_rehearsal
from envace_jax.tasks import Task

UNAVAILABLE = "<unavailable>"
_PROMPTS = Path(__file__).parent / "prompts"
_SYSTEM = (_PROMPTS / "simulator_system.txt").read_text(encoding="utf-8").strip()
# Sections are kept in the order of the file; each begins with its heading.
_SECTIONS = {
    section.split("\n", 1)[0]: "## " + section.strip()
    for section in re.split(r"^## ", (_PROMPTS / "simulator_user.txt").read_text(encoding="utf-8"), flags=re.M)
    if section.strip()
}


@dataclass(frozen=True)
class Simulator:
    """Which sections the prompt has, in this order; the call itself always comes last.

    whitelist: the schemas of the task's tools. references: the recorded calls and results of the task, or
    `<unavailable>`. history: the conversation before the caller's message, without the system message. raw_message: the
    caller's message as it was sampled. thinking: `/think` is appended, else `/no_think`.
    """

    whitelist: bool = True
    references: bool = False
    history: bool = True
    raw_message: bool = True
    thinking: bool = True

    def messages(
        self, task: Task, history: Sequence[Mapping[str, Any]], raw_message: str, call: ToolCall
    ) -> list[dict[str, str]]:
        """The prompt for one call: a system and a user message. `history` ends before the caller's message."""
        schemas = {tool.get("function", tool).get("name"): tool for tool in task.tools}
        schema = schemas.get(call.name)
        values = {
            "whitelist": _lines(task.tools),
            "references": _lines(recorded_calls(task)) or UNAVAILABLE,
            "history": _lines(m for m in history if m["role"] != "system"),
            "raw_message": raw_message,
            "name": call.name,
            "schema": UNAVAILABLE if schema is None else _json(schema),
            "arguments": _json(call.arguments),
        }
        shown = {
            "available_tools": self.whitelist,
            "references": self.references,
            "history": self.history,
            "caller_message": self.raw_message,
        }
        sections = [
            re.sub(r"\{(\w+)\}", lambda name: values[name.group(1)], text)
            for heading, text in _SECTIONS.items()
            if shown.get(heading, True)
        ]
        sections.append("/think" if self.thinking else "/no_think")
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "\n\n".join(sections)}]

    def render(self, chat: ChatTokenizer, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """int32[T]: the prompt as the policy reads it."""
        return chat.render(messages, None, True, self.thinking, data_roles=("tool", "user"))

    @staticmethod
    def read(text: str) -> tuple[Any, str | None]:
        """The value of an answer, and the code of what is wrong with it, if anything: then the value says so too."""
        result = parse_rehearsal(text, form="simulator")
        if result.error is None:
            return result.value, None
        return result.error.as_result(), result.error.code


def recorded_calls(task: Task) -> list[dict[str, Any]]:
    """The calls of the recorded conversation with their results, in order; a call without a result is left out."""
    pairs: list[dict[str, Any]] = []
    waiting: list[Mapping[str, Any]] = []
    for message in task.messages:
        if message["role"] == "assistant":
            waiting = [call["function"] for call in message.get("tool_calls") or ()]
        elif message["role"] == "tool" and waiting:
            function = waiting.pop(0)
            name, arguments, result = function["name"], function["arguments"], message["content"]
            pairs.append({"name": name, "arguments": _decoded(arguments), "result": _decoded(result)})
    return pairs


def _decoded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _lines(values: Any) -> str:
    return "\n".join(map(_json, values))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
