"""The settings of the method on two processes, each beside the same run on one.

    python tests/soak/settings.py --out /tmp/settings

A judge that is slow on one host, a step with fewer episodes than processes, two sets of parameters in both forms of
rehearsal, every term of the objective (a reference policy among them), groups that are sampled in place of those
without signal, and the supervised warm start: two steps each, one after the other on the same two processes of one
device. Trajectories must be the same, figures equal to 1e-4, first moments of Adam to 1e-4 of their norm, each
parameter to a tenth of the learning rate in the mean (of single elements the gradient may be nothing but rounding, of
which Adam makes a step), and what a token was sampled with must be what the trainer says of it. The exit status is 1
when something is not as it should be.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "soak")]
from compared import dumped, figures, mean, minus, norm, states  # noqa: E402
from together import free_port, show, start, wait_for_all  # noqa: E402

COUNTS = (1, 2)
RATE, STEPS = 1e-3, 2
SLOW, SLOW_S = "of the slow host", 1.0  # its key at the judge, and how long that takes there
# Each process packs rows of its own, and asks the judge what the others have asked too, over connections of its own.
OF_THE_COUNT = [f"batch/{name}" for name in ("rows", "micro_batches", "pad_fraction")]
OF_THE_COUNT += [f"judge/{name}" for name in ("requests", "retries", "cache_hits", "seconds")]


def sections(directory: Path, judge: str) -> dict[str, dict[str, Any]]:
    """What differs from `make_run`, by setting. Those that share their programs are neighbours."""
    from tests.train.chain import EVERY_TERM, VERL

    # As many rows of the cache, the same lengths and terms where nothing else is asked for: what is compiled for one
    # setting serves the others.
    alike = {"rollout": {"slots": 8}, "grpo": {"entropy_coef": 0.01}}
    asked = alike | {"tasks": VERL, "reward": {"judge": {"base_url": judge, "model": "m"}}}
    own = alike | {"tasks": directory / "scripted.jsonl"}
    prompted = {"form": "simulator", "split_parameters": True, "reference_results": True}
    return {
        "judged": asked,
        "lonely": asked | {"rollout": {"slots": 8, "group_size": 1, "tasks_per_step": 1}},
        "refilled": own | {"rollout": {"slots": 8, "group_size": 2, "max_refills": 3}},
        "every_term": own | EVERY_TERM | {"rollout": {"max_refills": 1}},
        "split": own | {"world": {"split_parameters": True}},
        "split_prompts": own | {"world": prompted},
    }


def configuration(directory: Path, name: str, count: int, changes: Mapping[str, Any]):
    from tests.train.chain import make_run

    form = changes.get("world", {}).get("form", "inline")
    changed = dict(changes)
    return make_run(
        directory / form,
        directory / f"{name}_{count}",
        changed.pop("tasks"),
        STEPS,
        **changed | {"train": {"keep": None, "learning_rate": RATE} | changes.get("train", {})},
        mesh={"data": 1, "fsdp": count, "tp": 1},
    )


def warm_start(directory: Path, count: int):
    """Three conversations a step: more on one process than on the other."""
    from envace_jax.config import SFTConfig, from_dict

    values = {
        "model": str(directory / "inline"),
        "output_dir": str(directory / f"warm_{count}"),
        "data": {"kind": "jsonl", "path": str(directory / "scripted.jsonl"), "conversations": 3, "max_tokens": 64},
        "train": {"steps": STEPS, "learning_rate": RATE, "micro_batch": 1, "remat": False, "schedule": "constant"},
        "mesh": {"data": 1, "fsdp": count, "tp": 1},
        "logging": {"tensorboard": False},
    }
    values["train"] |= {"warmup_steps": 0, "save_every": 1, "keep": None}
    return from_dict(SFTConfig, values)


def worker(index: int, count: int, port: int, directory: Path, judge: str) -> None:
    """One process of `count`."""
    from envace_jax import train
    from envace_jax.config import FaultsConfig
    from envace_jax.train.start import connect

    os.environ["OPENAI_API_KEY"] = SLOW if index == 1 else "of another host"
    if count > 1:
        connect(f"127.0.0.1:{port}", count, index, faults=FaultsConfig(start_s=120.0, heartbeat_s=120.0))
    began = time.monotonic()

    def ended(name: str) -> None:
        print(f"{name}: ended after {time.monotonic() - began:.0f} s", flush=True)

    for name, changes in sections(directory, judge).items():
        train.run(configuration(directory, name, count, changes))
        ended(name)
    train.sft(warm_start(directory, count))
    ended("warm")


def compare(directory: Path, name: str, policy: Path, train: Any) -> list[str]:
    """What is not alike of one setting; the figures are printed."""
    one, two = (directory / f"{name}_{count}" for count in COUNTS)
    ours, theirs = figures(one), figures(two)
    found = [] if [line["step"] for line in ours] == list(range(1, STEPS + 1)) else ["not each step once"]
    for a, b in zip(ours, theirs, strict=True):
        if a.keys() != b.keys():
            found.append(f"step {a['step']}: other figures: {sorted(a.keys() ^ b.keys())}")
        apart = {
            key: (a[key], b[key])
            for key in a.keys() & b.keys()
            if key.removeprefix("rehearser/") not in OF_THE_COUNT
            and not math.isclose(a[key], b[key], rel_tol=1e-4, abs_tol=1e-6)
        }
        found += [f"step {a['step']}: {key} {x:g} and {y:g}" for key, (x, y) in sorted(apart.items())]
    diffs = [value for line in theirs for key, value in line.items() if key.endswith("logps/sampler_trainer_diff")]
    found += [f"logps/sampler_trainer_diff {value:.1e}" for value in diffs if not value < 1e-4]
    for step in range(1, STEPS + 1):
        if dumped(one, step) != dumped(two, step):
            found.append(f"step {step}: other trajectories")
    for part in ("", "rehearser"):
        if not (two / part / "checkpoints").is_dir():
            continue
        read = zip(*(states(out / part, policy, train, STEPS) for out in (one, two)), strict=True)
        for step, ((p, m), (q, n)) in enumerate(read, start=1):
            moments, parameters = norm(minus(m, n)) / max(norm(m), 1e-12), mean(minus(p, q))
            print(
                f"{name}: step {step}: {f'{part}, ' if part else ''}moments {moments:.1e}, "
                f"parameters {parameters / RATE:.1e} of the rate apart"
            )
            if not moments < 1e-4 or not parameters < RATE / 10:
                found.append(f"step {step}: other parameters ({part or 'the policy'})")
    return found


def reached(directory: Path, judge: Any) -> dict[str, bool]:
    """Whether the runs were what they are here for."""
    lines = {path.name: figures(path) for path in directory.glob("*_2") if path.is_dir()}
    one_episode = [
        (directory / "lonely_2/trajectories" / f"step_000001{part}.jsonl").read_text() for part in ("", ".1")
    ]
    return {
        "the judge was slow on one host": any(request["key"] == f"Bearer {SLOW}" for request in judge.requests),
        "it was asked by both": len({request["key"] for request in judge.requests}) == 2,
        "a process had no episode": len(one_episode[0]) > 0 and one_episode[1] == "",
        "that step was learned from": all(line["grad/norm"] > 0 for line in lines["lonely_2"]),
        "groups were replaced": any(line["episodes/learned_fraction"] < 1 for line in lines["refilled_2"]),
        "the policy left its reference": lines["every_term_2"][1]["kl/reference"] > 1e-6,
        "both roles learned": all(
            line[f"{part}grad/norm"] > 0
            for name in ("split_2", "split_prompts_2")
            for line in lines[name]
            for part in ("", "rehearser/")
        ),
        "the warm start learned": lines["warm_2"][1]["loss/total"] < lines["warm_2"][0]["loss/total"],
    }


def main(directory: Path, cache: Path) -> bool:
    from tests.rewards.endpoint import Endpoint
    from tests.train.chain import SCRIPTS, decide, save_scripted, write_tasks

    def judged(handler: Any) -> None:
        if handler.headers["Authorization"] == f"Bearer {SLOW}":
            time.sleep(SLOW_S)
        decide(handler)

    began = time.monotonic()
    directory.mkdir(parents=True)
    tasks = write_tasks(directory / "scripted.jsonl")
    for form in SCRIPTS:
        save_scripted(directory / f"chain_{form}", form, tasks).rename(directory / form)
    judge, port = Endpoint(judged), free_port()
    everyone = [(i, count) for count in COUNTS for i in range(count)]
    commands = [[__file__, "worker", i, count, port, directory, judge.url] for i, count in everyone]
    logs = [directory / f"worker_{count}_{i}.log" for i, count in everyone]
    statuses = wait_for_all(start(commands, logs, cache), 900)
    print(f"one process and two: {statuses} after {time.monotonic() - began:.0f} s", flush=True)
    if any(statuses):
        show(logs)
        return False
    problems = {}
    for name, changes in sections(directory, judge.url).items():
        config = configuration(directory, name, 1, changes)
        problems[name] = compare(directory, name, Path(config.model), config.train)
    config = warm_start(directory, 1)
    problems["warm"] = compare(directory, "warm", Path(config.model), config.train)
    for name, found in problems.items():
        print(f"{name}: {'as it should be' if not found else '; '.join(found[:5])}", flush=True)
    reasons = reached(directory, judge)
    for name, holds in reasons.items():
        print(f"{name}: {'yes' if holds else 'NO'}", flush=True)
    return not any(problems.values()) and all(reasons.values())


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*map(int, sys.argv[2:5]), Path(sys.argv[5]), sys.argv[6])
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument("--cache", type=Path, help="of compiled programs; default: in that directory")
    chosen = parser.parse_args()
    sys.exit(0 if main(chosen.out.absolute(), (chosen.cache or chosen.out / "xla").absolute()) else 1)
