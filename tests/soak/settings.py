"""The parts of a run on two processes, beside the same on one; a store that fails; and what is wrong at the start.

    python tests/soak/settings.py --out /tmp/settings

Two steps each of: a judge over HTTP, a frozen reference (KL), two copies of the policy, dynamic sampling, and the
supervised warm start. Trajectories must be the same on two processes as on one, figures and parameters up to rounding.
Then a store that is full: on one process, on both for a while, and for good (a limit on the size of files, which the
system enforces). Then `envace train` itself with settings that differ, a mesh that does not fit, and without the other
process. The exit status is 1 when something is not as it should be.

The policy is the scripted one of `tests/train/chain.py`, which calls, rehearses and ends in every way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "train"), str(ROOT / "tests" / "soak")]
from together import OF_THE_CLOCK, free_port, start, wait_for_all  # noqa: E402

VERL = ROOT / "tests" / "fixtures" / "tasks" / "verl.parquet"
SAMPLED = ("judge", "reference", "split", "dynamic")
START_S = 60.0
RATE = 1e-3


def configurations(directory: Path, count: int, judge: str) -> dict[str, Any]:
    """What `SAMPLED` are, and `sft`."""
    from runs import make_config

    from envace_jax.config import SFTConfig, from_dict

    def make(name: str, tasks: Path = directory / "scripted.jsonl", rollout: dict | None = None, **sections: Any):
        return make_config(
            directory / "policy",
            directory / f"{name}_{count}",
            2,
            tasks={"kind": "checklist", "path": str(tasks)},
            rollout={
                "group_size": 4,
                "tasks_per_step": 2,
                "max_length": 256,
                "turn_tokens": 12,
                "response_tokens": 8,
                "max_turns": 5,
                **(rollout or {}),
            },
            train={"save_every": 2, "micro_batch": 4, "learning_rate": RATE},
            mesh={"data": 1, "fsdp": -1, "tp": 1},
            logging={"trajectories_every": 1},
            **sections,
        )

    return {
        "judge": make("judge", VERL, reward={"judge": {"base_url": judge, "model": "m"}}),
        "reference": make("reference", grpo={"kl": "k3", "kl_coef": 0.1}),
        "split": make("split", world={"split_parameters": True}),
        "dynamic": make("dynamic", rollout={"max_refills": 2, "group_size": 2}),
        "sft": from_dict(
            SFTConfig,
            {
                "model": str(directory / "policy"),
                "output_dir": str(directory / f"sft_{count}"),
                "data": {"kind": "jsonl", "path": str(VERL), "conversations": 3, "max_tokens": 512},
                "train": {"steps": 2, "learning_rate": RATE, "micro_batch": 1, "remat": False, "warmup_steps": 0},
                "mesh": {"data": 1, "fsdp": -1, "tp": 1},
                "logging": {"tensorboard": False},
            },
        ),
    }


def failing_store(directory: Path, index: int, attempt: Callable) -> None:
    """Runs of made-up episodes whose store is full: no file may have more than 100 KB, which parameters need."""
    from runs import episodes, make_config

    def full(on: bool) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if on else hard, hard))

    def run_with(name: str, steps: range, processes: tuple[int, ...]) -> None:
        from envace_jax import train

        def rollout(model, tasks, step):
            full(step in steps and index in processes)
            return episodes(model, tasks, step)

        config = make_config(
            directory / "policy",
            directory / name.partition(" ")[0],
            6,
            train={"save_every": 1, "micro_batch": 1},
            mesh={"data": 1, "fsdp": -1, "tp": 1},
            faults={"saves_behind": 3 if "good" in name else 4},
        )
        try:
            attempt(name, lambda: train.run(config, rollout=rollout))
        finally:
            full(False)

    run_with("full-on-one", range(1, 3), (1,))
    run_with("full-on-both", range(1, 3), (0, 1))
    run_with("full-for-good", range(1, 6), (0, 1))
    run_with("full-for-good again", range(0), ())


def worker(index: int, count: int, port: int, directory: Path, judge: str) -> None:
    """All of it, one after the other, on one process of `count`; what became of each is written down."""
    from envace_jax import train
    from envace_jax.config import FaultsConfig, SFTConfig
    from envace_jax.errors import EnvaceError
    from envace_jax.train.start import connect

    if count > 1:
        connect(f"127.0.0.1:{port}", count, index, faults=FaultsConfig(start_s=START_S, heartbeat_s=60.0))
    found: dict[str, str] = {}

    def attempt(name: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            work()
            found[name] = "done"
        except EnvaceError as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {found[name]} in {time.monotonic() - began:.0f} s", flush=True)

    for name, config in configurations(directory, count, judge).items():
        attempt(name, lambda c=config: train.sft(c) if isinstance(c, SFTConfig) else train.run(c))
    if count > 1:
        failing_store(directory, index, attempt)
    (directory / f"found_{count}_{index}.json").write_text(json.dumps(found))


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


def compare(directory: Path, name: str) -> list[str]:
    """What differs between the run on one process and that on two."""
    import numpy as np
    from flax import nnx

    from envace_jax.train import load_model
    from envace_jax.train.optim import named

    one, two = (directory / f"{name}_{count}" for count in (1, 2))
    problems = []
    lines = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (one, two)]
    own = {"batch/rows", "batch/micro_batches", "batch/pad_fraction"}  # each process fills rows of its own
    if [line["step"] for line in lines[1]] != [1, 2] or lines[0][0].keys() != lines[1][0].keys():
        problems.append("other lines")
    for ours, theirs in zip(*lines, strict=True):
        for key in ours.keys() - own:
            a, b = ours[key], theirs[key]
            if not key.startswith(OF_THE_CLOCK) and abs((a or 0) - (b or 0)) > 1e-6 + 1e-3 * abs(a or 0):
                problems.append(f"step {ours['step']}: {key} is {b}, not {a}")
    if name in SAMPLED:
        for step in (1, 2):
            if dumped(one, step) != dumped(two, step):
                problems.append(f"step {step}: other trajectories")
    for part in ("", "rehearser") if name == "split" else ("",):
        a, b = (named(nnx.state(load_model(out / part))) for out in (one, two))
        apart = max(float(np.max(np.abs(np.asarray(a[key]) - np.asarray(b[key])))) for key in a)
        if apart > RATE / 10:
            problems.append(f"parameters {part} are {apart:.1e} apart")
    if name == "dynamic" and max(line["episodes/count"] for line in lines[1]) <= 4:
        problems.append("nothing was sampled in place of groups without signal")
    return problems


def dumped(out: Path, step: int) -> list[tuple]:
    """Which episodes a step learned from, with what they said."""
    paths = sorted((out / "trajectories").glob(f"step_{step:06d}*.jsonl"), key=lambda path: (len(path.name), path.name))
    records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    names = ("trajectory", "group", "task", "tokens", "roles", "reward", "finish", "valid")
    return [tuple(map(str, (record[name] for name in names))) for record in records]


def on_both(directory: Path, judge: str) -> dict[str, list[str]]:
    """Problems of each part."""
    problems: dict[str, list[str]] = {}
    for count in (1, 2):
        port = free_port()
        commands = [[__file__, "worker", i, count, port, directory, judge] for i in range(count)]
        logs = [directory / f"worker_{count}_{i}.log" for i in range(count)]
        statuses = wait_for_all(start(commands, logs, directory / "xla"), 900)
        if any(statuses):
            raise SystemExit(f"{statuses}: see {logs}")
    found = [json.loads((directory / f"found_2_{i}.json").read_text()) for i in range(2)]
    for name in (*SAMPLED, "sft"):
        ended = [f"process {i}: {each[name]}" for i, each in enumerate(found) if each[name] != "done"]
        problems[name] = ended or compare(directory, name)
    for name in ("full-on-one", "full-on-both", "full-for-good again"):
        problems[name] = [f"process {i}: {each[name]}" for i, each in enumerate(found) if each[name] != "done"]
        problems[name] += whole_at_the_end(directory / name.partition(" ")[0])
    name = "full-for-good"
    problems[name] = [
        f"process {i}: {each[name]}"
        for i, each in enumerate(found)
        if "3 checkpoints in a row could not be written" not in each[name]
    ]
    return problems


def whole_at_the_end(out: Path) -> list[str]:
    from envace_jax.train import Checkpoints

    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    with Checkpoints(out, read_only=True) as checkpoints:
        latest = checkpoints.latest()
    return [] if (steps, latest) == ([1, 2, 3, 4, 5, 6], 6) else [f"steps {steps}, the last checkpoint is {latest}"]


def wrong_at_the_start(directory: Path) -> dict[str, list[str]]:
    """`envace train` on two processes, which must end with status 2, one line and within a minute."""
    config = directory / "wrong.yaml"
    config.write_text(
        f"model: {directory / 'policy'}\noutput_dir: {directory / 'wrong'}\nmesh: {{data: -1}}\n"
        "rollout: {max_length: 256, thinking: false}\nfaults: {start_s: 20}\n"
    )
    cases = {
        "seeds differ": ([[], ["seed=1"]], (0, 1), "process 1 is not like process 0: the setting seed is 1, not 0"),
        "a mesh for three": ([["mesh.data=3"]] * 2, (0, 1), "mesh data=3, fsdp=1, tp=1 needs 3 devices, there are 2"),
        "no coordinator": ([[], []], (1,), "no coordinator at 127.0.0.1"),
        "nobody else": ([[], []], (0,), "not all 2 processes came within faults.start_s=20 seconds"),
    }
    problems = {}
    for name, (settings, who, expected) in cases.items():
        port, began = free_port(), time.monotonic()
        options = ["--coordinator", f"127.0.0.1:{port}", "--processes", 2]
        commands = [["-m", "envace_jax.cli", "train", config, *settings[i], *options, "--process", i] for i in who]
        logs = [directory / f"{name.replace(' ', '_')}_{i}.log" for i in who]
        statuses = wait_for_all(start(commands, logs, directory / "xla"), 120)
        took = time.monotonic() - began
        problems[name] = [] if took < 60 and set(statuses) == {2} else [f"{statuses} after {took:.0f} s"]
        for path in logs:
            said = [line for line in path.read_text().splitlines() if line.strip()]
            if len(said) != 1 or expected not in said[0]:
                problems[name].append(f"{path.name}: {said[-3:]}")
    return problems


def main(directory: Path) -> bool:
    from tests.rewards.endpoint import Endpoint, verdict

    directory.mkdir(parents=True)
    make_inputs(directory)
    judge = Endpoint(
        lambda handler: handler.reply(verdict(zlib.crc32(handler.asked["messages"][1]["content"].encode()) % 3 > 0))
    )
    began = time.monotonic()
    problems = on_both(directory, judge.url) | wrong_at_the_start(directory)
    judge.close()
    for name, found in problems.items():
        print(f"{name}: {'as it should be' if not found else '; '.join(found[:5])}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    return not any(problems.values())


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*map(int, sys.argv[2:5]), Path(sys.argv[5]), sys.argv[6])
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    sys.exit(0 if main(parser.parse_args().out.absolute()) else 1)
