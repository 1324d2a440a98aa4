"""What two processes do together, as a program: `python pair.py PROCESS PORT POLICY ROOT`.

Several runs one after the other, since starting a process costs more than a run of this size. What each came to is
written to ROOT/PROCESS.json; a test reads it.
"""

import json
import os
import resource
import signal
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from envace_jax.config import Config, FaultsConfig, from_dict
from envace_jax.errors import EnvaceError
from envace_jax.evaluate import during_training
from envace_jax.rollout.trajectory import ACT, REHEARSE, TokenStream
from envace_jax.train import run
from envace_jax.train.processes import processes
from envace_jax.train.start import connect

STEPS, TASKS, GROUP = 3, 3, 2


def make_config(policy, out, steps=STEPS, **sections):
    """Three groups of two: a group lies on both of two processes."""
    values = {
        "model": str(policy),
        "output_dir": str(out),
        "rollout": {"group_size": GROUP, "tasks_per_step": TASKS, "max_length": 32, "thinking": False},
        "train": {"steps": steps, "learning_rate": 1e-3, "micro_batch": 1, "remat": False, "save_every": 2},
        "mesh": {"data": 1, "fsdp": -1, "tp": 2},
        "evaluation": {"every": 2},
        "logging": {"tensorboard": False, "trajectories_every": 1, "peak_flops": 1e12},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return from_dict(Config, values)


def make_sampled(policy, out, **sections):
    """One step whose episodes the policy samples, and an evaluation before and after it."""
    rollout = {"max_length": 900, "turn_tokens": 4, "response_tokens": 4, "max_turns": 2}
    evaluation = {"every": 1, "tasks": 3, "split": "validation"}
    return make_config(policy, out, 1, rollout=rollout, evaluation=evaluation, **sections)


def episodes(model, tasks, step):
    """Random episodes that depend on their task, number and step. Those of step 2 from number 3 on, which is all that
    the second of two processes has, are lost."""
    assert np.isfinite(np.asarray(model.norm[...])).all() and model.norm[...].is_fully_addressable
    trajectories = []
    for i, task in enumerate(task for task in tasks for _ in range(GROUP)):
        rng = np.random.default_rng([step, i, zlib.crc32(task.id.encode())])
        stream = TokenStream()
        stream.context(rng.integers(0, 500, 5))
        for role in (ACT, REHEARSE, ACT):
            tokens = rng.integers(0, 500, rng.integers(2, 8))
            stream.generation(role, tokens, rng.normal(-6, 0.1, len(tokens)))
        trajectories.append(
            stream.finish(
                group=i // GROUP, trajectory=i, task_id=task.id, reward=float(rng.random()), valid=step != 2 or i < 3
            )
        )
    return trajectories


def evaluate(model, step):
    """Each process counts one of two."""
    counts = processes().each("counting", lambda: 1 / processes().count)
    return {"eval/success": sum(counts) / 2}


def main(process, port, policy, root):
    index, root = int(process), Path(root)
    everyone = connect(f"127.0.0.1:{port}", 2, index, faults=FaultsConfig(start_s=300, heartbeat_s=200))
    found = {}

    def attempt(name, config, rollout=episodes, evaluate=evaluate):
        began = time.monotonic()
        try:
            run(config, rollout=rollout, evaluate=evaluate)
            ended = "done"
        except SystemExit as error:
            ended = error.code
        except (EnvaceError, RuntimeError) as error:
            ended = f"{type(error).__name__}: {error}"
        found[name] = ended
        print(f"{index}: {name}: {ended} in {time.monotonic() - began:.0f} s", flush=True)

    def stopped(model, tasks, step):
        if step == 2 and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return episodes(model, tasks, step)

    def broken(model, tasks, step):
        if index == 1:
            raise RuntimeError("the second process breaks")
        return episodes(model, tasks, step)

    def full(model, tasks, step):
        if step >= 1 and index == 1:  # checkpoint 1 is whole; of the next ones this process cannot write its part
            while not (root / "full" / "checkpoints" / "1").is_dir():
                time.sleep(0.05)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, no_limit))
        return episodes(model, tasks, step)

    attempt("straight", make_config(policy, root / "straight"))
    attempt("stopped", make_config(policy, root / "stopped"), stopped)
    attempt("resumed", make_config(policy, root / "stopped"))
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    often = {"train": {"save_every": 1}, "faults": {"saves_behind": 2}, "evaluation": {"every": 0}}
    attempt("full", make_config(policy, root / "full", **often), full)
    resource.setrlimit(resource.RLIMIT_FSIZE, (no_limit, no_limit))
    attempt("broken", make_config(policy, root / "broken"), broken)
    attempt("seeds", make_config(policy, root / "seeds", seed=index))
    attempt("taken", make_config(policy, root))  # its own results lie there
    attempt("misfit", make_config(policy, root / "misfit", mesh={"data": 3, "fsdp": 1, "tp": 1}))
    attempt("spans", make_config(policy, root / "spans", mesh={"data": 1, "fsdp": 1, "tp": 4}))
    sampled = make_sampled(policy, root / "sampled")
    attempt("sampled", sampled, rollout=None, evaluate=during_training(sampled))
    everyone.wait_s = 3.0
    try:
        everyone.each("a wait", lambda: time.sleep(8 * index))
    except EnvaceError as error:
        found["late"] = f"{type(error).__name__}: {error}"
    (root / f"{index}.json").write_text(json.dumps(found))
    while not (root / "1.json").exists():  # process 0 coordinates: it goes last
        time.sleep(0.1)
    os._exit(0)  # having missed each other they cannot end in the ordinary way


if __name__ == "__main__":
    main(*sys.argv[1:])
