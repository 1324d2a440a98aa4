"""The supervised warm start: both roles imitate recorded conversations.

Each step takes the conversations that belong to it, packs them into rows, and lowers the mean negative log-likelihood
of the trained tokens, act and rehearse weighted by `role_weights`. The step's data depend on its number alone, so a
run that is started again goes on where its last checkpoint was. On several processes each packs all rows and trains on
its share of them.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from envace_jax.chat import ChatTokenizer
from envace_jax.chat.build import train_tokenizer
from envace_jax.config import ConfigError, SFTConfig, to_dict
from envace_jax.grpo import ACT, CONTEXT, REHEARSE, TokenBatch, trained_logps
from envace_jax.rehearse.demos import remembering
from envace_jax.tasks.mini import vocabulary
from envace_jax.train.checkpoint import SOURCE, Checkpoints, export, load_model, tokenizer_directory, write_model_source
from envace_jax.train.initial import with_local_heads
from envace_jax.train.job import read_tokenizer
from envace_jax.train.optim import make_optimizer, make_schedule
from envace_jax.train.packing import pack, pad_fraction
from envace_jax.train.processes import Processes
from envace_jax.train.progress import Progress
from envace_jax.train.record import Metrics
from envace_jax.train.saving import Saving
from envace_jax.train.session import session
from envace_jax.train.sft_data import batches
from envace_jax.train.state import (
    LossSums,
    abstract_state,
    create_state,
    fit_batch,
    make_step,
    own_shards,
    place_batch,
    state_shardings,
)
from envace_jax.train.stopping import EXIT_STATUS, StopRun
from models.qwen3 import Qwen3, Qwen3Config

MODEL = "model"
CAPACITY = 4  # micro-batches that a step has room for, before the room is doubled


def sft(config: SFTConfig) -> Path:
    """Runs the warm start, going on from the latest checkpoint where there is one.

    Returns the Hugging Face directory it wrote, `output_dir`/model.

    Raises:
        EnvaceError: a setting, file or directory that must be mended.
        SystemExit: stopped by SIGTERM (75) or Ctrl-C (130), with all finished steps saved.
    """
    out, train = Path(config.output_dir), config.train
    with session(config) as here:
        everyone, mesh, stopping = here.processes, here.mesh, here.stopping
        checkpoints = here.enter(Checkpoints(out, place=train.checkpoints, keep=train.keep))
        model, chat = _initial_model(config, out, mesh, everyone)
        graphdef, params = nnx.split(model)
        optimizer, schedule = make_optimizer(train), make_schedule(train)
        like = abstract_state(params, optimizer, mesh)
        state = create_state(params, optimizer, mesh)
        found = everyone.each("looking for checkpoints", checkpoints.latest)[0]
        if found is not None:
            state = checkpoints.restore(like, found)
        start = step = int(state.step)
        sums = likelihood_sums(graphdef, config.role_weights, chat.vocab_size)
        update = make_step(sums, optimizer, state_shardings(like, mesh))
        row_length = train.row_length or config.data.max_tokens
        batch_of = everyone.together("reading conversations", lambda: batches(config.data, chat))
        log = here.enter(Metrics(out, step if step else -1, tensorboard=config.logging.tensorboard))
        progress = here.enter(
            Progress(
                train.steps,
                start,
                print_every=config.logging.print_every,
                console=None if everyone.index == 0 else Console(quiet=True),
            )
        )
        saving = Saving(
            checkpoints,
            everyone,
            metadata={"model": model.config.to_hf(train.param_dtype), "config": to_dict(config)},
            saves_behind=config.faults.saves_behind,
            note=progress.note,
        )
        progress.note(f"{out}: supervised training from step {start} to {train.steps}")

        def rows() -> TokenBatch:
            recorded = [t for t in batch_of(step) if len(t) <= row_length]
            return pack(recorded, [{}] * len(recorded), row_length)

        try:
            while step < train.steps:
                here.watch.step = step
                began = time.perf_counter()
                batch = everyone.together(f"the conversations of step {step + 1}", rows, repeatable=True)
                placed, used = _place_own(batch, train.micro_batch, mesh, everyone)
                state, metrics = update(state, placed, used)
                metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
                metrics |= {
                    "train/learning_rate": float(schedule(step)),
                    "batch/pad_fraction": pad_fraction(batch),
                    "time/sync_s": everyone.waited(),
                    "time/step_s": time.perf_counter() - began,
                }
                step += 1
                log.write(step, metrics)
                if step == train.steps or step % train.save_every == 0:
                    saving.save(state)
                shown = ("loss/act", "loss/rehearse", "time/step_s")
                progress.update(step, {name.split("/")[1]: metrics[name] for name in shown})
        except StopRun:
            saving.finish(state)
            progress.note(f"stopped after step {step}, which is saved; the same command goes on from it")
            raise SystemExit(EXIT_STATUS[stopping.signal]) from None
        saving.finish(state)
        if not everyone.each("looking for the model", (out / MODEL).exists)[0]:
            export(out, out / MODEL, dtype="float32")
        progress.note(f"done: {step} steps; the model lies in {out / MODEL}")
    return out / MODEL


def _place_own(batch: TokenBatch, micro_batch: int, mesh: Mesh | None, everyone: Processes) -> tuple[TokenBatch, int]:
    """This process's share of the rows [B, T], which all processes have, on its devices (see `place_batch`), and how
    many micro-batches are used."""
    trained = np.any(batch.roles != CONTEXT, axis=1)
    shares = [everyone.share(len(trained), process) for process in range(everyone.count)]
    own = [np.s_[share.start : share.stop] for share in shares]
    fits = [fit_batch(len(trained[o]), trained[o], micro_batch, own_shards(mesh), CAPACITY) for o in own]
    used, capacity = (max(sizes) for sizes in zip(*fits, strict=True))
    here = own[everyone.index]
    mine = jax.tree.map(lambda x: x[here], batch)
    placed, _ = place_batch(mine, micro_batch, mesh, trained=trained[here], capacity=capacity)
    return placed, used


def likelihood_sums(graphdef: nnx.GraphDef, role_weights: tuple[float, float], vocab_size: int | None) -> LossSums:
    """Summed weighted negative log-likelihood, its weight, and `loss/act`, `loss/rehearse` as (sum, weight) pairs."""

    def sums(params: nnx.State, batch: TokenBatch) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        model = nnx.merge(graphdef, params)
        logps = trained_logps(model, batch, vocab_size=vocab_size)
        numerator = denominator = jnp.zeros(())
        metrics = {}
        for name, role, weight in (("act", ACT, role_weights[0]), ("rehearse", REHEARSE, role_weights[1])):
            mask = batch.roles == role
            loss, count = jnp.sum(jnp.where(mask, -logps, 0.0)), jnp.sum(mask, dtype=jnp.float32)
            numerator, denominator = numerator + weight * loss, denominator + weight * count
            metrics[f"loss/{name}"] = (loss, count)
        metrics["loss/total"] = (numerator, denominator)
        return numerator, denominator, metrics

    return sums


def _initial_model(config: SFTConfig, out: Path, mesh: Mesh | None, everyone: Processes) -> tuple[Qwen3, ChatTokenizer]:
    """The model to start from and its tokenizer; `output_dir`/model_source holds all of it but the weights."""
    settings = {
        "param_dtype": jnp.dtype(config.train.param_dtype),
        "dtype": None if config.train.compute_dtype == "auto" else jnp.dtype(config.train.compute_dtype),
        "remat": config.train.remat_policy,
        "attention_block": config.train.attention_block,
    }

    if config.model is None and config.tokenizer is None:
        everyone.together("a tokenizer", lambda: _trained_tokenizer(out) if everyone.index == 0 else None)

    def read() -> tuple[Qwen3, Path]:
        if config.model is not None:
            model = load_model(config.model, mesh, **settings)
            return model, tokenizer_directory(config.tokenizer or config.model)
        source = Path(config.tokenizer) if config.tokenizer else _trained_tokenizer(out)
        try:
            architecture = Qwen3Config.from_hf({"vocab_size": _vocab_size(source), **config.architecture})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"architecture: {error}") from error
        model = Qwen3(architecture, rngs=nnx.Rngs(config.seed), mesh=mesh, **settings)
        return (model if config.local_heads is None else with_local_heads(model, config.local_heads)), source

    model, source = everyone.together("reading the model", read)
    everyone.together("writing what the model is", lambda: write_model_source(out, source, model.config))
    return model, everyone.together("reading the tokenizer", lambda: read_tokenizer(out / SOURCE, model.config))


def _trained_tokenizer(out: Path) -> Path:
    """The embedded world's tokenizer, trained once."""
    directory = out / "tokenizer"
    if not (directory / "tokenizer_config.json").is_file():
        noted = itertools.chain.from_iterable(itertools.islice(remembering(-1), 500))
        texts = itertools.chain(vocabulary.texts(), map(vocabulary.text, noted))
        train_tokenizer(texts, vocabulary.VOCAB_SIZE, directory, pattern=vocabulary.PATTERN)
    return directory


def _vocab_size(tokenizer: Path) -> int:
    """Rows of the embedding: the tokenizer's ids, rounded up to a multiple of 64 as is usual."""
    return -(-ChatTokenizer.from_pretrained(tokenizer).vocab_size // 64) * 64
