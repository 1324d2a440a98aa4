"""The table of docs/tpu.md: the smallest slice of each chip that a configuration fits, as the compiler found.

    python -m launch.table measure configs/tpu_8b.yaml v5p     compiles up from the smallest slice that could do
    python -m launch.table render                              writes the table into docs/tpu.md

Each compilation is one line of `launch/measured.jsonl`, whether it fits or not, so that a table can be made again, and
continued, without doing all of it over.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from envace_jax.config import load_config
from launch.compile import candidate_meshes
from launch.costs import guess_peak
from launch.programs import read_model
from launch.topology import CHIPS, SLICES, Topology, parse_topology

ROOT = Path(__file__).resolve().parent.parent
MEASURED, PAGE = ROOT / "launch" / "measured.jsonl", ROOT / "docs" / "tpu.md"
BEGIN, END = "<!-- table: python -m launch.table render -->", "<!-- end of table -->"
_TRIES = 4  # compilations for one chip


def measure(config_path: Path, family: str) -> None:
    """Compiles `config_path` for slices of one chip, the smallest that could do by estimate first, until one fits."""
    config = load_config(config_path)
    model = read_model(config.model)
    tries = 0
    for shape in SLICES[family].values():
        topology = Topology(CHIPS[family], shape)
        guesses = {sizes: guess_peak(config, model, *sizes).peak for sizes in candidate_meshes(topology, model)}
        if not guesses or min(guesses.values()) > 1.5 * topology.chip.hbm_bytes:
            continue
        data, fsdp, tp = min(guesses, key=guesses.get)
        mesh = [f"mesh.data={data}", f"mesh.fsdp={fsdp}", f"mesh.tp={tp}"]
        command = [sys.executable, "-m", "envace_jax.cli", "compile", str(config_path), *mesh]
        done = subprocess.run(
            [*command, "--topology", topology.name, "--json", "--no-proposal"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode not in (0, 1):
            raise SystemExit(done.returncode)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        with MEASURED.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        tries += 1
        if found["fits"] or tries == _TRIES:
            return


def read(path: Path = MEASURED) -> list[dict[str, Any]]:
    """All that was compiled."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def table(measured: Iterable[dict[str, Any]]) -> str:
    """Markdown: for each model and chip the smallest slice that fits, and what it takes there."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for found in measured:
        key = (found["model"], parse_topology(found["topology"]).chip.name)
        if found["fits"] and (key not in best or found["chips"] < best[key]["chips"]):
            best[key] = found
    if not best:
        return "No slice has been compiled yet."
    lines = [
        "| model | slice | topology | mesh (data x fsdp x tp) | parameters | optimizer | peak | of | step, estimated |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    order = list(CHIPS)
    for (model, _), found in sorted(best.items(), key=lambda item: (_size(item[0][0]), order.index(item[0][1]))):
        mesh = " x ".join(str(found["mesh"][axis]) for axis in ("data", "fsdp", "tp"))
        sizes = [found[name] for name in ("parameters_bytes", "optimizer_bytes", "peak_bytes", "hbm_bytes")]
        cells = [model, found["product"], found["topology"], mesh, *(f"{size / 1e9:.1f} GB" for size in sizes)]
        lines.append("| " + " | ".join([*cells, f"{found['seconds_estimate']:.0f} s"]) + " |")
    return "\n".join(lines)


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
            PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), table(read())), encoding="utf-8")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def _size(model: str) -> float:
    digits = "".join(c for c in model.rpartition("-")[2] if c.isdigit() or c == ".")
    return float(digits) if digits else 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
