"""The task record: what an episode starts from and what it is judged by.

A task is one recorded conversation with its tools and its checklist, in the public checklist format (CM2, arXiv
2602.12268). Training replays only its system and user messages; the recorded calls and results are references. `meta`
holds what is not part of the format: for the embedded world, the records that an executable environment starts from.

Files hold whatever their makers put there, so nothing of a record is believed: `parse_task` looks at every value it
keeps, and answers a wrong one with `TaskError` alone.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envace_jax.errors import EnvaceError
from envace_jax.tasks.shapes import (
    Fault,
    check_depth,
    check_messages,
    check_tools,
    decode_json,
    require,
    require_list,
    require_text,
)

FOCI = ("assistant.tool_calls", "assistant.content", "tool.content")
WEIGHT_TOLERANCE = 1e-3


class TaskError(EnvaceError, ValueError):
    """A task record that cannot be used; the message names file, line or id, what is wrong and the remedy.

    `line`, `task_id` (as the record has it) and `reason` say the same in parts, where they are known.
    """

    def __init__(self, message: str, *, reason: str | None = None, task_id: Any = None, line: int | None = None):
        super().__init__(message)
        self.reason, self.task_id, self.line = reason or message, task_id, line


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

    @property
    def needs_judge(self) -> bool:
        """Whether some item has no rule, so that only a judge can answer it."""
        return any(item.rule is None for turn in self.checklist for item in turn)

    def to_json(self) -> dict[str, Any]:
        """The annotation spelling of the public format (`uuid, messages, tools, checklists`), plus `meta`."""
        turns = [[_item_to_json(item) for item in turn] for turn in self.checklist]
        record = {"uuid": self.id, "messages": list(self.messages), "tools": list(self.tools), "checklists": [turns]}
        return record | ({"meta": dict(self.meta)} if self.meta else {})


def parse_task(record: Any, *, where: str = "task", line: int | None = None) -> Task:
    """A `Task` from one decoded record, in the annotation spelling or as a verl parquet row.

    The first of its checklists becomes the task's; further ones are held to the format as well.

    Raises `TaskError` naming `where` (file and line, say), the record's id and the field at fault.
    """
    task_id = None
    try:
        require(isinstance(record, Mapping), f"a task must be a JSON object, found {type(record).__name__}")
        task_id = _given_id(record)
        return _parse(_from_parquet_row(record) if _is_parquet_row(record) else record)
    except Fault as fault:
        named = where if task_id is None else f"{where}, task {task_id!r}"
        reason = textwrap.shorten(str(fault), 500)
        raise TaskError(f"{named}: {reason}", reason=reason, task_id=task_id, line=line) from None


def _parse(record: Mapping[str, Any]) -> Task:
    # In parquet, what differs from row to row in shape may be kept as JSON text.
    listed = {
        k: decode_json(record[k], k) for k in ("messages", "tools", "checklists") if isinstance(record.get(k), str)
    }
    record = {**record, **listed}
    # One pass of the encoder finds NaN, values that are no JSON, and text that no UTF-8 file can hold.
    try:
        json.dumps({k: record.get(k) for k in _FIELDS}, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Fault("text that is not Unicode (a lone surrogate)") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise Fault(f"a value that is not JSON: {error}") from None
    task_id = record.get("uuid")
    require(isinstance(task_id, str) and task_id.strip(), f"field 'uuid' must be a str, found {_kind(task_id)}")
    for key in ("messages", "tools", "checklists"):
        require(isinstance(record.get(key), list), f"field {key!r} must be a list, found {_kind(record.get(key))}")
    messages = check_messages(record["messages"])
    check_tools(record["tools"])
    users = sum(m["role"] == "user" for m in messages)
    require(record["checklists"], "'checklists' is empty; the first checklist is the one used")
    checklists = [
        _parse_checklist(checklist, users, f"checklist {c}: " if c else "")
        for c, checklist in enumerate(record["checklists"])
    ]
    meta = record.get("meta")
    require(meta is None or isinstance(meta, Mapping), f"field 'meta' must be an object, found {_kind(meta)}")
    check_depth(meta, "meta")
    return Task(
        id=task_id, messages=messages, tools=tuple(record["tools"]), checklist=checklists[0], meta=dict(meta or {})
    )


_FIELDS = ("uuid", "messages", "tools", "checklists", "meta")


def _parse_checklist(checklist: Any, users: int, place: str) -> tuple[tuple[ChecklistItem, ...], ...]:
    require(isinstance(checklist, list), f"{place}a checklist must be a list of turns, found {_kind(checklist)}")
    require(
        len(checklist) == users,
        f"{place}checklist has {len(checklist)} turns, the conversation has {users} user turns",
    )
    turns = []
    for t, turn in enumerate(checklist):
        require(isinstance(turn, list), f"{place}turn {t} must be a list of items, found {_kind(turn)}")
        items = tuple(_parse_item(item, users, f"{place}turn {t}, item {i}") for i, item in enumerate(turn))
        total = sum(item.weight for item in items)
        require(abs(total - 1.0) <= WEIGHT_TOLERANCE, f"{place}weights of turn {t} sum to {total:.4g}, must sum to 1")
        turns.append(items)
    return tuple(turns)


def _parse_item(item: Any, users: int, place: str) -> ChecklistItem:
    require(isinstance(item, Mapping), f"{place}: must be an object, found {_kind(item)}")
    missing = [k for k in ("id", "question", "focus_on", "pass_condition", "weight") if item.get(k) is None]
    require(not missing, f"{place}: lacks {', '.join(missing)}")
    item_id, weight = item["id"], item["weight"]
    if isinstance(item_id, int) and not isinstance(item_id, bool):
        item_id = str(item_id)
    require_text(item_id, f"{place}: id")
    for key in ("question", "pass_condition", "focus_on"):
        require_text(item[key], f"{place}: {key}")
    require(
        item["focus_on"].startswith(FOCI),
        f"{place}: focus_on {item['focus_on']!r} must begin with one of {', '.join(FOCI)}",
    )
    require(
        isinstance(weight, int | float) and not isinstance(weight, bool), f"{place}: weight {weight!r} is no number"
    )
    require(0 <= weight <= 1 + WEIGHT_TOLERANCE, f"{place}: weight {weight!r} does not lie in 0..1")
    required = item.get("required_for_next_turn")
    require(required is None or isinstance(required, bool), f"{place}: required_for_next_turn must be true or false")
    rule = item.get("rule")
    if rule is not None:
        require(isinstance(rule, Mapping) and isinstance(rule.get("kind"), str), f"{place}: rule must have a kind")
        check_depth(rule, f"{place}: rule")
    return ChecklistItem(
        id=item_id,
        question=item["question"],
        focus_on=item["focus_on"],
        pass_condition=item["pass_condition"],
        weight=float(weight),
        failure_examples=_texts(item.get("failure_examples"), f"{place}: failure_examples"),
        evidence=_parse_evidence(item.get("evidence"), users, place),
        required_for_next_turn=bool(required),
        dependence=_texts(item.get("dependence"), f"{place}: dependence"),
        rule=rule,
    )


def _parse_evidence(evidence: Any, users: int, place: str) -> tuple[Mapping[str, Any], ...]:
    pieces = require_list(evidence, f"{place}: evidence")
    for e, piece in enumerate(pieces):
        where = f"{place}: evidence {e}"
        require(isinstance(piece, Mapping), f"{where} must be an object, found {_kind(piece)}")
        turn, step = piece.get("turn"), piece.get("step")
        for key, number in (("turn", turn), ("step", step)):
            whole = isinstance(number, int) and not isinstance(number, bool)
            require(whole or (key == "step" and number is None), f"{where}: {key} must be a whole number")
        require(0 <= turn < users, f"{where}: there is no turn {turn}, the conversation has {users} user turns")
        require(step is None or step >= 0, f"{where}: step {step} is negative")
        for key in ("from", "snippet"):
            require(isinstance(piece.get(key), str | None), f"{where}: {key} must be text")
        check_depth(piece, where)
    return pieces


def _texts(values: Any, place: str) -> tuple[str, ...]:
    texts = require_list(values, place)
    require(all(isinstance(text, str) for text in texts), f"{place} must be a list of texts")
    return texts


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


# The verl spelling: `messages` holds the prompt alone, everything else lies in `extra_info`.


def _is_parquet_row(record: Mapping[str, Any]) -> bool:
    return "extra_info" in record and "checklists" not in record


def _given_id(record: Mapping[str, Any]) -> Any:
    """The record's id as it stands there, if it is one at all."""
    given = record.get("uuid")
    if _is_parquet_row(record):
        given = _row_id(record["extra_info"])
    return given if isinstance(given, str | int) and not isinstance(given, bool) else None


def _row_id(info: Any) -> Any:
    if not isinstance(info, Mapping):
        return None
    original = info.get("original_index")
    return info.get("index") if original is None else original


def _from_parquet_row(row: Mapping[str, Any]) -> dict[str, Any]:
    info = row["extra_info"]
    require(isinstance(info, Mapping), f"extra_info must be an object, found {_kind(info)}")
    row_id = _row_id(info)
    require(
        isinstance(row_id, str | int) and not isinstance(row_id, bool),
        "extra_info has neither original_index nor index to name the record by",
    )
    arguments = info.get("interaction_kwargs")
    require(
        isinstance(arguments, Mapping), f"extra_info.interaction_kwargs must be an object, found {_kind(arguments)}"
    )
    kept = {key: info.get(key) for key in ("messages", "tools", "meta")}
    return {"uuid": str(row_id), "checklists": arguments.get("checklist_list"), **kept}


def _kind(value: Any) -> str:
    return type(value).__name__
