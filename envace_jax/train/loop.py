"""Reinforcement learning, step by step. Step s of a run

1. takes the tasks of step s and samples a group of episodes for each,
2. gives every generation its advantage within its role and group, and packs the episodes into rows,
3. updates the policy from these rows,
4. writes one line of metrics, and now and then evaluates, saves, and dumps the episodes.

All of it depends on the configuration, the parameters and s alone: a run that was stopped, or killed, goes on from its
last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from envace_jax.chat import ChatTokenizer
from envace_jax.config import Config, MeshConfig, to_dict
from envace_jax.errors import CheckpointError, ConfigError, EndpointError
from envace_jax.grpo import ACT, REHEARSE, TokenBatch
from envace_jax.rollout.judges import Judging
from envace_jax.rollout.trajectory import Trajectory
from envace_jax.tasks import Task
from envace_jax.train.batch import assign_advantages, episode_metrics, make_batch
from envace_jax.train.checkpoint import SOURCE, Checkpoints, load_model, tokenizer_directory, write_model_source
from envace_jax.train.data import task_batches
from envace_jax.train.optim import make_optimizer, make_schedule
from envace_jax.train.packing import balance_rows, pad_fraction
from envace_jax.train.partner import Partner
from envace_jax.train.progress import Progress
from envace_jax.train.record import Metrics, claim, read_metrics, write_trajectories
from envace_jax.train.selection import sample_with_signal, shape_rewards
from envace_jax.train.state import (
    TrainState,
    abstract_state,
    create_state,
    data_shards,
    make_logps,
    make_update,
    place_batch,
    state_shardings,
)
from envace_jax.train.stopping import EXIT_STATUS, Stopping, StopRun
from models.qwen3 import Qwen3, Qwen3Config
from models.qwen3.sharding import make_mesh

Rollout = Callable[[Qwen3, Sequence[Task], int], list[Trajectory]]  # (model, tasks, step) -> episodes
Evaluate = Callable[[Qwen3, int], Mapping[str, float]]  # (model, step) -> figures by name, `eval/success` among them


def run(config: Config, *, evaluate: Evaluate | None = None, rollout: Rollout | None = None) -> Path:
    """Trains, and returns the run directory. Goes on by itself where `output_dir` holds a checkpoint.

    Args:
        config: the run.
        evaluate: called before the first step, every `evaluation.every` steps and at the end; not at all at 0.
        rollout: instead of `envace_jax.rollout.run_episodes`.

    Raises:
        EnvaceError: a setting, file or directory that must be mended; nothing has been trained then.
        EndpointError: too many episodes of a step have no verdict; all steps before it are saved.
        SystemExit: stopped by SIGTERM (75) or Ctrl-C (130), with all finished steps saved.
    """
    out = Path(config.output_dir)
    mesh = device_mesh(config.mesh)
    with claim(config), Checkpoints(out, keep=config.train.keep) as checkpoints, Stopping() as stopping:
        job = _prepare(config, checkpoints, mesh, rollout)
        log = Metrics(out, job.step if job.step else -1, tensorboard=config.logging.tensorboard)
        progress = Progress(config.train.steps, job.step, print_every=config.logging.print_every)
        partner = contextlib.nullcontext() if job.partner is None else contextlib.closing(job.partner)
        with log, progress, job.judging or contextlib.nullcontext(), partner:
            _train(job, checkpoints, log, stopping, progress, evaluate if config.evaluation.every else None)
    return out


def _train(
    job: _Job,
    checkpoints: Checkpoints,
    log: Metrics,
    stopping: Stopping,
    progress: Progress,
    evaluate: Evaluate | None,
) -> None:
    """The steps that are left."""
    config, train, out = job.config, job.config.train, Path(job.config.output_dir)
    state, step = job.state, job.step
    compiled, schedule = _Compilations(), make_schedule(train)
    progress.note(job.headline)
    try:
        if evaluate is not None and step == 0:
            with stopping.at_once():
                log.write(0, _evaluate(evaluate, job.model(state), 0, progress))
        while step < train.steps:
            began = time.perf_counter()
            with stopping.at_once():
                trajectories, learned = job.sample(state, step)
            judged = {} if job.judging is None else job.judging.check(trajectories)
            sampled = time.perf_counter()

            advantages = assign_advantages(learned, config.advantage)
            rate = schedule((step - int(state.skipped)) * train.updates_per_batch)
            state, metrics = job.learn(state, learned, advantages, (ACT, REHEARSE) if job.partner is None else (ACT,))
            if job.partner is not None:
                job.partner.state, figures = job.learn(job.partner.state, learned, advantages, (REHEARSE,))
                metrics |= job.partner.metrics(figures)
            step += 1
            ended = time.perf_counter()

            metrics |= episode_metrics(trajectories) | judged
            tokens = metrics["tokens/act"] + metrics["tokens/rehearse"]
            metrics |= {
                "train/learning_rate": float(rate),
                "episodes/learned_fraction": len(learned) / max(len(trajectories), 1),
                "time/rollout_s": sampled - began,
                "time/train_s": ended - sampled,
                "throughput/sampled_tokens_per_s": tokens / max(sampled - began, 1e-9),
                "throughput/trained_tokens_per_s": tokens / max(ended - sampled, 1e-9),
            }
            last = step == train.steps
            if evaluate is not None and (last or step % config.evaluation.every == 0):
                metrics |= _evaluate(evaluate, job.model(state), step, progress)
            metrics |= {"time/step_s": time.perf_counter() - began, "compile/count": float(compiled.count)}

            # The line first: a checkpoint without its line would leave a gap for good.
            log.write(step, metrics)
            stop = stopping.due(step)
            if last or stop or step % train.save_every == 0:
                job.save(checkpoints, state)
            dump_every = config.logging.trajectories_every
            if dump_every and (step == 1 or step % dump_every == 0):
                write_trajectories(out, step, learned, advantages, job.chat)
            progress.update(step, _shown(metrics))
            if stop and not last:
                raise StopRun
    except StopRun:
        job.save(checkpoints, state)
        checkpoints.wait()
        by = "Ctrl-C" if stopping.signal is signal.SIGINT else stopping.signal.name
        progress.note(f"stopped by {by} after step {step}, which is saved; the same command goes on from there")
        raise SystemExit(EXIT_STATUS[stopping.signal]) from None
    except EndpointError:
        if step > job.step:
            job.save(checkpoints, state)
            checkpoints.wait()
        raise
    checkpoints.wait()
    progress.note(_summary(out, step))


@dataclasses.dataclass(frozen=True)
class _Job:
    """All that the steps of a run share, and where it starts."""

    config: Config
    mesh: Mesh | None
    graphdef: nnx.GraphDef
    chat: ChatTokenizer
    state: TrainState
    step: int
    tasks: Callable[[int], list[Task]]
    judging: Judging | None  # None where the rollout is somebody else's
    rollout: Rollout
    update: Callable[[TrainState, TokenBatch, int], tuple[TrainState, dict[str, jax.Array]]]
    reference: Callable[[TokenBatch, int], jax.Array] | None
    partner: Partner | None  # where another set of parameters rehearses
    row_length: int
    micro_batches: int
    metadata: dict
    headline: str

    def model(self, state: TrainState) -> Qwen3:
        return nnx.merge(self.graphdef, state.params)

    def sample(self, state: TrainState, step: int) -> tuple[list[Trajectory], list[Trajectory]]:
        """The episodes of a step, and those it learns from."""
        rollout, model = self.config.rollout, self.model(state)
        return sample_with_signal(
            lambda number: self.rollout(model, self.tasks(number), number),
            step,
            groups=rollout.tasks_per_step,
            max_refills=rollout.max_refills,
            shape=lambda episodes: shape_rewards(episodes, self.config.reward, rollout.max_length),
        )

    def learn(
        self,
        state: TrainState,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[dict[int, float]],
        roles: Sequence[int],
    ) -> tuple[TrainState, dict[str, float]]:
        """From one batch, of what `roles` sampled."""
        train = self.config.train
        batch, trained = make_batch(trajectories, advantages, self.row_length, train, roles)
        batch, trained = balance_rows(batch, trained, data_shards(self.mesh), train.micro_batch)
        placed, used = place_batch(batch, train.micro_batch, self.mesh, trained=trained, capacity=self.micro_batches)
        if self.reference is not None:
            placed = dataclasses.replace(placed, ref_logps=self.reference(placed, used))
        state, figures = self.update(state, placed, used)
        metrics = {name: float(value) for name, value in jax.device_get(figures).items()}
        return state, metrics | {
            "batch/rows": float(batch.tokens.shape[0]),
            "batch/micro_batches": float(used),
            "batch/pad_fraction": pad_fraction(batch),
        }

    def save(self, checkpoints: Checkpoints, state: TrainState) -> None:
        if self.partner is not None:
            self.partner.save(self.metadata)
        checkpoints.save(state, self.metadata)


def _prepare(config: Config, checkpoints: Checkpoints, mesh: Mesh | None, rollout: Rollout | None) -> _Job:
    """Model, tokenizer, tasks and compiled functions; the state is the latest checkpoint's, or fresh."""
    out, train = Path(config.output_dir), config.train
    settings = {
        "param_dtype": jnp.dtype(train.param_dtype),
        "dtype": None if train.compute_dtype == "auto" else jnp.dtype(train.compute_dtype),
        "remat": train.remat_policy,
        "attention_block": train.attention_block,
    }
    found = checkpoints.latest()
    partner = Partner(out, keep=train.keep) if config.world.split_parameters else None
    if found is None:
        model = load_model(config.model, mesh, **settings)
        source = tokenizer_directory(config.model)
    else:
        source = out / SOURCE
        model = nnx.eval_shape(lambda: Qwen3(Qwen3Config.from_hf(source), rngs=nnx.Rngs(0), mesh=mesh, **settings))
    model_config, chat = model.config, read_tokenizer(source, model.config)
    tasks = task_batches(config.tasks, config.rollout.tasks_per_step, chat, thinking=config.rollout.thinking)
    judging = None
    if rollout is None:
        slots = config.rollout.slots or config.rollout.tasks_per_step * config.rollout.group_size
        judging = Judging(config.reward, out, unruled=tasks.unruled, episodes=slots, process=jax.process_index())
        rollout = _make_rollout(
            config,
            model_config,
            chat,
            mesh,
            slots,
            judging,
            None if partner is None else lambda: partner.model(graphdef),
        )
    graphdef, params = nnx.split(model)
    optimizer = make_optimizer(train)
    like = abstract_state(params, optimizer, mesh)
    reference = None
    if found is None:
        write_model_source(out, source, model_config)
        if config.grpo.kl != "none":
            reference = jax.tree.map(jnp.copy, params)
        if partner is not None:
            partner.begin(source, model_config, params, optimizer, mesh)
        state = create_state(params, optimizer, mesh)
        headline = f"{config.model}: training from step 0 to {train.steps}"
    else:
        if config.grpo.kl != "none":
            reference = nnx.state(load_model(config.model, mesh, **settings))
        state = checkpoints.restore(like, found)
        if partner is not None:
            partner.restore(like, found)
        headline = f"{out}: going on from step {found} to {train.steps}"

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
    return _Job(
        config=config,
        mesh=mesh,
        graphdef=graphdef,
        chat=chat,
        state=state,
        step=int(state.step),
        tasks=tasks,
        judging=judging,
        rollout=rollout,
        update=update,
        reference=None if reference is None else lambda batch, used: score(reference, batch, used),
        partner=partner,
        row_length=train.row_length or config.rollout.max_length,
        # As many as one row an episode needs: a step that packs better leaves the rest unused at no cost.
        micro_batches=-(-episodes // (train.micro_batch * data_shards(mesh))),
        metadata={"model": model_config.to_hf(train.param_dtype), "config": to_dict(config)},
        headline=headline,
    )


def _make_rollout(
    config: Config,
    model_config: Qwen3Config,
    chat: ChatTokenizer,
    mesh: Mesh | None,
    slots: int,
    judging: Judging,
    rehearser: Callable[[], Qwen3] | None,
) -> Rollout:
    from envace_jax.rollout import make_world, run_episodes
    from envace_jax.sampling import Engine

    settings = config.rollout
    world = make_world(config.world, thinking=settings.thinking)
    engine = Engine(
        model_config,
        slots=slots,
        max_length=settings.max_length,
        vocab_size=chat.vocab_size,
        mesh=mesh,
    )

    def rollout(model: Qwen3, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return run_episodes(
            engine,
            model,
            chat,
            tasks,
            settings=settings,
            world=world,
            seed=config.seed,
            step=step,
            judge=judging.judge,
            judge_pool=judging.pool,
            empty_penalty=config.reward.empty_penalty,
            history_reasoning=config.world.history_reasoning,
            rehearser=None if rehearser is None else rehearser(),
        )

    return rollout


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


def _evaluate(evaluate: Evaluate, model: Qwen3, step: int, progress: Progress) -> dict[str, float]:
    began = time.perf_counter()
    figures = {name: float(value) for name, value in evaluate(model, step).items()}
    if "eval/success" in figures:
        progress.note(f"evaluation after step {step}: success {figures['eval/success']:.3f}")
    return {**figures, "time/eval_s": time.perf_counter() - began}


def _shown(metrics: Mapping[str, float]) -> dict[str, float]:
    shown = {"reward": "reward/mean", "success": "eval/success", "tokens/s": "throughput/sampled_tokens_per_s"}
    return {name: metrics[key] for name, key in shown.items() if key in metrics}


def _summary(out: Path, step: int) -> str:
    """What was gained and where it lies."""
    lines = read_metrics(out)

    def gained(name: str, what: str) -> str | None:
        values = [line[name] for line in lines if line.get(name) is not None]
        return f"{what} {values[0]:.3f} -> {values[-1]:.3f}" if values else None

    gains = gained("eval/success", "evaluation success") or gained("reward/mean", "reward") or "nothing to train"
    return f"done: {gains} in {step} steps; everything lies in {out} (`envace export {out} OUT` makes a model of it)"


class _Compilations:
    """Counts the programs this process compiled, or took from the compilation cache, since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, *_: object, **__: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"
