"""`envace rollout CONFIG`: the episodes of one step as JSON lines, without training.

The file grows batch by batch; the same command goes on where it was stopped, and an episode is the same whichever call
sampled it.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from envace_jax.chat import ChatTokenizer
from envace_jax.config import Config, TasksConfig
from envace_jax.errors import CheckpointError, ConfigError
from envace_jax.rollout.judges import Judging
from envace_jax.rollout.runner import run_episodes
from envace_jax.rollout.trajectory import Trajectory
from envace_jax.rollout.worlds import make_world
from envace_jax.sampling import Engine
from envace_jax.tasks import Task, read_tasks
from envace_jax.tasks.mini import mini_tasks
from models.qwen3 import Qwen3, load_hf

STEP = 0


def run(config: Config, out: str | Path) -> Path:
    """Samples `rollout.group_size` episodes of `rollout.tasks_per_step` tasks into `out`, and returns its path.

    What is already there is kept and not sampled again.

    Raises EnvaceError for a model, task or setting that must be mended, and for a file of another rollout.
    """
    out, settings, console = Path(out), config.rollout, Console(stderr=True, highlight=False)
    model, chat = _load(config.model)
    tasks = list(itertools.islice(_tasks(config.tasks, chat, settings.thinking), settings.tasks_per_step))
    if not tasks:
        raise ConfigError("there is no task to roll out: raise tasks.max_prompt_tokens or check tasks.path")
    size = settings.group_size
    done = _read(out, config, tasks)
    slots = settings.slots or min(len(tasks) * size, 256)
    engine = Engine(model.config, slots=slots, max_length=settings.max_length, vocab_size=chat.vocab_size)
    per_call = max(1, 4 * slots // size)  # tasks; a file that was broken off has lost no more than this
    world = make_world(config.world, thinking=config.rollout.thinking)
    unruled = next((task.id for task in tasks if task.needs_judge), None)
    judging = Judging(config.reward, out.parent, unruled=unruled, episodes=slots)
    began, fresh = time.perf_counter(), []
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("episodes"), MofNCompleteColumn(), BarColumn(30), TimeRemainingColumn())
    bars = Progress(*columns, console=console, transient=True)
    with judging, bars, open(out, "a", encoding="utf-8") as file:
        bar = bars.add_task("", total=len(tasks) * size)
        for first in range(0, len(tasks), per_call):
            chosen = tasks[first : first + per_call]
            numbers = range(first * size, (first + len(chosen)) * size)
            if not done.issuperset(numbers):
                episodes = run_episodes(
                    engine,
                    model,
                    chat,
                    chosen,
                    settings=settings,
                    world=world,
                    seed=config.seed,
                    step=STEP,
                    first_episode=numbers.start,
                    first_group=first,
                    judge=judging.judge,
                    judge_pool=judging.pool,
                    empty_penalty=config.reward.empty_penalty,
                    history_reasoning=config.world.history_reasoning,
                    progress=lambda n, _, before=numbers.start: bars.update(bar, completed=before + n),
                )
                judging.check(episodes)
                missing = [t for t in episodes if t.trajectory not in done]
                file.writelines(json.dumps(_record(t, chat, config), ensure_ascii=False) + "\n" for t in missing)
                file.flush()
                fresh += missing
            bars.update(bar, completed=numbers.stop)
    console.print(_summary(out, fresh, len(done), time.perf_counter() - began), markup=False, soft_wrap=True)
    return out


def _load(directory: str) -> tuple[Qwen3, ChatTokenizer]:
    try:
        model, chat = load_hf(directory), ChatTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model={directory}: {' '.join(str(error).split())}") from error
    return model, chat


def _tasks(config: TasksConfig, chat: ChatTokenizer, thinking: bool) -> Iterator[Task]:
    if config.kind == "mini":
        size = config.size or 10**9
        source = mini_tasks(config.split, size, seed=config.seed, visibility=config.visibility)
    else:
        skip = (lambda error: None) if config.skip_bad else None
        source = read_tasks(config.path, split=config.split, on_error=skip)
        source = itertools.islice(source, config.size)
    limit = config.max_prompt_tokens
    for task in source:
        if limit is None or len(chat.render(task.prompt, task.tools, True, thinking)) <= limit:
            yield task


def _read(out: Path, config: Config, tasks: list[Task]) -> set[int]:
    """The numbers of the episodes that `out` holds; a last line that broke off is taken back."""
    if not out.is_file():
        return set()
    text = out.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        out.write_text(text, encoding="utf-8")
    done: set[int] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
            found = record["trajectory"], record["task"], record["seed"], record["model"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{out}, line {number}: not a line of a rollout; choose another --out") from error
        group = found[0] // config.rollout.group_size
        if group >= len(tasks) or found[1:] != (tasks[group].id, config.seed, config.model):
            raise ConfigError(f"{out}, line {number}: an episode of another rollout; choose another --out")
        done.add(found[0])
    return done


def _record(t: Trajectory, chat: ChatTokenizer, config: Config) -> dict[str, Any]:
    return {
        "trajectory": t.trajectory,
        "group": t.group,
        "task": t.task_id,
        "seed": config.seed,
        "model": config.model,
        "reward": t.reward,
        "penalties": {str(g): p for g, p in t.penalties.items()},
        "finish": t.finish,
        "valid": t.valid,
        "info": dict(t.info),
        "messages": list(t.messages),
        "text": chat.decode(t.tokens),
        "tokens": t.tokens.tolist(),
        "roles": t.roles.tolist(),
        "generations": t.generations.tolist(),
        "behavior_logps": [round(float(x), 5) for x in t.behavior_logps],
    }


def _summary(out: Path, fresh: list[Trajectory], kept: int, seconds: float) -> str:
    if not fresh:
        return f"{out}: all {kept} episodes are there already"
    sampled = sum(int((t.roles > 0).sum()) for t in fresh)
    finishes = ", ".join(f"{count} {name}" for name, count in Counter(t.finish for t in fresh).most_common())
    reward = float(np.mean([t.reward for t in fresh if t.valid])) if any(t.valid for t in fresh) else float("nan")
    before = f" beside {kept} there before" if kept else ""
    return (
        f"{out}: {len(fresh)} episodes{before}, reward {reward:.3f}, {finishes}; "
        f"{sampled:,} tokens sampled, {sampled / max(seconds, 1e-9):,.0f}/s"
    )
