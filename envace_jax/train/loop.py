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
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console

from envace_jax.config import Config
from envace_jax.errors import EndpointError
from envace_jax.grpo import ACT, REHEARSE
from envace_jax.train.batch import assign_advantages, episode_metrics
from envace_jax.train.checkpoint import Checkpoints
from envace_jax.train.job import Job, Rollout, prepare
from envace_jax.train.optim import make_schedule
from envace_jax.train.outline import Outline
from envace_jax.train.progress import Progress
from envace_jax.train.record import Metrics, read_metrics, write_trajectories
from envace_jax.train.saving import Saving
from envace_jax.train.session import session
from envace_jax.train.state import TrainState
from envace_jax.train.stopping import EXIT_STATUS, Stopping, StopRun
from envace_jax.train.throughput import peak_flops, step_flops
from envace_jax.train.watch import Watch
from models.qwen3 import Qwen3

Evaluate = Callable[[Qwen3, int], Mapping[str, float]]  # (model, step) -> figures by name, `eval/success` among them


def run(config: Config, *, evaluate: Evaluate | None = None, rollout: Rollout | None = None) -> Path:
    """Trains, and returns the run directory. Goes on by itself where `output_dir` holds a checkpoint.

    Args:
        config: the run.
        evaluate: called before the first update, every `evaluation.every` steps and at the end; not at all at 0.
        rollout: instead of `envace_jax.rollout.run_episodes`.

    Raises:
        EnvaceError: a setting, file or directory that must be mended; nothing has been trained then.
        EndpointError: too many episodes of a step have no verdict; all steps before it are saved.
        SystemExit: stopped by SIGTERM (75) or Ctrl-C (130), with all finished steps saved.
    """
    out = Path(config.output_dir)
    with session(config) as here:
        everyone = here.processes
        checkpoints = here.enter(Checkpoints(out, place=config.train.checkpoints, keep=config.train.keep))
        job = prepare(config, checkpoints, here.mesh, rollout)
        for part in (job.judging, job.partner):
            if part is not None:
                here.enter(contextlib.closing(part))
        log = here.enter(Metrics(out, job.step or -1, tensorboard=config.logging.tensorboard))
        progress = here.enter(
            Progress(
                config.train.steps,
                job.step,
                print_every=config.logging.print_every,
                console=None if everyone.index == 0 else Console(quiet=True),
            )
        )
        saving = Saving(
            checkpoints,
            everyone,
            metadata=job.metadata,
            partner=job.partner,
            saves_behind=config.faults.saves_behind,
            note=progress.note,
        )
        evaluate = evaluate if config.evaluation.every else None
        _train(job, saving, log, here.stopping, progress, here.watch, evaluate)
    return out


def _train(
    job: Job,
    saving: Saving,
    log: Metrics,
    stopping: Stopping,
    progress: Progress,
    watch: Watch,
    evaluate: Evaluate | None,
) -> None:
    """The steps that are left."""
    config, train, out, everyone = job.config, job.config.train, Path(job.config.output_dir), job.processes
    state, step = job.state, job.step
    saved_s = 0.0
    compiled, schedule, trace = _Compilations(), make_schedule(train), _Trace(out, config.logging.profile)
    progress.note(job.headline)
    everyone.agreed()
    try:
        while step < train.steps:
            watch.step = step
            trace.before(step + 1)
            began = time.perf_counter()
            everyone.waited()
            sampled = job.sample(state, step)
            with everyone.alike():
                judged = {} if job.judging is None else job.judging.check(sampled.everything)
            ready = time.perf_counter()
            if step == job.step:  # the update's program is still to be compiled
                rewards = [episode.reward for episode in sampled.everything if episode.valid]
                progress.note(f"first episodes sampled: reward {sum(rewards) / max(len(rewards), 1):.3f}")
            if evaluate is not None and step == 0:
                # Of the policy as it came; behind the first episodes, so that something shows soon.
                log.write(0, _evaluate(evaluate, job, state, 0, stopping, progress))
            learning = time.perf_counter()

            advantages = assign_advantages(sampled.learned, config.advantage)
            trajectories, own = job.own(sampled, advantages)
            rate = schedule((step - int(state.skipped)) * train.updates_per_batch)
            synced = everyone.waited()
            told = judged | {"rollout_s": sampled.seconds, "judge_s": job.judge_seconds()}
            roles = (ACT, REHEARSE) if job.partner is None else (ACT,)
            state, metrics, told = job.learn(state, trajectories, own, roles, told)
            if job.partner is not None:
                job.partner.state, figures, _ = job.learn(job.partner.state, trajectories, own, (REHEARSE,), {})
                metrics |= job.partner.metrics(figures)
            step += 1
            ended = time.perf_counter()
            trace.after(step)

            metrics |= episode_metrics(sampled.everything) | _judged(told)
            metrics |= {
                "train/learning_rate": float(rate),
                "episodes/learned_fraction": len(sampled.learned) / max(len(sampled.everything), 1),
                "time/rollout_s": ready - began,
                "time/reshard_s": sampled.reshard_s,  # part of it
                "time/train_s": ended - learning,
                "time/judge_s": sum(figures["judge_s"] for figures in told),
                "time/sync_s": synced + everyone.waited(),
                "time/agreement_s": everyone.agreed(),
                "time/checkpoint_s": saved_s,  # of the step before: a line is written before its checkpoint
            }
            metrics |= _throughput(job, sampled.learned, metrics, [figures["rollout_s"] for figures in told])
            last = step == train.steps
            if evaluate is not None and (last or step % config.evaluation.every == 0):
                metrics |= _evaluate(evaluate, job, state, step, stopping, progress)
            metrics |= {"time/step_s": time.perf_counter() - began, "compile/count": float(compiled.count)}

            # The line first: a checkpoint without its line would leave a gap for good.
            log.write(step, metrics)
            stop = everyone.count == 1 and stopping.due()  # several agree on it when they sample
            saved = time.perf_counter()
            if last or stop or step % train.save_every == 0:
                saving.save(state)
            saved_s = time.perf_counter() - saved
            dump_every = config.logging.trajectories_every
            if dump_every and (step == 1 or step % dump_every == 0):
                write_trajectories(out, step, trajectories, own, job.chat, process=everyone.index)
            progress.update(step, _shown(metrics))
            if stop and not last:
                raise StopRun
    except StopRun:
        saving.finish(state)
        by = "Ctrl-C" if stopping.signal is signal.SIGINT else stopping.signal.name
        progress.note(f"stopped by {by} after step {step}, which is saved; the same command goes on from there")
        raise SystemExit(EXIT_STATUS[stopping.signal]) from None
    except EndpointError:
        if step > job.step:
            saving.finish(state)
        raise
    saving.finish(state)
    progress.note(_summary(out, step))


