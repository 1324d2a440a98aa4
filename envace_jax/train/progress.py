"""What a run shows while it goes on: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars


class Progress:
    """Steps done, figures of the last one, time left.

        with Progress(total=100, start=40) as progress:
            progress.update(41, {"reward": 0.5, "tokens/s": 900})
            progress.note("saved")

    Args:
        total: steps in all.
        start: steps done before; time left is reckoned from those done since.
        print_every: steps between two plain lines.
        console: where to; default is standard output.
    """

    def __init__(self, total: int, start: int = 0, *, print_every: int = 1, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._total, self._start, self._print_every = total, start, print_every
        self._began = time.monotonic()
        self._bars = self._task = None
        if self.console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(30), TextColumn("{task.fields[figures]}"))
            self._bars = Bars(*columns, console=self.console)
            self._task = self._bars.add_task("", total=total, completed=start, figures="")

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, step: int, figures: Mapping[str, float]) -> None:
        """Step `step` is done; `figures` are shown in order."""
        shown = [f"{name} {_short(value)}" for name, value in figures.items()]
        if step > self._start:
            left = (time.monotonic() - self._began) / (step - self._start) * (self._total - step)
            shown.append(f"left {timedelta(seconds=round(left))}")
        if self._bars is not None:
            self._bars.update(self._task, completed=step, figures="  ".join(shown))
        elif step % self._print_every == 0 or step == self._total:
            self.note(f"step {step}/{self._total}  " + "  ".join(shown))

    def note(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, markup=False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
