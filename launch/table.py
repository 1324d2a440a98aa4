"""The table of docs/tpu.md: the smallest slice of each chip that a configuration fits, as the compiler found.

    python -m launch.table measure configs/tpu_8b.yaml v5p     compiles up from the smallest slice that could do
    python -m launch.table render                              writes the table into docs/tpu.md

A slice whose chips cannot even hold what lies there beside any program (`costs.floor_bytes`) is not compiled. Each
compilation is one line of `launch/measured.jsonl`, whether it fits or not, so that a table can be made again, and
continued, without doing all of it over.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from envace_jax.config import Config, load_config
from launch.compile import candidate_meshes
from launch.costs import floor_bytes, guess_peak
from launch.programs import read_model
from launch.topology import CHIPS, SLICES, Topology, parse_topology

ROOT = Path(__file__).resolve().parent.parent
MEASURED, PAGE = ROOT / "launch" / "measured.jsonl", ROOT / "docs" / "tpu.md"
BEGIN, END = "<!-- table: python -m launch.table render -->", "<!-- end of table -->"
_TRIES = 4  # compilations for one chip


def measure(config_path: Path, family: str) -> None:
    """Compiles `config_path` for slices of one chip, the smallest that could do first, until one fits."""
    config = load_config(config_path)
    model = read_model(config.model)
    tries = 0
    for topology, floor in _slices(config, family):
        if floor > topology.chip.hbm_bytes:
            continue
        guesses = {m: guess_peak(config, model, *m, topology.hosts).peak for m in _meshes(config, topology)}
        data, fsdp, tp = min(guesses, key=guesses.get)
        mesh = [f"mesh.data={data}", f"mesh.fsdp={fsdp}", f"mesh.tp={tp}"]
        command = [sys.executable, "-m", "envace_jax.cli", "compile", str(config_path), *mesh]
        done = subprocess.run(
            [*command, "--topology", topology.name, "--json", "--no-proposal"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode not in (0, 1) or not done.stdout.strip():
            raise SystemExit(f"{topology.name}: {' '.join(command)} ended with {done.returncode} and found nothing")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        with MEASURED.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        tries += 1
        if found["fits"] or tries == _TRIES:
            return


def bounds(configs: Iterable[Path]) -> list[dict[str, Any]]:
    """By formula, for each configuration and chip: the slices that are too small, and the first that may do."""
    found = []
    for path in sorted(configs):
        config = load_config(path)
        for family, chip in CHIPS.items():
            for topology, floor in _slices(config, family):
                fits = False if floor > chip.hbm_bytes else None
                names = {"model": config.model, "topology": topology.name, "product": topology.product}
                sizes = {"chips": topology.chips, "floor_bytes": floor, "hbm_bytes": chip.hbm_bytes}
                found.append({**names, **sizes, "fits": fits})
                if fits is None:
                    break
    return found


def _slices(config: Config, family: str) -> Iterator[tuple[Topology, float]]:
    """Slices from the smallest on, with what lies on a chip at least."""
    model = read_model(config.model)
    for shape in SLICES[family].values():
        topology = Topology(CHIPS[family], shape)
        if meshes := _meshes(config, topology):
            yield topology, min(floor_bytes(config, model, topology, tp) for _, _, tp in meshes)


def _meshes(config: Config, topology: Topology) -> list[tuple[int, int, int]]:
    # More shards than a batch has rows would work on padding.
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    return [(d, f, t) for d, f, t in candidate_meshes(topology, read_model(config.model)) if d * f <= episodes]


def read(path: Path = MEASURED) -> list[dict[str, Any]]:
    """What was compiled: of a model on a slice and mesh, the last time."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = [json.loads(line) for line in lines]
    return list({(each["model"], each["topology"], *each["mesh"].values()): each for each in found}.values())


def table(found: Iterable[dict[str, Any]]) -> str:
    """Markdown: for each model and chip the smallest slice that fits, what it takes there, and why no smaller one does.
    Where none was found to fit, what is known: the smallest that may do, or that no slice does.

    found: of `read` and `bounds`.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in found:
        groups.setdefault((each["model"], parse_topology(each["topology"]).chip.name), []).append(each)
    lines = [
        "| model | slice | topology | mesh (data x fsdp x tp) | parameters | optimizer | peak | of | step, estimated "
        "| a smaller slice |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = list(CHIPS)
    for (model, chip), group in sorted(groups.items(), key=lambda item: (_size(item[0][0]), order.index(item[0][1]))):
        compiled = [each for each in group if "peak_bytes" in each]
        fitting = min((each for each in compiled if each["fits"]), key=_chips, default=None)
        refused = max((each for each in compiled if not each["fits"]), key=_chips, default=None)
        possible = min((each for each in group if each["fits"] is None), key=_chips, default=None)
        cells = ["", "", "", "", "", _gb(group[0]["hbm_bytes"]), ""]
        if fitting is not None:
            row, limit = fitting, fitting["chips"]
            mesh = " x ".join(str(row["mesh"][axis]) for axis in ("data", "fsdp", "tp"))
            sizes = [_gb(row[name]) for name in ("parameters_bytes", "optimizer_bytes", "peak_bytes", "hbm_bytes")]
            cells = [row["topology"], mesh, *sizes, f"{row['seconds_estimate']:.0f} s"]
            name = row["product"]
        elif refused is not None:
            name, limit = f"larger than {refused['product']}", refused["chips"] + 1
        elif possible is not None:
            name, limit = f"not compiled; at least {possible['product']}", possible["chips"]
        else:
            name, limit = f"no {chip}", math.inf
        smaller = max((each for each in group if each["chips"] < limit), key=_chips, default=None)
        lines.append("| " + " | ".join([model, name, *cells, _why_not(smaller)]) + " |")
    return "\n".join(lines)


def content() -> str:
    """The table of all configurations for TPUs."""
    return table([*read(), *bounds((ROOT / "configs").glob("tpu_*.yaml"))])


def _chips(found: dict[str, Any]) -> int:
    return found["chips"]


def _why_not(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none is sold"
    if "peak_bytes" in found:
        return f"{found['product']}: {_gb(found['peak_bytes'])} as compiled"
    return f"{found['product']}: {_gb(found['floor_bytes'])} by formula"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def insert(page: str, content: str) -> str:
    """The page with `content` between its two markers. Raises ValueError when it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}, between which the table goes")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    """The command line of this module."""
    match list(arguments):
        case ["measure", path, family] if family in CHIPS:
            measure(Path(path), family)
        case ["render"]:
            PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), content()), encoding="utf-8")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def _size(model: str) -> float:
    digits = "".join(c for c in model.rpartition("-")[2] if c.isdigit() or c == ".")
    return float(digits) if digits else 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
