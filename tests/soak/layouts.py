"""Eight devices as one process, two and four: the same training, and checkpoints that any of them goes on from.

    python tests/soak/layouts.py --out /tmp/layouts

Three steps as 4 x 2, 2 x 4 and 1 x 8 (processes x devices), on a mesh of data 2 x fsdp 2 x tp 2. Trajectories must be
the same, gradients equal to 1e-5 of their norm, parameters to a tenth of the learning rate. Then all three go on for
two steps from what four processes saved, with the tasks that come next, and four export what one exports. The exit
status is 1 when something is not as it should be.

Gradients are read from Adam's first moments in the checkpoints. A step whose rewards are all equal has none, but for
rounding: it is measured against the largest of the run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "soak")]
from compared import dumped, figures, gradients, minus, most, norm, states  # noqa: E402
from together import free_port, show, start, wait_for_all  # noqa: E402

COUNTS = (4, 2, 1)
DEVICES = 8
RATE, STEPS, MORE = 1e-3, 3, 5
TASKS = [f"task {number}" for number in range(2 * MORE)]  # two a step: once through


def configuration(directory: Path, name: str, steps: int):
    from tests.train.chain import make_run

    return make_run(
        directory / "policy",
        directory / name,
        directory / "scripted.jsonl",
        steps,
        train={"keep": None, "micro_batch": 1, "learning_rate": RATE},
        mesh={"data": 2, "fsdp": 2, "tp": 2},
    )


def worker(index: int, count: int, port: int, directory: Path) -> None:
    """One process of `count`."""
    from envace_jax import train
    from envace_jax.config import FaultsConfig
    from envace_jax.train.processes import processes
    from envace_jax.train.start import connect

    if count > 1:
        connect(f"127.0.0.1:{port}", count, index, faults=FaultsConfig(start_s=120.0, heartbeat_s=120.0))
    train.run(configuration(directory, f"steps_{count}", STEPS))

    def copy() -> None:
        if index == 0:
            shutil.copytree(directory / f"steps_{COUNTS[0]}", directory / f"on_{count}")

    processes().together("copying what four have saved", copy)
    train.run(configuration(directory, f"on_{count}", MORE))
    if count in (1, 4):
        train.export(directory / f"steps_{COUNTS[0]}", directory / f"hf_{count}", dtype="float32")


def compare(directory: Path) -> dict[str, list[str]]:
    """Problems, by what was looked at; the figures are printed."""
    problems: dict[str, list[str]] = {}
    train = configuration(directory, "any", 1).train
    for kind, steps, looked_at in (("steps", STEPS, range(1, STEPS + 1)), ("on", MORE, range(STEPS + 1, MORE + 1))):
        outs = {count: directory / f"{kind}_{count}" for count in COUNTS}
        read = {count: states(out, directory / "policy", train, steps) for count, out in outs.items()}
        ours = gradients(read[4], train.b1)
        largest = max(map(norm, ours))
        for count in COUNTS[1:]:
            name = f"{count} x {DEVICES // count} beside 4 x 2, " + ("three steps" if kind == "steps" else "going on")
            found = problems.setdefault(name, [])
            if [line["step"] for line in figures(outs[count])] != list(range(1, steps + 1)):
                found.append("not each step once")
            theirs = gradients(read[count], train.b1)
            for step in looked_at:
                if dumped(outs[count], step) != dumped(outs[4], step):
                    found.append(f"step {step}: other trajectories")
                size = norm(ours[step - 1])
                gradient = norm(minus(ours[step - 1], theirs[step - 1])) / max(size, 1e-6 * largest)
                apart = most(minus(read[4][step - 1][0], read[count][step - 1][0]))
                print(f"{name}: step {step}: gradients {gradient:.1e}, parameters {apart / RATE:.1e} of the rate apart")
                if not gradient < (1e-5 if size > 1e-6 * largest else 1.0):
                    found.append(f"step {step}: gradients {gradient:.1e} apart")
                if not apart < RATE / 10:
                    found.append(f"step {step}: parameters {apart:.1e} apart")
    drawn = [name for step in range(1, MORE + 1) for name in {row[2] for row in dumped(directory / "on_4", step)}]
    problems["each task once"] = [] if sorted(drawn) == TASKS else [f"drawn were {drawn}"]
    files = [(directory / f"hf_{count}" / "model.safetensors").read_bytes() for count in (4, 1)]
    problems["the export of four and of one"] = [] if files[0] == files[1] else ["other bytes"]
    return problems


def main(directory: Path, cache: Path) -> bool:
    from tests.train.chain import save_scripted, write_tasks

    began = time.monotonic()
    directory.mkdir(parents=True)
    tasks = write_tasks(directory / "scripted.jsonl", TASKS)
    save_scripted(directory / "chain", "inline", tasks, heads=2).rename(directory / "policy")
    for count in COUNTS:
        port = free_port()
        commands = [[__file__, "worker", i, count, port, directory] for i in range(count)]
        logs = [directory / f"worker_{count}_{i}.log" for i in range(count)]
        statuses = wait_for_all(start(commands, logs, cache, devices=DEVICES // count), 900)
        print(f"{count} x {DEVICES // count}: {statuses} after {time.monotonic() - began:.0f} s", flush=True)
        if any(statuses):
            show(logs)
            return False
    problems = compare(directory)
    for name, found in problems.items():
        print(f"{name}: {'as it should be' if not found else '; '.join(found[:5])}", flush=True)
    return not any(problems.values())


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*map(int, sys.argv[2:5]), Path(sys.argv[5]))
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument("--cache", type=Path, help="of compiled programs; default: in that directory")
    chosen = parser.parse_args()
    sys.exit(0 if main(chosen.out.absolute(), (chosen.cache or chosen.out / "xla").absolute()) else 1)
