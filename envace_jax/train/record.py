"""What a run writes beside its checkpoints, and whose directory it is.

A directory belongs to one run: it is claimed when a run starts, refused to any other run and to foreign files. The
metrics hold each step exactly once, however often the run was stopped: lines beyond the step a run goes on from are
taken back.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
from omegaconf import OmegaConf

from envace_jax.chat import ChatTokenizer
from envace_jax.config import MAY_CHANGE, diff_on_resume, save_config, to_dict
from envace_jax.errors import CheckpointError
from envace_jax.rollout.trajectory import Trajectory
from envace_jax.train.checkpoint import SOURCE, has_checkpoint

CONFIG, METRICS, LOCK = "config.yaml", "metrics.jsonl", ".lock"


class Claim:
    """Keeps other processes out of a run directory until it is closed."""

    def __init__(self, lock: TextIO | None):
        self._lock = lock

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def claim(config: Any) -> Claim:
    """Makes `config.output_dir` this run's: creates it, or checks that it holds this very run. Process 0 decides.

    Raises:
        CheckpointError: the directory holds another run (each key that differs is named), files that are not a run's,
            or a run that is going on.
    """
    out = Path(config.output_dir)
    if jax.process_index() != 0:
        return Claim(None)
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out}: is a file; choose another output_dir")
    foreign = sorted(p.name for p in out.iterdir() if p.name != LOCK) if out.is_dir() else []
    if (out / CONFIG).is_file():
        if _lines(out / METRICS) or has_checkpoint(out):
            _check_same_run(out, config)
        else:  # a first try that failed, with a wrong model say, leaves nothing that would bind the next
            shutil.rmtree(out / SOURCE, ignore_errors=True)
    elif foreign:
        some = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise CheckpointError(f"{out}: holds files that are not a run's ({some}); choose another output_dir")
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / LOCK, "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise CheckpointError(f"{out}: a run is going on there; wait for it or choose another output_dir") from error
    temporary = out / f".{CONFIG}"
    save_config(config, temporary)
    os.replace(temporary, out / CONFIG)
    return Claim(lock)


def _check_same_run(out: Path, config: Any) -> None:
    new = to_dict(config)
    try:
        old = OmegaConf.to_container(OmegaConf.load(out / CONFIG))
    except Exception as error:  # YAML and OmegaConf raise what they please
        raise CheckpointError(f"{out / CONFIG}: cannot be read; choose another output_dir") from error
    if not isinstance(old, dict) or old.keys() - set(MAY_CHANGE) != new.keys() - set(MAY_CHANGE):
        raise CheckpointError(f"{out}: holds a run of another kind; choose another output_dir")
    keys = diff_on_resume(old, new)
    if keys:
        first = "; ".join(f"{key} is {_at(new, key)!r} here and {_at(old, key)!r} there" for key in keys[:5])
        more = f"; and {len(keys) - 5} more" if len(keys) > 5 else ""
        raise CheckpointError(f"{out}: holds another run: {first}{more}. Set the same or choose another output_dir")


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


class Metrics:
    """metrics.jsonl, one object a step, and the same figures for TensorBoard under tensorboard/.

    Args:
        run: the run directory.
        step: the step the run goes on from; lines beyond it are taken back. -1: all of them.
        tensorboard: whether to write events.
    """

    def __init__(self, run: str | Path, step: int, *, tensorboard: bool = True):
        self._file = self._events = None
        if jax.process_index() != 0:
            return
        path = Path(run) / METRICS
        kept = [line for line in _lines(path) if line["step"] <= step]
        temporary = path.with_name(f".{METRICS}")
        temporary.write_text("".join(_dump(line) for line in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(Path(run) / "tensorboard"), purge_step=step + 1 if step >= 0 else None)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line. What is not finite becomes null: NaN is not JSON."""
        if self._file is None:
            return
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(_dump({"step": step, **values}))
        self._file.flush()
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        for sink in (self._file, self._events):
            if sink is not None:
                sink.close()


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a line that broke off is left out."""
    return _lines(Path(run) / METRICS)


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            lines.append(value)
    return lines


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def write_trajectories(
    run: str | Path,
    step: int,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Mapping[int, float]],
    chat: ChatTokenizer,
    *,
    process: int = 0,
) -> None:
    """trajectories/step_000010.jsonl: one object a trajectory, with its text and its tokens; replaces an older one.

    Each process but the first writes its own to step_000010.PROCESS.jsonl.
    """
    directory = Path(run) / "trajectories"
    directory.mkdir(exist_ok=True)
    temporary = directory / f".tmp{process}"
    with open(temporary, "w", encoding="utf-8") as file:
        for t, own in zip(trajectories, advantages, strict=True):
            record = {
                "step": step,
                "task": t.task_id,
                "group": t.group,
                "trajectory": t.trajectory,
                "reward": t.reward if math.isfinite(t.reward) else None,
                "penalties": {str(g): p for g, p in t.penalties.items()},
                "advantages": {str(g): float(a) for g, a in own.items()},
                "finish": t.finish,
                "valid": t.valid,
                "info": dict(t.info),
                "text": chat.decode(t.tokens),
                "messages": list(t.messages),
                "tokens": t.tokens.tolist(),
                "roles": t.roles.tolist(),
                "generations": t.generations.tolist(),
                "behavior_logps": [round(float(x), 5) for x in t.behavior_logps],
            }
            file.write(_dump(record))
    part = f".{process}" if process else ""
    os.replace(temporary, directory / f"step_{step:06d}{part}.jsonl")
