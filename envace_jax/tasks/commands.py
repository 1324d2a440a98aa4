"""What `envace data build|check|stats` print. Each returns the exit status of its verb."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from envace_jax.errors import CheckpointError, ConfigError
from envace_jax.tasks.inspection import Renders, check, counting, stats
from envace_jax.tasks.records import TaskError
from envace_jax.tasks.tfds_builder import build

BAR = 40  # characters of the longest bar of a histogram


def run_check(
    path: str, *, split: str, tokenizer: str | None, max_prompt_tokens: int | None, thinking: bool, as_json: bool
) -> int:
    """Status 1 when a record is rejected."""
    console = Console(highlight=False, soft_wrap=True)
    with counting("records") as progress:
        report = check(
            path,
            split=split,
            chat=_tokenizer(tokenizer, max_prompt_tokens),
            max_prompt_tokens=max_prompt_tokens,
            thinking=thinking,
            progress=progress,
        )
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        for r in report.rejected:
            named = "" if r.id is None else f", task {r.id!r}"
            console.print(f"{r.path}, line {r.line}{named}: {r.reason}", markup=False)
        console.print(f"{report.records:,} records, {report.accepted:,} accepted, {len(report.rejected):,} rejected")
    return 1 if report.rejected else 0


def run_stats(
    path: str, *, split: str, tokenizer: str | None, max_prompt_tokens: int | None, thinking: bool, as_json: bool
) -> int:
    """Status 0; rejected records are counted and left out."""
    with counting("records") as progress:
        figures = stats(
            path,
            split=split,
            chat=_tokenizer(tokenizer, max_prompt_tokens),
            max_prompt_tokens=max_prompt_tokens,
            thinking=thinking,
            progress=progress,
        )
    if as_json:
        print(json.dumps(figures, ensure_ascii=False))
        return 0
    console = Console(highlight=False)
    console.print(
        f"{figures['records']:,} records, {figures['accepted']:,} accepted, {figures['rejected']:,} rejected, "
        f"{figures['repeated_ids']:,} with an id seen before; {figures['items']:,} checklist items, "
        f"{figures['distinct_tools']:,} distinct tools"
    )
    for name, value in figures.items():
        if isinstance(value, Mapping) and "histogram" in value:
            summary = ", ".join(f"{key} {number:,}" for key, number in value.items() if key != "histogram")
            console.print(f"\n{_title(name)}: {summary}")
            console.print(_bars([(f"{b['from']:,} to {b['to']:,}", b["count"]) for b in value["histogram"]]))
        elif isinstance(value, Mapping) and value:
            console.print(f"\n{_title(name)}")
            console.print(_bars(list(value.items())))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            console.print(f"\n{_title(name)}")
            console.print(_bars([(f"{b['from']} to {b['to']}", b["count"]) for b in value]))
    return 0


def run_build(source: str, out: str, *, further: Sequence[str], skip_bad: bool) -> int:
    """Status 0 when the data set is written. `further`: more splits, as NAME=SOURCE."""
    sources = {"train": source}
    for entry in further:
        name, equals, file = entry.partition("=")
        if not (equals and name and file) or name in sources:
            raise ConfigError(f"--split {entry}: expected NAME=FILE, with a name that is not taken yet")
        sources[name] = file
    console = Console(highlight=False, soft_wrap=True)
    bad: list[TaskError] = []
    with counting("tasks") as progress:
        counts = build(sources, out, on_error=bad.append if skip_bad else None, progress=progress)
    for error in bad:
        console.print(f"left out: {error}", markup=False)
    made = ", ".join(f"{count:,} tasks in {name}" for name, count in counts.items())
    console.print(f"{out}: {made}; train on it with tasks.kind=checklist tasks.path={out}", markup=False)
    return 0


def _title(name: str) -> str:
    return name.replace("_", " ")


def _bars(rows: Sequence[tuple[str, int]]) -> Table:
    most = max((count for _, count in rows), default=0) or 1
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for name, count in rows:
        table.add_row(name, f"{count:,}", "█" * round(count / most * BAR))
    return table


def _tokenizer(directory: str | None, limit: int | None) -> Renders | None:
    if directory is None:
        if limit is not None:
            raise ConfigError("--max-prompt-tokens counts tokens: give a --tokenizer directory too")
        return None
    if not os.path.isdir(directory):
        raise CheckpointError(f"--tokenizer {directory}: no such directory")
    from envace_jax.chat import ChatTokenizer

    try:
        return ChatTokenizer.from_pretrained(directory)
    except Exception as error:
        raise CheckpointError(f"--tokenizer {directory}: cannot be used ({' '.join(str(error).split())})") from error
