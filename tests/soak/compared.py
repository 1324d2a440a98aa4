"""What the programs of this directory read of a run, to set it beside another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from together import OF_THE_CLOCK

State = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]  # parameters and Adam's first moments, by name


def figures(out: Path) -> list[dict[str, Any]]:
    """The metrics, without what depends on the clock."""
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.removeprefix("rehearser/").startswith(OF_THE_CLOCK)} for line in read
    ]


def dumped(out: Path, step: int) -> list[tuple]:
    """Which episodes a step learned from, with what they said, whichever process had them."""
    paths = sorted((out / "trajectories").glob(f"step_{step:06d}*.jsonl"), key=lambda path: (len(path.name), path.name))
    records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    names = ("trajectory", "group", "task", "tokens", "roles", "reward", "finish", "valid")
    return [tuple(str(record[name]) for name in names) for record in records]


def states(out: Path, policy: Path, train: Any, steps: int) -> list[State]:
    """Behind every step from 1 on, of a run that keeps all checkpoints.

    policy: a model of the same shape. train: the section of the configuration.
    """
    from flax import nnx

    from envace_jax.train import Checkpoints, load_model, make_optimizer
    from envace_jax.train.optim import named
    from envace_jax.train.state import abstract_state

    def moments(opt_state: Any) -> dict[str, np.ndarray]:
        (adam,) = [part for part in _parts(opt_state) if hasattr(part, "mu")]
        return {key: np.asarray(x, np.float64) for key, x in named(adam.mu).items()}

    like = abstract_state(nnx.state(load_model(policy)), make_optimizer(train))
    with Checkpoints(out, keep=None, read_only=True) as checkpoints:
        read = [checkpoints.restore(like, step) for step in range(1, steps + 1)]
    return [({k: np.asarray(x) for k, x in named(s.params).items()}, moments(s.opt_state)) for s in read]


def _parts(opt_state: Any) -> list:
    """All optimizer states in nested tuples."""
    if hasattr(opt_state, "mu") or not isinstance(opt_state, tuple):
        return [opt_state]
    return [part for inner in opt_state for part in _parts(inner)]


def gradients(read: list[State], b1: float) -> list[dict[str, np.ndarray]]:
    """Of each step, by m(s) = b1 m(s - 1) + (1 - b1) g(s); one update a step."""
    moments = [m for _, m in read]
    before = [{key: 0.0 for key in moments[0]}, *moments[:-1]]
    return [{k: (now[k] - b1 * old[k]) / (1 - b1) for k in now} for old, now in zip(before, moments, strict=True)]


def norm(tree: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in tree.values())))


def minus(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: a[name] - b[name] for name in a}


def most(tree: dict[str, np.ndarray]) -> float:
    """The largest absolute value."""
    return max(float(np.max(np.abs(x))) for x in tree.values())


def mean(tree: dict[str, np.ndarray]) -> float:
    """The largest root mean square of one parameter's elements."""
    return max(float(np.sqrt(np.mean(x.astype(np.float64) ** 2))) for x in tree.values())
