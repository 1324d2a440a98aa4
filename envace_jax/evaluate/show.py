"""Evaluations for the eye: a table and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr while something runs; on no terminal, None."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(30), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def print_mini(setting: Mapping[str, Any], figures: Mapping[str, float], console: Console | None = None) -> None:
    """The figures of `evaluate_mini`: shares in percent with their 95 % intervals, then everything else."""
    title = "  ".join(f"{name} {value}" for name, value in setting.items())
    table = Table(title=title, title_justify="left")
    for column, justify in (("", "left"), ("%", "right"), ("95 % interval", "right"), ("of", "right")):
        table.add_column(column, justify=justify)
    for name, value in figures.items():
        if f"{name}_low" in figures:
            low, high = 100 * figures[f"{name}_low"], 100 * figures[f"{name}_high"]
            count = f"{figures[f'{name}_count']:.0f}"
            table.add_row(name.removeprefix("eval/"), f"{100 * value:.1f}", f"{low:.1f} – {high:.1f}", count)
    table.add_section()
    for name, value in figures.items():
        shown = f"{name}_low" in figures or name.endswith(("_low", "_high", "_count"))
        if not shown:
            percent = name in _PERCENT
            table.add_row(name.removeprefix("eval/"), f"{100 * value:.1f}" if percent else f"{value:.3g}")
    (console or Console()).print(table)


_PERCENT = {
    "eval/state",
    "eval/parse_rate",
    "eval/finish_done",
    "eval/do_nothing",
    "eval/state_unchanged",
}
