"""The one form in which every evaluation reports: settings, measures with their uncertainty, floors.

    {"schema": 1, "evaluation": "mini", "settings": {"model": ..., "seed": 0, ...},
     "measures": {"success": {"value": 0.61, "low": 0.52, "high": 0.69, "count": 128}, ...},
     "floors": {"do_nothing": {"success": 0.0}}}

Values are as measured: shares in 0..1, losses in nats. Shares have Wilson intervals; other means have bootstrap
intervals that resample whole conversations, since the calls of one conversation stand or fall together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from envace_jax.errors import ConfigError
from envace_jax.evaluate.statistics import share

SCHEMA = 1
_RESAMPLES = 1000


@dataclass(frozen=True)
class Measure:
    """A figure over `count` observations, with the ends of its 95 % interval; None where it has none."""

    value: float
    low: float | None = None
    high: float | None = None
    count: int | None = None


@dataclass(frozen=True)
class Result:
    """What one evaluation found. `settings` holds all that it depends on, the model and the seed among it."""

    evaluation: str
    settings: Mapping[str, Any]
    measures: Mapping[str, Measure]
    floors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


@dataclass(frozen=True)
class Difference:
    """B less A of one measure, with the ends of its 95 % interval."""

    name: str
    a: float
    b: float
    low: float
    high: float

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


def share_measure(hits: Sequence[bool]) -> Measure:
    """The share of hits with its Wilson interval."""
    s = share(sum(map(bool, hits)), len(hits))
    return Measure(s.value, s.low, s.high, s.count)


def mean_measure(values: Sequence[float], clusters: Sequence[Any], weights: Sequence[float] | None = None) -> Measure:
    """The (weighted) mean of `values` with a bootstrap interval over whole clusters; always the same resamples."""
    if not values:
        return Measure(0.0, None, None, 0)
    weight = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    _, place = np.unique(np.asarray([str(c) for c in clusters]), return_inverse=True)
    sums = np.bincount(place, np.asarray(values, float) * weight)
    totals = np.bincount(place, weight)
    drawn = np.random.default_rng(0).integers(0, len(sums), (_RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / np.maximum(totals[drawn].sum(1), 1e-12)
    low, high = np.quantile(means, [0.025, 0.975])
    return Measure(float(sums.sum() / max(totals.sum(), 1e-12)), float(low), float(high), len(values))


def from_figures(figures: Mapping[str, float], prefix: str = "eval/") -> dict[str, Measure]:
    """Measures from flat figures, where `NAME_low`, `NAME_high` and `NAME_count` belong to NAME."""
    parts = ("low", "high", "count")
    of = {f"{name}_{part}" for name in figures for part in parts}
    out = {}
    for name, value in figures.items():
        if name in of:
            continue
        low, high, count = (figures.get(f"{name}_{part}") for part in parts)
        out[name.removeprefix(prefix)] = Measure(value, low, high, None if count is None else int(count))
    return out


def compare(a: Result, b: Result) -> list[Difference]:
    """The measures that both have with intervals. The two are taken as independent (Newcombe 1998, method 10), which
    errs on the side of noise where both saw the same tasks."""
    out = []
    for name, first in a.measures.items():
        second = b.measures.get(name)
        if second is None or None in (first.low, first.high, second.low, second.high):
            continue
        d = second.value - first.value
        low = d - math.hypot(second.value - second.low, first.high - first.value)
        high = d + math.hypot(second.high - second.value, first.value - first.low)
        out.append(Difference(name, first.value, second.value, low, high))
    return out


def write_result(result: Result, path: str | Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_result(path: str | Path) -> Result:
    """Raises ConfigError naming the file when it holds no result of this schema."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {found['schema']}, this version reads {SCHEMA}")
        measures = {name: Measure(**measure) for name, measure in found["measures"].items()}
        return Result(found["evaluation"], found["settings"], measures, found["floors"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not the result of an evaluation ({error}); write one with --out") from error


def report(result: Result, *, as_json: bool = False, out: str | Path | None = None) -> None:
    """Write the result to `out`, if given, and print it: as JSON, or as a table."""
    if out is not None:
        write_result(result, out)
    if as_json:
        print(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        print_result(result)


def print_result(result: Result, console: Console | None = None) -> None:
    """A table of all measures, those with an interval first, the floors below; of nothing there is no value."""
    title = "  ".join([result.evaluation, *(f"{name} {value}" for name, value in result.settings.items())])
    table = Table(title=title, title_justify="left")
    for column, justify in (("", "left"), ("value", "right"), ("95 % interval", "right"), ("of", "right")):
        table.add_column(column, justify=justify)
    for name, m in sorted(result.measures.items(), key=lambda pair: pair[1].low is None):
        if m.count == 0:
            table.add_row(name, "", "", "0")
            continue
        interval = "" if m.low is None or m.high is None else f"{m.low:.3f} – {m.high:.3f}"
        table.add_row(name, f"{m.value:.3f}", interval, "" if m.count is None else str(m.count))
    for floor, values in result.floors.items():
        table.add_section()
        for name, value in values.items():
            table.add_row(f"{name}, {floor}", f"{value:.3f}", "", "")
    (console or Console()).print(table)


def print_comparison(a: Result, b: Result, console: Console | None = None) -> list[Difference]:
    """What B changes against A, each figure marked where it is beyond noise; settings that differ come first."""
    console = console or Console()
    if a.evaluation != b.evaluation:
        raise ConfigError(f"{a.evaluation} and {b.evaluation} are different evaluations; compare two of one kind")
    for key in sorted(a.settings.keys() | b.settings.keys()):
        before, after = a.settings.get(key), b.settings.get(key)
        if before != after:
            console.print(f"{key}: {before} → {after}", markup=False)
    table = Table()
    for column in ("", "A", "B", "B − A", "95 % interval", ""):
        table.add_column(column, justify="left" if not column else "right")
    differences = compare(a, b)
    for d in differences:
        verdict = "beyond noise" if d.beyond_noise else ""
        row = (f"{d.a:.3f}", f"{d.b:.3f}", f"{d.b - d.a:+.3f}", f"{d.low:+.3f} – {d.high:+.3f}", verdict)
        table.add_row(d.name, *row)
    console.print(table)
    return differences
