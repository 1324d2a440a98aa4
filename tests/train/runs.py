"""A run small enough for tests, as functions and as a program that a test can kill.

    python runs.py MODEL OUTPUT_DIR STEPS [key=value ...]

`kill_after=3` sends SIGKILL to itself in the middle of step 4; `signal_at=3` sends SIGTERM while step 4 samples, and
`interrupt_at=3` SIGINT.
"""

import os
import signal
import sys
import zlib

import numpy as np

from envace_jax.config import Config, from_dict
from envace_jax.rollout.trajectory import ACT, REHEARSE, TokenStream
from envace_jax.train import run


def make_config(model, output_dir, steps=6, **sections):
    values = {
        "model": str(model),
        "output_dir": str(output_dir),
        "rollout": {"group_size": 2, "tasks_per_step": 2, "max_length": 32, "thinking": False},
        "train": {"steps": steps, "learning_rate": 1e-2, "micro_batch": 2, "remat": False, "save_every": 3},
        "mesh": {"data": 1, "fsdp": 1, "tp": 1},
        "logging": {"tensorboard": False, "trajectories_every": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return from_dict(Config, values)


def episodes(model, tasks, step):
    """Random episodes; they depend on the tasks, the step and the parameters, as sampled ones do."""
    weight = float(np.asarray(model.norm[...]).sum())
    trajectories = []
    for i, task in enumerate(task for task in tasks for _ in range(2)):
        rng = np.random.default_rng([step, i, zlib.crc32(task.id.encode()), zlib.crc32(str(weight).encode())])
        stream = TokenStream()
        stream.context(rng.integers(0, 500, 5))
        for role in (ACT, REHEARSE, ACT):
            tokens = rng.integers(0, 500, rng.integers(2, 8))
            stream.generation(role, tokens, rng.normal(-6, 0.1, len(tokens)))
        reward = float(rng.random())
        trajectories.append(stream.finish(group=i // 2, trajectory=i, task_id=task.id, reward=reward))
    return trajectories


def main(model, output_dir, steps, *options):
    wanted = dict(option.split("=") for option in options)
    deadly = {"kill_after": signal.SIGKILL, "signal_at": signal.SIGTERM, "interrupt_at": signal.SIGINT}

    def rollout(model, tasks, step):
        for option, number in deadly.items():
            if step == int(wanted.get(option, -1)):
                os.kill(os.getpid(), number)
        return episodes(model, tasks, step)

    run(make_config(model, output_dir, int(steps)), rollout=rollout)


if __name__ == "__main__":
    main(*sys.argv[1:])
