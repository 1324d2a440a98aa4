"""What a file of tasks holds: which records are rejected and why, and figures of those that are not.

Both go through the file once, record by record; what they keep is a few numbers for each.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from envace_jax.tasks.files import read_records
from envace_jax.tasks.records import Task, TaskError

WEIGHT_BINS = 10
LENGTH_BINS = 12
REFRESH_S = 0.2


class Renders(Protocol):
    """The part of `envace_jax.chat.ChatTokenizer` that counting tokens takes."""

    def render(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, enable_thinking: bool = True
    ) -> Sequence[int]: ...


@dataclass(frozen=True)
class Rejected:
    """A record that cannot be used. `id` is None where it has none, or none that can be read."""

    line: int
    id: str | int | None
    reason: str
    path: str


@dataclass
class Report:
    """What `check` found."""

    records: int = 0
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return self.records - len(self.rejected)

    def to_json(self) -> dict[str, Any]:
        """`{"records", "accepted", "rejected": [{"line", "id", "reason"}]}`, with a `file` where there are several."""
        many = len({r.path for r in self.rejected}) > 1
        rejected = [
            {"line": r.line, "id": r.id, "reason": r.reason} | ({"file": r.path} if many else {}) for r in self.rejected
        ]
        return {"records": self.records, "accepted": self.accepted, "rejected": rejected}


def check(
    path: str,
    *,
    split: str = "train",
    chat: Renders | None = None,
    max_prompt_tokens: int | None = None,
    thinking: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Every record of a file against the format; with a tokenizer, first prompts against `max_prompt_tokens` as well.

    A line that is no JSON counts as a record without an id. Raises TaskError only for a path that cannot be opened.
    """
    report = Report()
    for task in _accepted(path, split, report, chat, max_prompt_tokens, thinking, progress):
        del task
    return report


def prompt_length(task: Task, chat: Renders, thinking: bool = True) -> int:
    """Tokens of the first prompt, tools and generation prompt included."""
    return len(chat.render(task.prompt, list(task.tools), True, thinking))


def stats(
    path: str,
    *,
    split: str = "train",
    chat: Renders | None = None,
    max_prompt_tokens: int | None = None,
    thinking: bool = True,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Figures of the accepted records of a file, as a JSON object: counts of turns, messages, tools and checklist
    items by how often each number occurs, weights, and lengths in tokens where a tokenizer is given."""
    report = Report()
    counts: dict[str, Counter] = {name: Counter() for name in _COUNTED}
    weights = [0] * WEIGHT_BINS
    ids: set[str] = set()
    repeated = 0
    tools: Counter[str] = Counter()
    focus: Counter[str] = Counter()
    lengths = {"prompt_tokens": array("L"), "conversation_tokens": array("L")}
    for task in _accepted(path, split, report, chat, max_prompt_tokens, thinking, progress):
        repeated += task.id in ids
        ids.add(task.id)
        for name, count in _COUNTED.items():
            counts[name].update(count(task))
        tools.update({tool["function"]["name"] for tool in task.tools})
        for item in (item for turn in task.checklist for item in turn):
            weights[min(int(item.weight * WEIGHT_BINS), WEIGHT_BINS - 1)] += 1
            focus[item.focus_on] += 1
        if chat is not None:
            lengths["prompt_tokens"].append(prompt_length(task, chat, thinking))
            whole = chat.render(list(task.messages), list(task.tools), False, thinking)
            lengths["conversation_tokens"].append(len(whole))
    items = sum(weights)
    width = 1 / WEIGHT_BINS
    return {
        "records": report.records,
        "accepted": report.accepted,
        "rejected": len(report.rejected),
        "repeated_ids": repeated,
        **{name: _by_number(counter) for name, counter in counts.items()},
        "tools": dict(tools.most_common(20)),
        "distinct_tools": len(tools),
        "items": items,
        "focus_on": dict(focus.most_common()),
        "weights": [
            {"from": round(i * width, 6), "to": round((i + 1) * width, 6), "count": n} for i, n in enumerate(weights)
        ],
        **{name: _lengths(values) for name, values in lengths.items() if values},
    }


_COUNTED: dict[str, Callable[[Task], list[int]]] = {
    "user_turns": lambda task: [len(task.user_turns)],
    "messages": lambda task: [len(task.messages)],
    "calls": lambda task: [sum(len(m.get("tool_calls") or ()) for m in task.messages)],
    "tools_per_task": lambda task: [len(task.tools)],
    "items_per_turn": lambda task: [len(turn) for turn in task.checklist],
    "required_items_per_task": lambda task: [sum(i.required_for_next_turn for turn in task.checklist for i in turn)],
}


def _accepted(
    path: str,
    split: str,
    report: Report,
    chat: Renders | None,
    limit: int | None,
    thinking: bool,
    progress: Callable[[int], None] | None,
) -> Iterator[Task]:
    """The tasks that pass; the others go into the report."""
    for record in read_records(path, split=split):
        report.records += 1
        if progress is not None:
            progress(report.records)
        try:
            task = record.task()
            if chat is not None and limit is not None:
                length = prompt_length(task, chat, thinking)
                if length > limit:
                    reason = f"the first prompt has {length} tokens, more than {limit}"
                    raise TaskError(f"{record.where}, task {task.id!r}: {reason}", reason=reason, task_id=task.id)
        except TaskError as error:
            report.rejected.append(Rejected(record.line, error.task_id, error.reason, record.path))
            continue
        yield task


def _by_number(counter: Counter[int]) -> dict[str, int]:
    return {str(number): counter[number] for number in sorted(counter)}


def _lengths(values: array) -> dict[str, Any]:
    """Quantiles and a histogram whose bins are of a round width."""
    ordered = sorted(values)
    rough = max(ordered[-1] / LENGTH_BINS, 1)
    unit = 10 ** math.floor(math.log10(rough))
    width = max(int(next(step * unit for step in (1, 2, 5, 10) if step * unit >= rough)), 1)
    bins = Counter(value // width for value in ordered)
    return {
        "min": ordered[0],
        **{f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)},
        "max": ordered[-1],
        "mean": round(sum(ordered) / len(ordered), 1),
        "histogram": [
            {"from": i * width, "to": (i + 1) * width, "count": bins[i]}
            for i in range(ordered[0] // width, ordered[-1] // width + 1)
        ],
    }


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """A live line on the terminal's error stream: how many there were so far, and for how long. Silent elsewhere."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} {task.description}"), TimeElapsedColumn())
    # Refreshed from here, not by a thread: libraries that are imported lazily meanwhile (tfds) cannot bear one.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bars:
        bar = bars.add_task(what, total=None)
        shown = 0.0

        def show(done: int) -> None:
            nonlocal shown
            if time.monotonic() - shown >= REFRESH_S:
                shown = time.monotonic()
                bars.update(bar, completed=done, refresh=True)

        yield show
