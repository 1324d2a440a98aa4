"""Pictures of results."""

from __future__ import annotations

from pathlib import Path

from envace_jax.errors import ConfigError
from envace_jax.evaluate.results import Measure, Result

LOOPS = {"forced": "after the real history", "closed": "after its own responses"}
SUBSETS = {"": "all calls", "/read_after_write": "reads after a write", "/must_fail": "calls that must fail"}
_COLOURS = ("#1f6f8b", "#d2691e")


def plot_fidelity(result: Result, path: str | Path) -> None:
    """Exact match by how many calls came before, and by kind of call, both loops, floors as lines; PNG, SVG or PDF.

    Raises ConfigError for a name that does not end in one of these.
    """
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: a picture's name ends in .png, .svg or .pdf")
    from matplotlib.figure import Figure  # slow to load

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_step, by_kind = figure.subplots(1, 2, sharey=True)
    for number, (loop, words) in enumerate(LOOPS.items()):
        stem = f"{loop}/exact_match/step_"
        steps = {name.removeprefix(stem): m for name, m in result.measures.items() if name.startswith(stem)}
        style = {"color": _COLOURS[number], "label": words}
        values = [100 * m.value for m in steps.values()]
        by_step.errorbar(list(steps), values, yerr=_bars(list(steps.values())), marker="o", capsize=3, **style)
        kinds = [result.measures[f"{loop}/exact_match{subset}"] for subset in SUBSETS]
        places = [k + 0.4 * number for k in range(len(kinds))]
        by_kind.bar(places, [100 * m.value for m in kinds], 0.38, yerr=_bars(kinds), capsize=3, **style)
    for (floor, values), dashes in zip(result.floors.items(), (":", "--", "-."), strict=False):
        if "exact_match" in values:
            for axes in (by_step, by_kind):
                line = {"color": "grey", "linestyle": dashes, "linewidth": 1, "label": f"{floor}, no model"}
                axes.axhline(100 * values["exact_match"], **line)
    by_kind.set_xticks([k + 0.2 for k in range(len(SUBSETS))], list(SUBSETS.values()))
    by_step.set(xlabel="calls before", ylabel="equal to the real response, %", ylim=(0, 100))
    by_step.legend(frameon=False)
    figure.suptitle("  ".join(f"{k} {v}" for k, v in result.settings.items() if k in ("model", "world", "split")))
    figure.savefig(path, dpi=150)


def _bars(measures: list[Measure]) -> list[list[float]]:
    """Lengths of the intervals below and above, in percent; 0 where a measure has none."""
    low = [100 * (m.value - m.low) if m.low is not None else 0.0 for m in measures]
    high = [100 * (m.high - m.value) if m.high is not None else 0.0 for m in measures]
    return [[max(0.0, x) for x in low], [max(0.0, x) for x in high]]
