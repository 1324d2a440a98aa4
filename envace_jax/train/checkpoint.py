"""Checkpoints of runs, and the way from and to Hugging Face directories.

    RUN/model_source/        config.json, tokenizer, template, generation config: what a model is besides its weights
    RUN/checkpoints/STEP/    params, optimizer, metadata (Orbax); appears whole or not at all; see `stores`

Arrays are stored flat, by name, so a checkpoint does not depend on how a library nests its trees, and are restored
straight to their shards on whatever mesh asks for them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from envace_jax.errors import CheckpointError
from envace_jax.train.gate import Gate
from envace_jax.train.optim import named
from envace_jax.train.processes import of_all, processes
from envace_jax.train.state import TrainState
from envace_jax.train.stores import CHECKPOINTS, ITEMS, check_room, located, put, set_aside_incomplete, store, whole
from models.qwen3 import CheckpointError as ModelError
from models.qwen3 import Qwen3, Qwen3Config, compare_logits, load_hf, save_hf, verify_hf
from models.qwen3.saving import check_target
from models.qwen3.sharding import make_mesh, state_shardings
from models.qwen3.weights import stored_dtype

SOURCE = "model_source"
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack")


class Checkpoints:
    """The checkpoints of one run, RUN/checkpoints. Saving goes on in the background; `close` waits for it.

    Args:
        run: the run directory.
        place: a directory or URL (gs://) where they lie instead; None: where they lay before, or in the run directory.
        keep: how many of the latest are kept; None: all.
        read_only: neither creates nor cleans anything up, so that a run still going on can be read.
    """

    def __init__(self, run: str | Path, *, place: str | None = None, keep: int | None = 3, read_only: bool = False):
        if place is not None:
            processes().each("naming a place", lambda: put(run, place) if processes().index == 0 else None)
        self.directory = store(run) if place is None else located(place)
        self._keep, self._read_only = keep, read_only
        self.set_aside: list[str] = []  # checkpoints found half-written, which do not count
        self._open()

    def _open(self) -> None:
        self._begun: int | None = None  # the step saved last
        if not self._read_only:
            # Before any process looks which steps there are.
            self.set_aside = processes().each("opening checkpoints", self._clean_up)[0]
        everyone, asynchronous = processes(), ocp.AsyncOptions()
        if everyone.count > 1:
            gate = Gate(everyone.index, everyone.count, everyone.client, f"envace/gate/{everyone.rounds}")
            asynchronous = ocp.AsyncOptions(barrier_sync_fn=gate)
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=ITEMS,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if self._read_only else self._keep,
                create=not self._read_only,
                cleanup_tmp_directories=not self._read_only,
                read_only=self._read_only,
                async_options=asynchronous,
            ),
        )

    def _clean_up(self) -> list[str]:
        if processes().index != 0:
            return []
        self.directory.mkdir(parents=True, exist_ok=True)
        return set_aside_incomplete(self.directory)

    def probe(self, state: TrainState) -> None:
        """Raises OSError when the store takes no file, or has no room for this process's part of `state`.

        To be agreed on before a save: within Orbax a process that fails would leave the others waiting.
        """
        mine = sum(
            shard.data.nbytes
            for array in jax.tree.leaves(state)
            for shard in array.addressable_shards
            if shard.replica_id == 0
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        check_room(self.directory, mine, processes().index)

    def give_up(self) -> None:
        """After a failure to write: what was begun is given up, and the store is opened anew with the next save."""
        try:
            self._manager.close()
        except Exception:  # the failure again
            pass
        self._manager = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """The step of the latest complete checkpoint."""
        return max(whole(self.directory), default=None)

    def save(self, state: TrainState, metadata: Mapping[str, Any]) -> None:
        """Starts saving `state` under its step; returns once the state may be donated. A step saved before is kept."""
        step = int(state.step)
        if self._manager is None:
            self._open()
        # One that is still being written is not listed yet. Process 0 decides: disks tell of news late.
        there = processes().each("what is there", lambda: whole(self.directory) if processes().index == 0 else [])[0]
        if step == self._begun or step in there:
            return
        optimizer = {**_flat(state.opt_state), "step": state.step, "skipped": state.skipped}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(named(state.params)),
                optimizer=ocp.args.StandardSave(optimizer),
                metadata=ocp.args.JsonSave(dict(metadata)),
            ),
            force=True,
        )
        self._begun = step

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """The state saved at `step` (default: the latest), with the types and places of `like` (see `abstract_state`).

        Raises CheckpointError naming the checkpoint when it is not there, damaged, or another model's.
        """
        step = self._existing(step)
        optimizer = {**_flat(like.opt_state), "step": like.step, "skipped": like.skipped}
        params = self._restore(step, "params", named(like.params))
        optimizer = self._restore(step, "optimizer", optimizer)
        leaves = [params[name] for name in named(like.params)]
        moments = [optimizer[name] for name in _flat(like.opt_state)]
        return TrainState(
            params=jax.tree.unflatten(jax.tree.structure(like.params), leaves),
            opt_state=jax.tree.unflatten(jax.tree.structure(like.opt_state), moments),
            step=optimizer["step"],
            skipped=optimizer["skipped"],
        )

    def restore_params(self, like: nnx.State, step: int | None = None) -> nnx.State:
        """Only the parameters of a checkpoint."""
        restored = self._restore(self._existing(step), "params", named(like))
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in named(like)])

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """What was saved beside the state of a step (default: the latest)."""
        step = self._existing(step)
        with self._readable(step):
            return self._manager.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore()))["metadata"]

    def wait(self) -> None:
        """Until what is being saved is complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for what is being saved and releases the directory."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.close()

    def _existing(self, step: int | None) -> int:
        steps = whole(self.directory)
        if not steps:
            raise CheckpointError(f"{self.directory}: no complete checkpoint there")
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.directory}: no checkpoint of step {step}; there are {_listed(steps)}")
        return max(steps) if step is None else step

    def _restore(self, step: int, item: str, like: Mapping[str, Any]) -> dict[str, jax.Array]:
        here = SingleDeviceSharding(jax.local_devices()[0])

        def target(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or here)

        with self._readable(step):
            args = ocp.args.StandardRestore({name: target(x) for name, x in like.items()})
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]

    @contextmanager
    def _readable(self, step: int):
        try:
            yield
        except (ValueError, KeyError, TypeError, OSError) as error:
            if of_all(error):  # the checkpoint may well be whole
                raise
            others = [s for s in whole(self.directory) if s != step]
            remedy = f"remove it to use step {max(others)}" if others else "start again in another directory"
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{self.directory / str(step)}: cannot be restored ({reason}); {remedy}") from error