def _evaluate(
    evaluate: Evaluate, job: Job, state: TrainState, step: int, stopping: Stopping, progress: Progress
) -> dict[str, float]:
    began = time.perf_counter()
    # On several processes the evaluation itself agrees on a stop, and must not be broken off while it does.
    with stopping.at_once() if job.processes.count == 1 else contextlib.nullcontext():
        figures = {name: float(value) for name, value in evaluate(job.model(state), step).items()}
    if "eval/success" in figures:
        progress.note(f"evaluation after step {step}: success {figures['eval/success']:.3f}")
    return {**figures, "time/eval_s": time.perf_counter() - began}


def _judged(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`judge/*` over all processes: counts add, a mean time counts by its requests."""
    names = [name for name in told[0] if name.startswith("judge/")]
    totals = {name: sum(figures[name] for figures in told) for name in names}
    if "judge/seconds" in totals:
        seconds = sum(figures["judge/seconds"] * figures["judge/requests"] for figures in told)
        totals["judge/seconds"] = seconds / max(totals["judge/requests"], 1.0)
    return totals


def _throughput(
    job: Job, learned: Sequence[Outline], metrics: Mapping[str, float], rollout_s: Sequence[float]
) -> dict[str, float]:
    """Tokens a second, over all chips and for each; how far the slowest process is behind; model operations done of
    those that the chips could do, while training."""
    tokens = metrics["tokens/act"] + metrics["tokens/rehearse"]
    sampled = tokens / max(metrics["time/rollout_s"], 1e-9)
    trained = tokens / max(metrics["time/train_s"], 1e-9)
    chips = 1 if job.mesh is None else job.mesh.size
    figures = {
        "throughput/sampled_tokens_per_s": sampled,
        "throughput/trained_tokens_per_s": trained,
        "throughput/sampled_tokens_per_s_per_chip": sampled / chips,
        "throughput/trained_tokens_per_s_per_chip": trained / chips,
        "time/straggler_ratio": max(rollout_s) / max(sum(rollout_s) / len(rollout_s), 1e-9),
    }
    peak = job.config.logging.peak_flops or peak_flops(jax.devices()[0].device_kind)
    if peak is not None:
        done = step_flops(job.config, job.model_config, [len(o) for o in learned if o.valid], tokens)
        figures["throughput/model_flops_utilisation"] = done / (metrics["time/train_s"] * chips * peak)
    return figures


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


class _Trace:
    """A `jax.profiler` trace of some steps, under RUN/profile; each process writes its own."""

    def __init__(self, run: Path, steps: tuple[int, int] | None):
        self._directory, self._steps = run / "profile", steps or (math.inf, math.inf)
        self._on = False

    def before(self, step: int) -> None:
        if not self._on and self._steps[0] <= step <= self._steps[1]:
            jax.profiler.start_trace(str(self._directory))
            self._on = True

    def after(self, step: int) -> None:
        if self._on and step >= self._steps[1]:
            jax.profiler.stop_trace()
            self._on = False
