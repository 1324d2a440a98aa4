"""Kill a run of several processes at random moments until it is done, and compare it with one that nobody disturbed.

    python tests/soak/soak.py --processes 4 --kills 3 --out /tmp/soak
    python tests/soak/soak.py --processes 4 --kills 20 --out /tmp/soak --log docs/soak.md

A third of the moments is drawn from a start, before the first step is done; the others from the steps behind it, a
number of them and a part of one. Then one process, drawn too, gets SIGKILL. The others must end by themselves, and all
are started again.
At the end each step must have one line of metrics, and parameters and lines (but for times) must be equal to the bit.
The exit status is 1 when they are not.

The run is `envace train configs/mini.yaml` with fewer and shorter episodes, sampled, judged and learned from as always.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "soak")]
from compared import figures  # noqa: E402
from together import free_port, machine, show, start, wait_for_all  # noqa: E402

START_S, HEARTBEAT_S = 90.0, 15.0
STEPS_A_KILL, SAVE_EVERY = 4, 3
SMALLER = {
    "rollout.tasks_per_step": 4,
    "rollout.group_size": 4,
    "rollout.slots": 2,
    "rollout.max_turns": 4,
    "rollout.compile_ahead": "false",
    "train.micro_batch": 1,
    "train.save_every": SAVE_EVERY,
    "evaluation.every": 0,
    "faults.start_s": START_S,
    "faults.heartbeat_s": HEARTBEAT_S,
}


class Run:
    """One run directory, and the attempts at it."""

    def __init__(self, settings: argparse.Namespace, name: str):
        self.settings, self.out, self.attempts = settings, settings.out / name, 0
        self.ended_by_themselves = 0

    def start(self) -> list:
        """All processes, each with one device."""
        self.attempts += 1
        changed = SMALLER | {
            "model": ROOT / "models/qwen3_mini",
            "output_dir": self.out,
            "train.steps": self.settings.steps,
        }
        command = ["-m", "envace_jax.cli", "train", ROOT / "configs/mini.yaml"]
        command += [f"{key}={value}" for key, value in changed.items()]
        command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", self.settings.processes]
        everyone = range(self.settings.processes)
        commands = [[*command, "--process", i] for i in everyone]
        return start(commands, [self.log(i) for i in everyone], self.settings.cache, compiled="")

    def log(self, process: int) -> Path:
        return self.settings.out / f"{self.out.name}_{self.attempts}_{process}.log"

    def step(self) -> int | None:
        """The last step that this attempt has done."""
        found = re.findall(r"^step (\d+)/", self.log(0).read_text(errors="replace"), re.M)
        return int(found[-1]) if found else None

    def done(self) -> int:
        """Steps in the metrics."""
        path = self.out / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def held_up(self, statuses: list[int]) -> None:
        """An attempt ended by itself. Raises SystemExit where that is not allowed for."""
        print(f"it ended by itself: {statuses}", flush=True)
        show([self.log(i) for i in range(self.settings.processes)])
        if self.settings.hold_ups == 0:
            sys.exit(1)
        self.settings.hold_ups -= 1
        self.ended_by_themselves += 1

    def went_on_from(self) -> str:
        """What this attempt says of where it begins."""
        said = self.log(0).read_text(errors="replace")
        found = re.search(r"(?:going on|training) from step (\d+) to \d+(?:; half-written and left out: (.*))?", said)
        if found is None:
            return "-"
        return f"step {found[1]}" + (f" ({found[2]} half-written, left out)" if found[2] else "")


def same_parameters(a: Path, b: Path) -> bool:
    import numpy as np
    from flax import nnx

    from envace_jax.train import load_model
    from envace_jax.train.optim import named

    ours, theirs = (named(nnx.state(load_model(out))) for out in (a, b))
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


def undisturbed(run: Run) -> tuple[float, float]:
    """Seconds until its first step was done, and those of a step. Raises SystemExit when it fails."""
    while True:
        began, started, ready = time.monotonic(), run.start(), None
        while ready is None and all(process.poll() is None for process in started):
            time.sleep(0.2)
            ready = None if run.step() is None else time.monotonic() - began
        statuses = wait_for_all(started, run.settings.limit)
        print(f"undisturbed: {statuses} after {time.monotonic() - began:.0f} s", flush=True)
        if ready is not None and not any(statuses):
            break
        run.held_up(statuses)
        shutil.rmtree(run.out, ignore_errors=True)
    read = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    return ready, statistics.median(line["time/step_s"] for line in read[1:])


def disturb(run: Run, rng: random.Random, ready_s: float, step_s: float) -> dict | None:
    """One attempt, in which a process is killed. Returns what happened, None when the run was done before."""
    victim, early = rng.randrange(run.settings.processes), rng.random() < 1 / 3
    steps = 0 if early else rng.randrange(1, 2 * STEPS_A_KILL)
    pause = rng.uniform(0, ready_s if early else step_s)
    first = run.done()
    started = run.start()
    began = time.monotonic()

    def going_on() -> bool:
        return all(process.poll() is None for process in started)

    while not early and going_on() and (run.step() or 0) < min(first + steps, run.settings.steps - 2):
        time.sleep(0.05)
    limit = time.monotonic() + pause
    while going_on() and time.monotonic() < limit and (run.step() or 0) < run.settings.steps - 2:
        time.sleep(0.01)
    if all(process.poll() == 0 for process in started):
        return None
    if any(process.poll() for process in started):
        run.held_up(wait_for_all(started, START_S + 60))
        return disturb(run, rng, ready_s, step_s)
    at, step = time.monotonic() - began, run.step()
    started[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    statuses = wait_for_all(started, START_S + 60)
    return {
        "victim": victim,
        "at_s": at,
        "during": "the start" if step is None else f"step {step + 1}",
        "statuses": statuses,
        "ended_s": time.monotonic() - killed,
        "began_at": run.went_on_from(),
    }


def soak(settings: argparse.Namespace) -> bool:
    """Whether the disturbed run came to the same."""
    rng = random.Random(settings.seed)
    settings.out.mkdir(parents=True)
    where = machine()
    quiet, disturbed = Run(settings, "quiet"), Run(settings, "disturbed")
    ready_s, step_s = undisturbed(quiet)
    kills = []
    while len(kills) < settings.kills and (kill := disturb(disturbed, rng, ready_s, step_s)) is not None:
        kills.append(kill)
        others = [status for i, status in enumerate(kill["statuses"]) if i != kill["victim"]]
        print(
            f"kill {len(kills)}: process {kill['victim']} after {kill['at_s']:.1f} s, in {kill['during']} of an "
            f"attempt from {kill['began_at']}; the others ended with {others} within {kill['ended_s']:.1f} s",
            flush=True,
        )
    statuses = wait_for_all(disturbed.start(), settings.limit)
    print(f"left alone: from {disturbed.went_on_from()}, {statuses}", flush=True)
    if any(statuses):
        show([disturbed.log(i) for i in range(settings.processes)])
        return False
    lines = figures(disturbed.out)
    checks = {
        f"{settings.kills} kills before it was done": len(kills) == settings.kills,
        "those who were left never ended with success": all(
            status != 0 for kill in kills for status in kill["statuses"]
        ),
        "each step once": [line["step"] for line in lines] == list(range(1, settings.steps + 1)),
        "the same figures": lines == figures(quiet.out),
        "parameters equal to the bit": same_parameters(disturbed.out, quiet.out),
    }
    for name, holds in checks.items():
        print(f"{name}: {'yes' if holds else 'NO'}", flush=True)
    if settings.log is not None:
        settings.log.write_text(report(settings, where, kills, disturbed, checks), encoding="utf-8")
    return all(checks.values())


def report(settings: argparse.Namespace, where: str, kills: list[dict], run: Run, checks: dict[str, bool]) -> str:
    """The log, as a page."""
    rows = [
        f"| {number} | {kill['began_at']} | {kill['victim']} | {kill['at_s']:.1f} | {kill['during']} | "
        + ", ".join(str(status) for i, status in enumerate(kill["statuses"]) if i != kill["victim"])
        + f" | {kill['ended_s']:.1f} |"
        for number, kill in enumerate(kills, start=1)
    ]
    held = []
    if run.ended_by_themselves:
        held = [f"Besides, all ended by themselves {run.ended_by_themselves} times, the machine being held up.", ""]
    asked = " ".join(f"--{name} {getattr(settings, name)}" for name in ("processes", "kills", "steps", "seed"))
    return "\n".join(
        [
            "# A run that is killed again and again",
            "",
            f"Written by `python tests/soak/soak.py {asked} --log docs/soak.md`:",
            f"{settings.processes} processes of one CPU device each run `envace train configs/mini.yaml` for "
            f"{settings.steps} steps of {SMALLER['rollout.tasks_per_step']} tasks x {SMALLER['rollout.group_size']} "
            f"episodes of at most {SMALLER['rollout.max_turns']} turns, with a checkpoint every {SAVE_EVERY} steps.",
            "One process gets SIGKILL at a random moment; the others must end by themselves; all are started again.",
            f"`faults.heartbeat_s` is {HEARTBEAT_S:g}, `faults.start_s` {START_S:g}.",
            "Status 75 is what asks a scheduler for a restart, 2 that not all processes came together; -6 is JAX's own "
            "end of a process, when process 0 is gone or JAX has noticed first.",
            "",
            f"{where}.",
            "",
            "| kill | the attempt began at | process killed | after, s | in | the others ended with | within, s |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            *held,
            f"The last attempt, left alone, began at {run.went_on_from()} and came to step {settings.steps}. Beside "
            "the same run, not disturbed:",
            "",
            *(f"- {name}: {'yes' if holds else '**no**'}" for name, holds in checks.items()),
            "",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, help=f"of the run; default: {STEPS_A_KILL} for each kill, and as many more"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that a run may take")
    parser.add_argument("--hold-ups", type=int, default=0, help="how often the machine may be suspended meanwhile")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument("--cache", type=Path, help="of compiled programs; default: in that directory")
    parser.add_argument("--log", type=Path, help="write what happened there, as a page")
    chosen = parser.parse_args()
    chosen.out = chosen.out.absolute()
    chosen.cache = (chosen.cache or chosen.out / "xla").absolute()
    chosen.steps = chosen.steps or STEPS_A_KILL * (chosen.kills + 1)
    sys.exit(0 if soak(chosen) else 1)