def has_checkpoint(run: str | Path) -> bool:
    """Whether a run directory holds a complete checkpoint."""
    return bool(whole(store(run)))


def load_model(
    source: str | Path,
    mesh: Mesh | None = None,
    param_dtype: Any = jnp.float32,
    dtype: Any = None,
    **options: Any,
) -> Qwen3:
    """A model from a Hugging Face directory, a run directory (its latest checkpoint) or a checkpoint.

    `options` are those of `Qwen3`: remat, attention, attention_block.

    Raises CheckpointError naming what is missing or wrong.
    """
    source = Path(source)
    if (source / "config.json").is_file() or not source.is_dir():
        try:
            return load_hf(source, mesh, param_dtype, dtype, **options)
        except (ModelError, ValueError) as error:
            raise CheckpointError(str(error)) from error
    run, step = _resolve(source)
    with Checkpoints(run, read_only=True) as checkpoints:
        config = Qwen3Config.from_hf(checkpoints.metadata(step)["model"])
        try:
            abstract = nnx.eval_shape(
                lambda: Qwen3(config, rngs=nnx.Rngs(0), param_dtype=param_dtype, dtype=dtype, mesh=mesh, **options)
            )
        except ValueError as error:  # the mesh does not divide the model
            raise CheckpointError(f"{source}: {error}") from error
        graphdef, params = nnx.split(abstract)
        if mesh is not None:
            params = jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                params,
                state_shardings(params, mesh),
            )
        return nnx.merge(graphdef, checkpoints.restore_params(params, step))


def tokenizer_directory(source: str | Path) -> Path:
    """Where the tokenizer of a model lies: the Hugging Face directory itself, or a run's `model_source`."""
    source = Path(source)
    if (source / "config.json").is_file() or (source / "tokenizer_config.json").is_file():
        return source
    return _model_source(_resolve(source)[0])


