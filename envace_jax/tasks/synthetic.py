"""A small data set in the exact public format, in both spellings: the embedded world without what only it knows.

`rule` and `meta` are left out, so that its items wait for an LLM judge like those of the public data, and recorded
replies carry `<think>` blocks, as recorded ones do.

    python -m envace_jax.tasks.synthetic tests/fixtures/tasks      writes annotations.json, .jsonl and verl.parquet
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envace_jax.tasks.mini import mini_tasks
from envace_jax.tasks.records import ChecklistItem, Task

PUBLIC_FOCUS = {"assistant.content": "assistant.content.user_visible_reply"}


def annotations(count: int = 8, *, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    """`count` records in the annotation spelling: `uuid, messages, tools, checklists`, and nothing else."""
    return [_public(task) for task in mini_tasks(split, count, seed=seed)]


def verl_row(record: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The same record as a row of verl's parquet files: `messages` is the prompt alone."""
    messages = record["messages"]
    first_user = next(i for i, m in enumerate(messages) if m["role"] == "user")
    return {
        "messages": messages[: first_user + 1],
        "extra_info": {
            "index": index,
            "original_index": record["uuid"],
            "tools": json.dumps(record["tools"]),
            "messages": messages,
            "interaction_kwargs": {"checklist_list": record["checklists"]},
        },
    }


def write(directory: str | Path, records: Sequence[Mapping[str, Any]]) -> list[Path]:
    """The records as annotations.json (an array), annotations.jsonl and verl.parquet; returns their paths."""
    import pyarrow
    from pyarrow import parquet

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    whole, lines, rows = (directory / name for name in ("annotations.json", "annotations.jsonl", "verl.parquet"))
    whole.write_text(json.dumps(list(records), indent=1) + "\n", encoding="utf-8")
    lines.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    table = pyarrow.Table.from_pylist([verl_row(record, i) for i, record in enumerate(records)])
    parquet.write_table(table, rows)
    return [whole, lines, rows]


def _public(task: Task) -> dict[str, Any]:
    messages, turn, step = [], -1, 0
    for message in task.messages:
        message = dict(message)
        if message["role"] == "user":
            turn, step = turn + 1, 0
        if message["role"] == "assistant":
            what = "The records say what to call next." if message.get("tool_calls") else "All is done, I can reply."
            message["content"] = f"<think>\n{what}\n</think>\n\n{message['content']}".rstrip()
            for c, call in enumerate(message.get("tool_calls", ())):
                call["id"] = f"call_{turn}_{step}_{c}"
            step += 1
        messages.append(message)
    checklists = [[[_public_item(item, t) for item in turn] for t, turn in enumerate(task.checklist)]]
    return {"uuid": task.id, "messages": messages, "tools": list(task.tools), "checklists": checklists}


def _public_item(item: ChecklistItem, turn: int) -> dict[str, Any]:
    focus = PUBLIC_FOCUS.get(item.focus_on, item.focus_on)
    return {
        "id": item.id,
        "question": item.question,
        "focus_on": focus,
        "pass_condition": item.pass_condition,
        "failure_examples": list(item.failure_examples) or ["nothing of the kind is there"],
        "evidence": [{"turn": turn, "step": 0, "from": focus, "snippet": str(e["snippet"])} for e in item.evidence],
        "required_for_next_turn": item.required_for_next_turn,
        "dependence": list(item.dependence),
        "weight": item.weight,
    }


if __name__ == "__main__":
    for written in write(sys.argv[1], annotations()):
        print(written)
