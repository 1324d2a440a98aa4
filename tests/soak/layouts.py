"""Eight devices as one process, two and four: the same training, and checkpoints that any of them goes on from.

    python tests/soak/layouts.py --out /tmp/layouts

Three steps as 4 x 2, 2 x 4 and 1 x 8 (processes x devices), on a mesh of data 2 x fsdp 2 x tp 2. Trajectories must be
the same, gradients equal to 1e-5 of their norm, parameters to a tenth of the learning rate. Then all three go on for
two steps from what four processes saved, with the tasks that come next, and four export what one exports. The exit
status is 1 when something is not as it should be.

Gradients are read from Adam's first moments in the checkpoints: m(s) = b1 m(s - 1) + (1 - b1) g(s). A step whose
rewards are all equal has none, but for rounding: it is measured against the largest of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "train"), str(ROOT / "tests" / "soak")]
from together import free_port, start, wait_for_all  # noqa: E402

VERL = ROOT / "tests" / "fixtures" / "tasks" / "verl.parquet"

COUNTS = (4, 2, 1)
DEVICES = 8
RATE, STEPS, MORE = 1e-3, 3, 5


def make_inputs(directory: Path, heads: int = 1) -> None:
    """The scripted policy, and two tasks with rules."""
    from chain import save_chain

    from envace_jax.tasks import read_tasks
    from tests.rollout.conftest import make_task
    from tests.train.test_settings import INLINE

    items = [{"id": "a", "question": "?", "focus_on": "assistant.content", "pass_condition": "p", "weight": 1.0}]
    items[0]["rule"] = {"kind": "reply_states", "statements": ["Done 0"]}
    task = make_task(2, [items, items])
    records = [dataclasses.replace(task, id=name).to_json() for name in ("one", "two")]
    scripted = directory / "scripted.jsonl"
    scripted.write_text("".join(json.dumps(record) + "\n" for record in records))
    tasks = [task for path in (VERL, scripted) for task in read_tasks(str(path))]
    prompts = [m["content"] for task in tasks for m in task.messages]
    prompts += [json.dumps(tool) for task in tasks for tool in task.tools]
    save_chain(directory / "chain", INLINE, prompts, heads=heads).rename(directory / "policy")


def dumped(out: Path, step: int) -> list[tuple]:
    """Which episodes a step learned from, with what they said."""
    paths = sorted((out / "trajectories").glob(f"step_{step:06d}*.jsonl"), key=lambda path: (len(path.name), path.name))
    records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    names = ("trajectory", "group", "task", "tokens", "roles", "reward", "finish", "valid")
    return [tuple(map(str, (record[name] for name in names))) for record in records]


def configuration(directory: Path, name: str, steps: int):
    from runs import make_config

    return make_config(
        directory / "policy",
        directory / name,
        steps,
        tasks={"kind": "checklist", "path": str(directory / "scripted.jsonl")},
        rollout={
            "group_size": 4,
            "tasks_per_step": 2,
            "max_length": 256,
            "turn_tokens": 12,
            "response_tokens": 8,
            "max_turns": 5,
        },
        train={"save_every": 1, "keep": None, "micro_batch": 1, "learning_rate": RATE},
        mesh={"data": 2, "fsdp": 2, "tp": 2},
        logging={"trajectories_every": 1},
    )


def worker(index: int, count: int, port: int, directory: Path) -> None:
    """One process of `count`."""
    from envace_jax import train
    from envace_jax.config import FaultsConfig
    from envace_jax.train.processes import processes
    from envace_jax.train.start import connect

    if count > 1:
        connect(f"127.0.0.1:{port}", count, index, faults=FaultsConfig(start_s=60.0, heartbeat_s=60.0))
    train.run(configuration(directory, f"steps_{count}", STEPS))

    def copy() -> None:
        if index == 0:
            shutil.copytree(directory / f"steps_{COUNTS[0]}", directory / f"on_{count}")

    processes().together("copying what four have saved", copy)
    train.run(configuration(directory, f"on_{count}", MORE))
    if count in (1, 4):
        train.export(directory / f"steps_{COUNTS[0]}", directory / f"hf_{count}", dtype="float32")


def states(directory: Path, name: str, steps: int) -> list:
    """(parameters, first moments) behind every step from 1, by name."""
    import numpy as np
    from flax import nnx

    from envace_jax.train import Checkpoints, load_model, make_optimizer
    from envace_jax.train.optim import named
    from envace_jax.train.state import abstract_state

    def moments(opt_state) -> dict:
        (adam,) = [part for part in _parts(opt_state) if hasattr(part, "mu")]
        return {key: np.asarray(x, np.float64) for key, x in named(adam.mu).items()}

    params = nnx.state(load_model(directory / "policy"))
    like = abstract_state(params, make_optimizer(configuration(directory, name, steps).train))
    with Checkpoints(directory / name, keep=None, read_only=True) as checkpoints:
        read = [checkpoints.restore(like, step) for step in range(1, steps + 1)]
    return [({k: np.asarray(x) for k, x in named(s.params).items()}, moments(s.opt_state)) for s in read]


def _parts(opt_state):
    """All optimizer states in nested tuples."""
    if hasattr(opt_state, "mu") or not isinstance(opt_state, tuple):
        return [opt_state]
    return [part for inner in opt_state for part in _parts(inner)]


def gradients(moments: list[dict], b1: float) -> list[dict]:
    before = [{key: 0.0 for key in moments[0]}, *moments[:-1]]
    return [{k: (now[k] - b1 * old[k]) / (1 - b1) for k in now} for old, now in zip(before, moments, strict=True)]


def compare(directory: Path) -> dict[str, list[str]]:
    """Problems, by what was looked at; the figures are printed."""
    import numpy as np

    problems: dict[str, list[str]] = {}
    b1 = configuration(directory, "any", 1).train.b1
    for kind, steps, looked_at in (("steps", STEPS, range(1, STEPS + 1)), ("on", MORE, range(STEPS + 1, MORE + 1))):
        read = {count: states(directory, f"{kind}_{count}", steps) for count in COUNTS}
        wanted = {step: dumped(directory / f"{kind}_4", step) for step in looked_at}
        for count in COUNTS[1:]:
            name = f"{count} x {DEVICES // count} beside 4 x 2, " + ("three steps" if kind == "steps" else "going on")
            found = problems.setdefault(name, [])
            written = (directory / f"{kind}_{count}" / "metrics.jsonl").read_text().splitlines()
            if [json.loads(line)["step"] for line in written] != list(range(1, steps + 1)):
                found.append("not each step once")
            ours, theirs = (gradients([moments for _, moments in read[c]], b1) for c in (4, count))
            largest = max(np.sqrt(sum(np.sum(x**2) for x in g.values())) for g in ours)
            for step in looked_at:
                if dumped(directory / f"{kind}_{count}", step) != wanted[step]:
                    found.append(f"step {step}: other trajectories")
                a, b = ours[step - 1], theirs[step - 1]
                norm = np.sqrt(sum(np.sum(x**2) for x in a.values()))
                gradient = np.sqrt(sum(np.sum((a[key] - b[key]) ** 2) for key in a)) / max(norm, 1e-6 * largest)
                p, q = read[4][step - 1][0], read[count][step - 1][0]
                apart = max(float(np.max(np.abs(p[key] - q[key]))) for key in p)
                print(f"{name}: step {step}: gradients {gradient:.1e}, parameters {apart / RATE:.1e} of the rate apart")
                if not gradient < (1e-5 if norm > 1e-6 * largest else 1.0):
                    found.append(f"step {step}: gradients {gradient:.1e} apart")
                if not apart < RATE / 10:
                    found.append(f"step {step}: parameters {apart:.1e} apart")
    tasks = [{row[2] for row in dumped(directory / "on_4", step)} for step in range(1, MORE + 1)]
    print("tasks of each step:", [sorted(found) for found in tasks])
    files = [(directory / f"hf_{count}" / "model.safetensors").read_bytes() for count in (4, 1)]
    problems["the export of four and of one"] = [] if files[0] == files[1] else ["other bytes"]
    return problems


def main(directory: Path) -> bool:
    began = time.monotonic()
    directory.mkdir(parents=True)
    make_inputs(directory, heads=2)
    for count in COUNTS:
        port = free_port()
        commands = [[__file__, "worker", i, count, port, directory] for i in range(count)]
        logs = [directory / f"worker_{count}_{i}.log" for i in range(count)]
        statuses = wait_for_all(start(commands, logs, directory / "xla", devices=DEVICES // count), 900)
        print(f"{count} x {DEVICES // count}: {statuses} after {time.monotonic() - began:.0f} s", flush=True)
        if any(statuses):
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
    sys.exit(0 if main(parser.parse_args().out.absolute()) else 1)
