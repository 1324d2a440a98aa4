"""What rehearsal at test time is worth and costs, in the embedded world: a table, as measured in one process.

    python -m bench.rehearsal TRAINED --base models/qwen3_mini --tasks 500 --out runs/rehearsal.jsonl

The actor is always TRAINED; plans are made by it, or by the base model. Plans, rehearsals and real turns are drawn at
one temperature. One JSON line for each row, appended as it is measured, so that a run that was stopped goes on where it
was; with `--by trained` and `--by base` two processes, each on a core of its own, share the rows. `--table` prints the
file as Markdown instead. Seconds are of processor time, all threads together, after a warm-up that compiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from envace_jax.chat import ChatTokenizer
from envace_jax.evaluate.rehearsing import evaluate_rehearsal, local_policy, side_by_side
from envace_jax.rehearse import ACTOR, PLANNER, REHEARSER, RehearseSettings
from envace_jax.tasks.mini import mini_tasks
from envace_jax.train import load_model, tokenizer_directory

MEMORY_TOKENS = 400
WARM_UP = 64  # tasks


def rows(
    counts: list[int], with_base: bool, temperature: float, top_p: float
) -> Iterator[tuple[str, RehearseSettings]]:
    """(who plans, settings) of every row."""
    common = RehearseSettings(
        memory_tokens=MEMORY_TOKENS,
        critique=False,
        temperature=temperature,
        top_p=top_p,
        act_temperature=temperature,
        act_top_p=top_p,
    )
    yield "nobody", dataclasses.replace(common, plans=0)
    several = [plans for plans in counts if plans > 1]  # one plan in sequence is one plan
    for who in ("trained", "base") if with_base else ("trained",):
        for plans in counts:
            yield who, dataclasses.replace(common, plans=plans)
        if who == "trained":
            for plans in several:
                yield who, dataclasses.replace(common, plans=plans, memory="vote")
            yield who, dataclasses.replace(common, plans=max(counts), memory_tokens=None)
        for plans in several:
            yield who, dataclasses.replace(common, plans=plans, mode="sequential")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", nargs="?", help="HF directory or run directory of the actor")
    parser.add_argument("--base", help="HF directory of the other planner")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--plans", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0, help="of all that is sampled")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--by", choices=("trained", "base"), help="only rows whose plans this one makes")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--table", action="store_true", help="print what --out holds as Markdown")
    given = parser.parse_args()
    if given.table:
        print(table(read(given.out)))
        return
    if given.trained is None:
        parser.error("give the directory of a trained model")
    tasks = list(mini_tasks("test", given.tasks))

    def policy(directory: str) -> Any:
        chat = ChatTokenizer.from_pretrained(tokenizer_directory(directory))
        return local_policy(load_model(directory), chat, tasks, 1024, given.seed)

    own, base = policy(given.trained), policy(given.base) if given.base else None
    done = [(row["who"], row["settings"]) for row in read(given.out)]
    wanted = list(rows(given.plans, base is not None, given.temperature, given.top_p))
    warm: set[str] = set()
    for who, settings in wanted:
        if given.by not in (None, "trained" if who == "nobody" else who):
            continue
        if (who, dataclasses.asdict(settings)) in done:
            continue
        planner = base if who == "base" else own
        policies = {ACTOR: own, PLANNER: planner, REHEARSER: planner}
        at_once = side_by_side(settings)
        if who not in warm:
            evaluate_rehearsal(policies, tasks[:WARM_UP], settings, at_once)
            warm.add(who)
        began = time.process_time()
        measures, _ = evaluate_rehearsal(policies, tasks, settings, at_once)
        spent = (time.process_time() - began) / len(tasks)
        row = {
            "who": who,
            "settings": dataclasses.asdict(settings),
            "tasks": given.tasks,
            "seed": given.seed,
            "trained": given.trained,
            "base": given.base,
            "device": jax.devices()[0].device_kind,
            "cpu_seconds": spent,
            "measures": {name: dataclasses.asdict(measure) for name, measure in measures.items()},
        }
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def table(measured: list[dict[str, Any]]) -> str:
    head = "| plans by | mode | N | success | departures | tokens in plans | tokens in acting | CPU seconds |"
    return "\n".join([head, "|---" * 8 + "|", *map(line, measured)])


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    s, m = row["settings"], row["measures"]
    mode = s["mode"] if s["plans"] else "none"
    if s["memory"] == "vote" and s["plans"]:
        mode += ", vote"
    elif s["plans"] and s["memory_tokens"] is None:
        mode += ", no budget"
    success = m["success"]
    cells = [
        row["who"],
        mode,
        str(s["plans"]),
        f"{100 * success['value']:.1f} % ({100 * success['low']:.1f} – {100 * success['high']:.1f})",
        f"{100 * m['departures']['value']:.1f} %" if m["departures"]["count"] else "",
        f"{m['plan_tokens']['value']:.0f}",
        f"{m['act_tokens']['value']:.0f}",
        f"{row['cpu_seconds']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
