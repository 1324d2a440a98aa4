"""All that the steps of a run share: model, tokenizer, tasks, judge, compiled functions, and where the run starts.

`prepare` makes it; `Job.sample` and `Job.learn` are the two halves of a step. On several processes each reads the tasks
of its share of the step's episodes, samples them on its own devices and packs them into rows of its own; the update is
one program over all devices.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from envace_jax.chat import ChatTokenizer
from envace_jax.config import Config, MeshConfig, diff_on_resume, to_dict
from envace_jax.errors import CheckpointError, ConfigError
from envace_jax.grpo import TokenBatch
from envace_jax.rollout.judges import Judging
from envace_jax.rollout.trajectory import Trajectory
from envace_jax.tasks import Task
from envace_jax.train.batch import make_batch
from envace_jax.train.checkpoint import SOURCE, Checkpoints, load_model, tokenizer_directory, write_model_source
from envace_jax.train.local import local_mesh, make_local_copy
from envace_jax.train.optim import make_optimizer
from envace_jax.train.outline import Outline, filled, outline
from envace_jax.train.packing import balance_rows
from envace_jax.train.partner import Partner
from envace_jax.train.processes import Processes, processes
from envace_jax.train.rollouts import Rollout, Timed, make_rollout
from envace_jax.train.selection import sample_with_signal, shape_rewards
from envace_jax.train.state import (
    TrainState,
    abstract_state,
    create_state,
    data_shards,
    fit_batch,
    make_logps,
    make_update,
    own_shards,
    place_batch,
    state_shardings,
)
from models.qwen3 import Qwen3, Qwen3Config
from models.qwen3.sharding import make_mesh


@dataclass(frozen=True)
class Sampled:
    """The episodes of a step. everything, learned: outlines of all processes' episodes, and of those learned from.
    own: the trajectories of this process. seconds: that it took this process alone to sample them, and reshard_s before
    that to bring parameters from the layout of training to that of sampling."""

    everything: list[Outline]
    learned: list[Outline]
    own: list[Trajectory]
    seconds: float
    reshard_s: float


@dataclass(frozen=True)
class Job:
    """`step` is the one it starts from, `state` the state there."""

    config: Config
    processes: Processes
    mesh: Mesh | None
    model_config: Qwen3Config
    chat: ChatTokenizer
    state: TrainState
    step: int
    tasks: Callable[[int], list[Task]]
    judging: Judging | None  # None where the rollout is somebody else's
    timed: Timed | None  # its judge, as episodes see it
    rollout: Rollout
    sampler: Callable[[nnx.State], Qwen3]  # parameters -> a model to sample from, on this process's devices
    update: Callable[[TrainState, TokenBatch, int], tuple[TrainState, dict[str, jax.Array]]]
    reference: Callable[[TokenBatch, int], jax.Array] | None
    partner: Partner | None  # where another set of parameters rehearses
    row_length: int
    micro_batches: int
    metadata: dict
    headline: str

    def model(self, state: TrainState) -> Qwen3:
        """The policy as this process samples from it; an update of `state` ends it. All processes call it together."""
        return self.sampler(state.params)

    def sample(self, state: TrainState, step: int) -> Sampled:
        """The episodes of a step, and those it learns from. Raises StopRun where a signal stops a process."""
        began = time.perf_counter()
        settings, models = self.config.rollout, [self.model(state)]
        if self.partner is not None:
            models.append(self.model(self.partner.state))
            self.partner.sampling = models[1]
        if self.processes.count > 1:  # a single one samples from the parameters where they lie
            jax.block_until_ready([nnx.state(model) for model in models])
        reshard_s = time.perf_counter() - began
        own: list[Trajectory] = []
        seconds = 0.0

        def sample(number: int) -> list[Outline]:
            def episodes() -> list[Any]:
                nonlocal seconds
                began = time.perf_counter()
                fresh = self.rollout(models[0], self.tasks(number), number)
                seconds += time.perf_counter() - began
                first = len(own)
                own.extend(fresh)
                return [outline(t, self.processes.index, first + i).to_json() for i, t in enumerate(fresh)]

            shares = self.processes.each(f"sampling the episodes of step {step + 1}", episodes, repeatable=True)
            return [Outline.from_json(values) for share in shares for values in share]

        everything, learned = sample_with_signal(
            sample,
            step,
            groups=settings.tasks_per_step,
            max_refills=settings.max_refills,
            shape=lambda outlines: shape_rewards(outlines, self.config.reward, settings.max_length),
        )
        return Sampled(everything, learned, own, seconds, reshard_s)

    def judge_seconds(self) -> float:
        """Seconds spent on verdicts since the last call, by all threads of this process."""
        return 0.0 if self.timed is None else self.timed.take()

    def own(self, sampled: Sampled, advantages: Sequence[dict[int, float]]) -> tuple[list[Trajectory], list[dict]]:
        """What this process has of what is learned from, with its advantages."""
        pairs = [
            (filled(o, sampled.own[o.index]), advantage)
            for o, advantage in zip(sampled.learned, advantages, strict=True)
            if o.process == self.processes.index
        ]
        return [t for t, _ in pairs], [advantage for _, advantage in pairs]

    def learn(
        self,
        state: TrainState,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[dict[int, float]],
        roles: Sequence[int],
        told: Mapping[str, float],
    ) -> tuple[TrainState, dict[str, float], list[dict[str, float]]]:
        """From one batch, of what `roles` sampled in this process's trajectories and those of the others.

        `told` are figures of this process; those of all processes are the last thing returned.
        """
        train = self.config.train
        packed: list[tuple[TokenBatch, np.ndarray]] = []
        began = time.perf_counter()

        def pack() -> dict[str, Any]:
            batch, trained = make_batch(trajectories, advantages, self.row_length, train, roles)
            batch, trained = balance_rows(batch, trained, own_shards(self.mesh), train.micro_batch)
            packed.append((batch, trained))
            used, capacity = fit_batch(
                len(trained), trained, train.micro_batch, own_shards(self.mesh), self.micro_batches
            )
            return {
                "used": used,
                "capacity": capacity,
                "rows": len(trained),
                "filled": int((np.asarray(batch.segments) > 0).sum()),
                "pack_s": time.perf_counter() - began,
                "told": dict(told),
            }

        plans = self.processes.each("packing", pack)
        used, capacity = (max(plan[name] for plan in plans) for name in ("used", "capacity"))
        rows = sum(plan["rows"] for plan in plans)
        ((batch, trained),) = packed
        placed, _ = place_batch(batch, train.micro_batch, self.mesh, trained=trained, capacity=capacity)
        if self.reference is not None:
            placed = dataclasses.replace(placed, ref_logps=self.reference(placed, used))
        state, figures = self.update(state, placed, used)
        metrics = {name: float(value) for name, value in jax.device_get(figures).items()}
        figures = metrics | {
            "batch/rows": float(rows),
            "batch/micro_batches": float(used),
            "batch/pad_fraction": 1.0 - sum(plan["filled"] for plan in plans) / (rows * self.row_length),
            "time/pack_s": max(plan["pack_s"] for plan in plans),
        }
        return state, figures, [plan["told"] for plan in plans]


def prepare(config: Config, checkpoints: Checkpoints, mesh: Mesh | None, rollout: Rollout | None) -> Job:
    """Model, tokenizer, tasks and compiled functions; the state is the latest checkpoint's, or fresh."""
    out, train, everyone = Path(config.output_dir), config.train, processes()
    settings = {
        "param_dtype": jnp.dtype(train.param_dtype),
        "dtype": None if train.compute_dtype == "auto" else jnp.dtype(train.compute_dtype),
        "remat": train.remat_policy,
        "attention_block": train.attention_block,
    }
    with everyone.alike():
        local_mesh(mesh, everyone.index)
    found = everyone.each("looking for checkpoints", checkpoints.latest)[0]
    place = train.checkpoints
    partner = Partner(out, place=place, keep=train.keep) if config.world.split_parameters else None
    saved = {} if found is None else checkpoints.metadata(found)
    with everyone.alike():
        _same_run(config, saved.get("config"), f"{checkpoints.directory}/{found}")

    def read_model() -> tuple[Qwen3, Path]:
        if found is None:
            return load_model(config.model, mesh, **settings), tokenizer_directory(config.model)
        # The run directory may be a new one, where checkpoints lie elsewhere.
        source = out / SOURCE if (out / SOURCE / "config.json").is_file() else tokenizer_directory(config.model)
        return build(Qwen3Config.from_hf(saved["model"]), mesh), source

    def build(model_config: Qwen3Config, on: Mesh | None) -> Qwen3:
        return nnx.eval_shape(lambda: Qwen3(model_config, rngs=nnx.Rngs(0), mesh=on, **settings))

    model, source = everyone.together("reading the model", read_model)
    model_config = model.config
    graphdef, params = nnx.split(model)
    if everyone.count == 1:

        def sampler(params: nnx.State) -> Qwen3:
            return nnx.merge(graphdef, params)
    else:
        sampler = make_local_copy(lambda on: build(model_config, on), mesh, everyone.index)

    def read_tasks() -> tuple[Any, ...]:
        chat = read_tokenizer(source, model_config)
        here = local_mesh(mesh, everyone.index) if everyone.count > 1 else mesh
        rehearser = None if partner is None else lambda: partner.sampling
        return chat, *make_rollout(config, model_config, chat, here, everyone, rehearser, rollout)

    chat, tasks, judging, timed, rollout = everyone.together("reading tokenizer and tasks", read_tasks)
    optimizer = make_optimizer(train)
    like = abstract_state(params, optimizer, mesh)
    reference = None
    for directory in (out,) if partner is None else (out, partner.directory):
        write_model_source(directory, source, model_config)
    if found is None:
        if config.grpo.kl != "none":
            reference = jax.tree.map(jnp.copy, params)
        if partner is not None:
            partner.begin(params, optimizer, mesh)
        state = create_state(params, optimizer, mesh)
        headline = f"{config.model}: training from step 0 to {train.steps}"
    else:
        if config.grpo.kl != "none":
            reference = nnx.state(load_model(config.model, mesh, **settings))
        state = checkpoints.restore(like, found)
        if partner is not None:
            partner.restore(like, found)
        headline = f"{out}: going on from step {found} to {train.steps}"
    if checkpoints.set_aside:
        headline += f"; half-written and left out: checkpoint {', '.join(checkpoints.set_aside)}"

    scoring = {"temperature": config.rollout.temperature, "vocab_size": chat.vocab_size}
    update = make_update(
        graphdef,
        optimizer,
        config.grpo,
        old_logps=train.old_logps,
        updates_per_batch=train.updates_per_batch,
        shardings=state_shardings(like, mesh),
        **scoring,
    )
    score = make_logps(graphdef, **scoring)
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    return Job(
        config=config,
        processes=everyone,
        mesh=mesh,
        model_config=model_config,
        chat=chat,
        state=state,
        step=int(state.step),
        tasks=tasks,
        judging=judging,
        timed=timed,
        rollout=rollout,
        sampler=sampler,
        update=update,
        reference=None if reference is None else lambda batch, used: score(reference, batch, used),
        partner=partner,
        row_length=train.row_length or config.rollout.max_length,
        # As many as one row an episode needs: a step that packs better leaves the rest unused at no cost.
        micro_batches=-(-episodes // (train.micro_batch * data_shards(mesh))),
        metadata={"model": model_config.to_hf(train.param_dtype), "config": to_dict(config)},
        headline=headline,
    )


def device_mesh(config: MeshConfig) -> Mesh | None:
    """The mesh of the configuration; None on a single device. Sizes that are all given may leave devices idle."""
    devices = jax.devices()
    wanted = config.data * config.fsdp * config.tp
    if 0 < wanted < len(devices) and jax.process_count() == 1:
        devices = devices[:wanted]
    try:
        mesh = make_mesh(config.data, config.fsdp, config.tp, devices)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return None if mesh.size == 1 else mesh


def _same_run(config: Config, saved: Mapping[str, Any] | None, where: str) -> None:
    """Raises CheckpointError, naming the settings, when a checkpoint is another run's."""
    keys = [] if saved is None else diff_on_resume(saved, config)
    if keys:
        raise CheckpointError(
            f"{where}: is of another run, which differs in {', '.join(keys[:5])}; name another place for checkpoints"
        )


def read_tokenizer(directory: Path, config: Qwen3Config) -> ChatTokenizer:
    """The tokenizer of a model directory; CheckpointError when it cannot be used, or has more ids than the model."""
    try:
        chat = ChatTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}: its tokenizer cannot be used ({' '.join(str(error).split())})") from error
    if chat.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {chat.vocab_size} ids and the model only {config.vocab_size}; "
            "they do not belong together"
        )
    return chat