def write_model_source(run: str | Path, like: str | Path, config: Qwen3Config) -> Path:
    """Puts RUN/model_source in place: all of `like` but its weights, and the config.json of `config`.

    `like` is a Hugging Face directory, with or without weights, or another run.
    """
    target = Path(run) / SOURCE
    if target.is_dir() or jax.process_index() != 0:
        return target
    like = tokenizer_directory(like)
    temporary = target.with_name(f".{SOURCE}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in sorted(like.iterdir()):
        if path.name.startswith(".") or path.suffix in _WEIGHTS or path.name.endswith(".index.json"):
            continue
        if path.is_file():
            shutil.copyfile(path, temporary / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, temporary / path.name)
    if not _describes(temporary, config):
        (temporary / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    temporary.rename(target)
    return target


def export(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    max_shard_size: int | str = "5GB",
    verify: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Writes a run's latest checkpoint, or the checkpoint named, as a Hugging Face directory.

    On several hosts every process must call this; parameters are spread over all devices, and process 0 writes.

    Args:
        source: RUN, RUN/checkpoints or RUN/checkpoints/STEP.
        out: must not exist or be empty.
        dtype: of the stored tensors: bfloat16, float16 or float32.
        max_shard_size: of a weight file: bytes, or a text such as "500MB" or "5GB".
        verify: read every tensor of `out` back and compare it, and the logits with those of transformers where torch
            is installed (on one host only).
        say: is told what was verified.

    Raises CheckpointError naming what is missing, damaged or in the way.
    """
    run, _ = _resolve(Path(source))
    like, size = _model_source(run), _bytes(max_shard_size)
    try:
        check_target(out, dtype, like, max_shard_size=size)  # before minutes of loading
        model = load_model(source, _spread(like), param_dtype=jnp.dtype(dtype))
        save_hf(model, out, dtype, like=like, max_shard_size=size)
        if verify:
            say(f"{verify_hf(model, out)} tensors read back, all as they were saved")
            del model
            difference = compare_logits(out) if jax.process_count() == 1 else None
            compared = (
                "not compared: torch is not here" if difference is None else f"differ by {difference:.1e} at most"
            )
            say(f"logits of transformers, as a share of the largest: {compared}")
    except (ModelError, OSError) as error:
        raise CheckpointError(str(error)) from error
    return Path(out)


def import_hf(source: str | Path, out: str | Path) -> Path:
    """Writes a Hugging Face directory as a run directory with one checkpoint, step 0, that `export` takes back.

    Parameters keep the type they are stored in; whoever loads the checkpoint gets the type it asks for.

    Raises CheckpointError naming what is missing or damaged, or when `out` is not empty.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists and is not empty; choose another name or remove it")
    dtype = stored_dtype(source)
    model = load_model(source, _spread(Path(source)), param_dtype=dtype)
    write_model_source(out, source, model.config)
    zero = jnp.zeros((), jnp.int32)
    with Checkpoints(out) as checkpoints:
        checkpoints.save(TrainState(nnx.state(model), (), zero, zero + 0), {"model": model.config.to_hf(dtype.name)})
    return out


def _spread(directory: Path) -> Mesh | None:
    """A mesh of all devices for the model whose config.json lies in `directory`; None on one device."""
    if jax.device_count() == 1 or not (directory / "config.json").is_file():
        return None
    try:
        hidden = Qwen3Config.from_hf(directory).hidden_size
    except (ValueError, KeyError):
        return None  # loading says what is wrong
    return make_mesh(data=-1, fsdp=math.gcd(jax.device_count(), hidden))


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", str(size).strip().upper())
    if not match or not int(match[1]):
        raise CheckpointError(f"max shard size {size!r}: expected bytes, or a text such as 500MB or 5GB")
    return int(match[1]) * 1000 ** " KMGT".index(match[2] or " ")


def _resolve(source: Path) -> tuple[Path, int | None]:
    """RUN and the step that `source` names; None where it names the run."""
    source = source.absolute()
    if source.parent.name == CHECKPOINTS and source.name.isdecimal():
        run, step = source.parent.parent, int(source.name)
    else:
        run, step = (source.parent if source.name == CHECKPOINTS else source), None
    steps = whole(store(run))
    if not steps or (step is not None and step not in steps):
        found = f"there are steps {_listed(steps)}" if steps else "no complete checkpoint is there"
        raise CheckpointError(
            f"{source}: neither a run directory nor a checkpoint ({found}); "
            f"give a directory that holds {CHECKPOINTS}/, or one of the checkpoints in it"
        )
    return run, step


def _model_source(run: Path) -> Path:
    source = run / SOURCE
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source}: missing; copy config.json and the tokenizer files of the run's model there")
    return source


def _describes(directory: Path, config: Qwen3Config) -> bool:
    try:
        return Qwen3Config.from_hf(directory) == config
    except (FileNotFoundError, ValueError, KeyError):
        return False


def _flat(tree: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
