"""Kill a run of several processes at random moments until it is done, and compare it with one that nobody disturbed.

    python tests/soak/soak.py --processes 4 --kills 3 --out /tmp/soak

A moment is drawn from the time that the undisturbed run took, its start included; then one process, drawn too, gets
SIGKILL. The others must end by themselves, and all are started again. At the end each step must have one line of
metrics, and parameters and lines (but for times) must be equal to the bit. The exit status is 1 when they are not.

Episodes are made up, so that it is the processes, agreements and checkpoints that are tried, not the policy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "train")]
OF_THE_CLOCK = ("time/", "throughput/", "compile/")
START_S, HEARTBEAT_S = 120.0, 15.0


def worker(process: int, processes: int, port: int, policy: str, out: str, steps: int) -> None:
    """One process of the run."""
    from runs import episodes, make_config

    from envace_jax.config import FaultsConfig
    from envace_jax.train import run
    from envace_jax.train.start import connect

    faults = {"start_s": START_S, "heartbeat_s": HEARTBEAT_S}
    connect(f"127.0.0.1:{port}", processes, process, faults=FaultsConfig(**faults))

    def rollout(model, tasks, step):
        time.sleep(0.2)  # or most moments would fall into the start
        return episodes(model, tasks, step)

    config = make_config(
        policy,
        out,
        steps,
        mesh={"data": -1, "fsdp": 1, "tp": 1},
        faults=faults,
        train={"micro_batch": 1, "save_every": 3},
    )
    run(config, rollout=rollout)


def make_policy(directory: Path) -> None:
    """A tiny policy with random weights."""
    import dataclasses

    from flax import nnx

    from envace_jax.chat.build import train_tokenizer
    from envace_jax.tasks.mini.vocabulary import PATTERN, texts
    from models.qwen3 import Qwen3, Qwen3Config, save_hf

    train_tokenizer(texts(40), 512, directory / "tokenizer", pattern=PATTERN)
    config = dataclasses.replace(
        Qwen3Config.preset("qwen3-0.6b"),
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
    )
    save_hf(Qwen3(config, rngs=nnx.Rngs(0)), directory / "policy", "float32")
    for path in (directory / "tokenizer").iterdir():
        path.rename(directory / "policy" / path.name)


def start(settings: argparse.Namespace, out: Path, attempt: int) -> list[subprocess.Popen]:
    """All processes, each with one device and a log of its own."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(settings.out / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,
        "XLA_FLAGS": "",
    }
    started = []
    for process in range(settings.processes):
        arguments = [process, settings.processes, port, settings.out / "policy", out, settings.steps]
        with open(settings.out / f"{out.name}_{attempt}_{process}.log", "w") as log:
            command = [sys.executable, __file__, "worker", *map(str, arguments)]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return started


def wait_for_all(started: list[subprocess.Popen], within_s: float) -> list[int]:
    """Their exit statuses; those who have not ended in time are killed, and an error raised."""
    limit = time.monotonic() + within_s
    try:
        return [process.wait(max(limit - time.monotonic(), 0.1)) for process in started]
    finally:
        for process in started:
            process.kill()


def lines(out: Path) -> list[dict]:
    """The metrics of a run, without what depends on the clock."""
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in line.items() if not name.startswith(OF_THE_CLOCK)} for line in read]


def same_parameters(a: Path, b: Path) -> bool:
    import numpy as np
    from flax import nnx

    from envace_jax.train import load_model
    from envace_jax.train.optim import named

    ours, theirs = (named(nnx.state(load_model(out))) for out in (a, b))
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


def soak(settings: argparse.Namespace) -> bool:
    """Whether the disturbed run came to the same."""
    rng = random.Random(settings.seed)
    settings.out.mkdir(parents=True)
    make_policy(settings.out)
    quiet, disturbed = settings.out / "quiet", settings.out / "disturbed"
    began = time.monotonic()
    statuses = wait_for_all(start(settings, quiet, 0), settings.limit)
    took = time.monotonic() - began
    print(f"undisturbed: {statuses} after {took:.0f} s", flush=True)
    if any(statuses):
        return False
    kills = 0
    while True:
        started = start(settings, disturbed, kills)
        began, victim, moment = time.monotonic(), rng.randrange(settings.processes), rng.uniform(0, took)
        while kills < settings.kills and time.monotonic() - began < moment:
            time.sleep(0.05)
        if kills == settings.kills or all(process.poll() == 0 for process in started):
            statuses = wait_for_all(started, settings.limit)
            print(f"left alone: {statuses}", flush=True)
            break
        started[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        statuses = wait_for_all(started, START_S + 60)
        kills += 1
        print(
            f"kill {kills}: process {victim} after {moment:.1f} s; the others ended with {statuses} within "
            f"{time.monotonic() - killed:.1f} s",
            flush=True,
        )
    if any(statuses):
        return False
    steps = [line["step"] for line in lines(disturbed)]
    checks = {
        "each step once": steps == list(range(1, settings.steps + 1)),
        "the same figures": lines(disturbed) == lines(quiet),
        "the same parameters": same_parameters(disturbed, quiet),
    }
    for name, holds in checks.items():
        print(f"{name}: {'yes' if holds else 'NO'}", flush=True)
    return all(checks.values())


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        numbers = [int(text) for text in sys.argv[2:5]]
        worker(*numbers, sys.argv[5], sys.argv[6], int(sys.argv[7]))
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a run may take")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    sys.exit(0 if soak(parser.parse_args()) else 1)
