"""The task record: what an episode starts from and what it is judged by.

A task is one recorded conversation with its tools and its checklist, in the public checklist format (CM2, arXiv
2602.12268). Training replays only its system and user messages; the recorded calls and results are references. `meta`
holds what is not part of the format: for the embedded world, the records that an executable environment starts from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from envace_jax.errors import EnvaceError

FOCI = ("assistant.tool_calls", "assistant.content", "tool.content")
WEIGHT_TOLERANCE = 1e-3


class TaskError(EnvaceError, ValueError):
    """A task record that cannot be used; the message names file, line or id, what is wrong and the remedy."""


@dataclass(frozen=True, kw_only=True)
class ChecklistItem:
    """One question about one user turn. `rule` (ours, optional) lets a program answer it; without it a judge does."""

    id: str
    question: str
    focus_on: str
    pass_condition: str
    weight: float
    failure_examples: tuple[str, ...] = ()
    evidence: tuple[Mapping[str, Any], ...] = ()
    required_for_next_turn: bool = False
    dependence: tuple[str, ...] = ()
    rule: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. `messages` is the whole recorded conversation; `checklist[turn]` are the items of that user turn."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    checklist: tuple[tuple[ChecklistItem, ...], ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """System message, if any, and the first user message: what the actor sees before its first token."""
        first_user = next(i for i, m in enumerate(self.messages) if m["role"] == "user")
        return [dict(m) for m in self.messages[: first_user + 1]]

    @property
    def user_turns(self) -> tuple[str, ...]:
        """The scripted user messages, in order."""
        return tuple(m["content"] for m in self.messages if m["role"] == "user")

    def to_json(self) -> dict[str, Any]:
        """The annotation spelling of the public format (`uuid, messages, tools, checklists`), plus `meta`."""
        turns = [[_item_to_json(item) for item in turn] for turn in self.checklist]
        record = {"uuid": self.id, "messages": list(self.messages), "tools": list(self.tools), "checklists": [turns]}
        return record | ({"meta": dict(self.meta)} if self.meta else {})


def parse_task(record: Any, *, where: str = "task") -> Task:
    """A `Task` from one decoded record, in the annotation spelling or as a verl parquet row.

    Raises `TaskError` naming `where` (file and line, say), the record's id and the field at fault.
    """
    if not isinstance(record, Mapping):
        raise TaskError(f"{where}: a task must be a JSON object, found {type(record).__name__}")
    record = _from_parquet_row(record, where) if "extra_info" in record else record
    task_id = record.get("uuid")
    where = f"{where}, task {task_id!r}"
    for key, kind in (("uuid", str), ("messages", list), ("tools", list), ("checklists", list)):
        if not isinstance(record.get(key), kind):
            raise TaskError(f"{where}: field {key!r} must be a {kind.__name__}, found {type(record.get(key)).__name__}")
    messages = record["messages"]
    _check_messages(messages, where)
    if not record["checklists"]:
        raise TaskError(f"{where}: 'checklists' is empty; the first checklist is the one used")
    users = sum(m["role"] == "user" for m in messages)
    first = record["checklists"][0]
    if len(first) != users:
        raise TaskError(f"{where}: checklist has {len(first)} turns, the conversation has {users} user turns")
    checklist = tuple(
        tuple(_parse_item(item, f"{where}, turn {t}, item {i}") for i, item in enumerate(turn))
        for t, turn in enumerate(first)
    )
    for t, turn in enumerate(checklist):
        total = sum(item.weight for item in turn)
        if turn and abs(total - 1.0) > WEIGHT_TOLERANCE:
            raise TaskError(f"{where}: weights of turn {t} sum to {total:.4g}, must sum to 1")
    return Task(
        id=task_id,
        messages=tuple(messages),
        tools=tuple(record["tools"]),
        checklist=checklist,
        meta=dict(record.get("meta") or {}),
    )


def read_tasks(path: str, *, on_error: Callable[[TaskError], None] | None = None) -> Iterator[Task]:
    """Tasks of a JSONL file, in order. A bad line raises `TaskError`, or is handed to `on_error` and skipped."""
    try:
        lines = open(path, encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}); check `tasks.path`") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise TaskError(f"{where}: not JSON ({error})") from error
                yield parse_task(record, where=where)
            except TaskError as error:
                if on_error is None:
                    raise TaskError(f"{error}; set tasks.skip_bad=true to leave such lines out") from error
                on_error(error)


def _check_messages(messages: list[Any], where: str) -> None:
    called = False
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user", "assistant", "tool"):
            raise TaskError(f"{where}: message {i} must be an object with role system, user, assistant or tool")
        role = message["role"]
        if role in ("system", "user") and not isinstance(message.get("content"), str):
            raise TaskError(f"{where}: message {i} ({role}) must have text content")
        if role == "tool" and not called:
            raise TaskError(f"{where}: message {i} is a tool result without a call before it")
        called = role == "tool" or bool(role == "assistant" and message.get("tool_calls"))
    if not any(m["role"] == "user" for m in messages):
        raise TaskError(f"{where}: the conversation has no user message")


def _parse_item(item: Any, where: str) -> ChecklistItem:
    if not isinstance(item, Mapping):
        raise TaskError(f"{where}: must be an object, found {type(item).__name__}")
    missing = [k for k in ("id", "question", "focus_on", "pass_condition", "weight") if k not in item]
    if missing:
        raise TaskError(f"{where}: lacks {', '.join(missing)}")
    if not str(item["focus_on"]).startswith(FOCI):
        raise TaskError(f"{where}: focus_on {item['focus_on']!r} must begin with one of {', '.join(FOCI)}")
    try:
        weight = float(item["weight"])
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where}: weight {item['weight']!r} is not a number") from error
    return ChecklistItem(
        id=str(item["id"]),
        question=item["question"],
        focus_on=item["focus_on"],
        pass_condition=item["pass_condition"],
        weight=weight,
        failure_examples=tuple(item.get("failure_examples") or ()),
        evidence=tuple(item.get("evidence") or ()),
        required_for_next_turn=bool(item.get("required_for_next_turn", False)),
        dependence=tuple(item.get("dependence") or ()),
        rule=item.get("rule"),
    )


def _item_to_json(item: ChecklistItem) -> dict[str, Any]:
    record = {
        "id": item.id,
        "question": item.question,
        "focus_on": item.focus_on,
        "pass_condition": item.pass_condition,
        "failure_examples": list(item.failure_examples),
        "evidence": [dict(e) for e in item.evidence],
        "required_for_next_turn": item.required_for_next_turn,
        "dependence": list(item.dependence),
        "weight": item.weight,
    }
    return record | ({"rule": dict(item.rule)} if item.rule else {})


def _from_parquet_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    info = row["extra_info"]
    try:
        tools = json.loads(info["tools"]) if isinstance(info["tools"], str) else info["tools"]
        return {
            "uuid": str(info.get("original_index", info.get("index"))),
            "messages": list(info["messages"]),
            "tools": tools,
            "checklists": list(info["interaction_kwargs"]["checklist_list"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{where}: not a verl row: {error!r} in extra_info") from error
