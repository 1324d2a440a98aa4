"""Hugging Face checkpoints of Qwen3 <-> the parameters of `Qwen3`.

`CHECKPOINT` is the whole mapping. Loading reads every header first and reports all that is wrong with a checkpoint at
once; then tensors are read one by one (with a mesh: only the part each device of this process holds) and written into
the stacked parameters in place, so that host memory never holds more than one tensor. Saving does the reverse, one
file at a time, into a temporary directory that takes the final name when it is complete.
"""

import fnmatch
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.qwen3 import sharding
from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3

# Name in the checkpoint -> path of the parameter. `{layer}` counts along the first axis of a stacked parameter.
CHECKPOINT = {
    "model.embed_tokens.weight": "embed_tokens",
    "model.layers.{layer}.input_layernorm.weight": "layers.input_layernorm",
    "model.layers.{layer}.self_attn.q_proj.weight": "layers.q_proj",
    "model.layers.{layer}.self_attn.k_proj.weight": "layers.k_proj",
    "model.layers.{layer}.self_attn.v_proj.weight": "layers.v_proj",
    "model.layers.{layer}.self_attn.o_proj.weight": "layers.o_proj",
    "model.layers.{layer}.self_attn.q_norm.weight": "layers.q_norm",
    "model.layers.{layer}.self_attn.k_norm.weight": "layers.k_norm",
    "model.layers.{layer}.post_attention_layernorm.weight": "layers.post_attention_layernorm",
    "model.layers.{layer}.mlp.gate_proj.weight": "layers.gate_proj",
    "model.layers.{layer}.mlp.up_proj.weight": "layers.up_proj",
    "model.layers.{layer}.mlp.down_proj.weight": "layers.down_proj",
    "model.norm.weight": "norm",
    "lm_head.weight": "lm_head",
}
_PATTERNS = {path: pattern for pattern, path in CHECKPOINT.items()}

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LOADABLE = ("F32", "F16", "BF16")
_SAVABLE = ("bfloat16", "float16", "float32")
# What `save_hf` carries over from `like`, besides config.json.
_CARRIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
    "LICENSE*",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message lists every problem found and its remedy."""

    def __init__(self, directory: str | os.PathLike, problems: list[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{directory}: {count} with this checkpoint:" + "".join(f"\n  - {p}" for p in problems))


def load_hf(
    directory: str | os.PathLike,
    mesh: Mesh | None = None,
    param_dtype=jnp.float32,
    dtype=None,
    *,
    remat: str = "none",
    attention: str = "auto",
) -> Qwen3:
    """Loads a Hugging Face Qwen3 directory (config.json and one or several .safetensors files).

    Args:
        directory: local path.
        mesh: place parameters on it, sharded by `sharding.PARAM_AXES`; None: on the default device.
        param_dtype: type of the parameters.
        dtype, remat, attention: as in `Qwen3`.

    Raises:
        CheckpointError: lists everything missing, superfluous, misshapen, truncated or unsupported.
        ValueError: the mesh does not divide the model.
    """
    directory = Path(directory)
    config = _read_config(directory)
    abstract = nnx.eval_shape(
        lambda: Qwen3(
            config,
            rngs=nnx.Rngs(0),
            param_dtype=param_dtype,
            dtype=dtype,
            remat=remat,
            attention=attention,
            mesh=mesh,
        )
    )
    graphdef, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    shapes = {".".join(path): variable.shape for path, variable in flat.items()}
    tensors = _open(directory, config, shapes)

    filled = []
    for path, variable in flat.items():
        name = ".".join(path)
        place = None if mesh is None else NamedSharding(mesh, sharding.spec(sharding.PARAM_AXES[name]))
        filled.append((path, variable.replace(_load_parameter(name, variable.shape, param_dtype, place, tensors))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def save_hf(
    model: Qwen3,
    directory: str | os.PathLike,
    dtype: str = "bfloat16",
    like: str | os.PathLike | None = None,
    *,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes `model` as a Hugging Face directory that transformers, vLLM and SGLang load.

    The directory appears whole or not at all. On several hosts every process must call this; process 0 writes.

    Args:
        model: what to save.
        directory: must not exist or be empty, unless `overwrite`.
        dtype: type of the stored tensors: "bfloat16", "float16" or "float32".
        like: Hugging Face directory whose tokenizer, chat template and generation config are copied unchanged, and
            whose config.json is kept (but for the dtype) when it describes the same model.
        max_shard_size: bytes per file before the weights are split into several with an index.
        overwrite: replace an existing directory, whatever it holds.

    Raises:
        CheckpointError: an unknown dtype, an existing directory, or a `like` that is not there.
    """
    directory = Path(directory).absolute()
    problems = []
    if str(dtype) not in _SAVABLE:
        problems.append(f"dtype {dtype!r} cannot be saved; use one of {', '.join(_SAVABLE)}")
    if like is not None and not Path(like).is_dir():
        problems.append(f"like={str(like)!r} is not a directory; give the Hugging Face directory to carry over from")
    writer = jax.process_index() == 0
    if writer and not overwrite and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        problems.append("it exists and is not empty; choose another name, remove it, or pass overwrite=True")
    if problems:
        raise CheckpointError(directory, problems)

    files = _plan_files(model, jnp.dtype(dtype).itemsize, max_shard_size)
    temporary = None
    try:
        if writer:
            directory.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        weight_map, total = {}, 0
        for file, names in files.items():
            arrays = {name: _fetch(model, *names[name], dtype) for name in names}  # every process takes part
            weight_map.update(dict.fromkeys(arrays, file))
            total += sum(array.nbytes for array in arrays.values())
            if writer:
                save_file(arrays, temporary / file, metadata={"format": "pt"})
        if writer:
            if len(files) > 1:
                _write_json(temporary / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
            _write_json(temporary / "config.json", _config_json(model.config, dtype, like))
            _carry_over(like, temporary)
            _take_name(temporary, directory)
            temporary = None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"save_hf {directory}")


# Loading


def _read_config(directory: Path) -> Qwen3Config:
    if not directory.is_dir():
        remedy = "give a local directory with config.json and .safetensors files (names on a hub are not downloaded)"
        raise CheckpointError(directory, [f"no such directory; {remedy}"])
    try:
        return Qwen3Config.from_hf(directory)
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise CheckpointError(directory, [str(error)]) from None


def _open(directory: Path, config: Qwen3Config, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Opens the files, compares their headers with `shapes` (by parameter), and returns a slice reader by name."""
    problems: list[str] = []
    files, promised = _list_files(directory, problems)
    tensors: dict[str, Any] = {}
    broken = set()
    for file in files:
        path = directory / file
        try:
            handle = safe_open(path, framework="numpy")
            tensors.update({name: handle.get_slice(name) for name in handle.keys()})
        except FileNotFoundError:
            broken.add(file)
            problems.append(f"{file}: missing, but {_INDEX} names it; download it again")
        except (SafetensorError, OSError) as error:
            broken.add(file)
            size = path.stat().st_size
            problems.append(f"{file}: truncated or not a safetensors file ({size:,} bytes; {error}); copy it again")
    unreadable = {name for name, file in promised.items() if file in broken} - tensors.keys()
    everything_broken = bool(broken) and not promised  # a single file without an index: nothing is known of its names

    expected = dict(_expected(config, shapes))
    for name, shape in expected.items():
        if name not in tensors:
            if name in unreadable or everything_broken or not files:
                continue
            where = f" (the index says in {promised[name]})" if name in promised else ""
            hint = (
                "; if this model ties its embeddings, set tie_word_embeddings to true in config.json"
                if name == "lm_head.weight"
                else ""
            )
            problems.append(f"{name}: missing{where}, expected shape {list(shape)}{hint}")
            continue
        found = tensors[name]
        if tuple(found.get_shape()) != shape:
            problems.append(
                f"{name}: shape {found.get_shape()}, but config.json makes it {list(shape)}; "
                "the config and the weights belong to different models"
            )
        if found.get_dtype() not in _LOADABLE:
            problems.append(f"{name}: stored as {found.get_dtype()}; only {', '.join(_LOADABLE)} can be loaded")
    extra = tensors.keys() - expected.keys()
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        if not _equal(tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")):
            problems.append(
                "lm_head.weight: differs from model.embed_tokens.weight though config.json ties them; "
                "set tie_word_embeddings to false to use both, or remove it"
            )
    for name in sorted(extra):
        problems.append(f"{name}: not a tensor of this model ({config.num_hidden_layers} layers); remove it")
    if problems:
        raise CheckpointError(directory, problems)
    return tensors


def _list_files(directory: Path, problems: list[str]) -> tuple[list[str], dict[str, str]]:
    """File names to read, and the file of each tensor where an index tells."""
    index = directory / _INDEX
    if index.is_file():
        try:
            promised = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{_INDEX}: not a safetensors index ({error!r}); copy it again")
            return [], {}
        return sorted(set(promised.values())), promised
    if (directory / _WEIGHTS).is_file():
        return [_WEIGHTS], {}
    others = sorted(p.name for p in directory.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf", ".pth"))
    found = f"found only {', '.join(others)}" if others else "found no weights"
    problems.append(f"neither {_WEIGHTS} nor {_INDEX} is there ({found}); save the model as safetensors")
    return [], {}


def _expected(config: Qwen3Config, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint with its shape, in the order of the file."""
    for layer in (None, *range(config.num_hidden_layers)):
        for pattern, path in CHECKPOINT.items():
            if path in shapes and ("{layer}" in pattern) == (layer is not None):
                yield (pattern, shapes[path]) if layer is None else (pattern.format(layer=layer), shapes[path][1:])


def _equal(a, b, rows: int = 16_384) -> bool:
    if b is None or a.get_shape() != b.get_shape():
        return False
    total = a.get_shape()[0]
    # In parts: an embedding table is the largest tensor of a small model.
    parts = [slice(start, min(start + rows, total)) for start in range(0, total, rows)]
    return all(np.array_equal(a[part], b[part]) for part in parts)


def _load_parameter(name: str, shape, dtype, place: NamedSharding | None, tensors) -> jax.Array:
    pattern = _PATTERNS[name]
    if "{layer}" not in pattern:
        return _cast(dtype, place)(_put(tensors[pattern], place))
    piece = None if place is None else NamedSharding(place.mesh, P(*place.spec[1:]))
    stacked = _zeros(shape, jnp.dtype(dtype), place)
    for layer in range(shape[0]):
        stacked = _set_layer(place)(stacked, layer, _put(tensors[pattern.format(layer=layer)], piece))
    return stacked


def _put(tensor, place: NamedSharding | None) -> jax.Array:
    """One tensor in its stored type; each process reads only what its devices hold."""
    if place is None:
        return jnp.asarray(tensor[:])
    return jax.make_array_from_callback(tuple(tensor.get_shape()), place, lambda index: tensor[index])


def _zeros(shape, dtype, place: NamedSharding | None) -> jax.Array:
    return jnp.zeros(shape, dtype, device=place)


@functools.lru_cache
def _cast(dtype, place: NamedSharding | None) -> Callable:
    return jax.jit(lambda x: x.astype(dtype), out_shardings=place)


@functools.lru_cache
def _set_layer(place: NamedSharding | None) -> Callable:
    def set_layer(stacked, layer, value):
        return jax.lax.dynamic_update_index_in_dim(stacked, value.astype(stacked.dtype), layer, 0)

    return jax.jit(set_layer, donate_argnums=0, out_shardings=place)


# Saving


def _plan_files(model: Qwen3, itemsize: int, max_size: int) -> dict[str, dict[str, tuple[str, int | None]]]:
    """Which file holds which tensor: {file: {tensor: (parameter, layer or None)}}, in the order of the checkpoint."""
    shapes = {".".join(path): variable.shape for path, variable in nnx.to_flat_state(nnx.state(model))}
    source = {}
    for pattern, path in CHECKPOINT.items():
        for layer in range(model.config.num_hidden_layers) if "{layer}" in pattern else (None,):
            source[pattern.format(layer=layer)] = (path, layer)
    groups, size = [{}], 0
    for name, shape in _expected(model.config, shapes):
        nbytes = int(np.prod(shape)) * itemsize
        if groups[-1] and size + nbytes > max_size:
            groups.append({})
            size = 0
        groups[-1][name] = source[name]
        size += nbytes
    if len(groups) == 1:
        return {_WEIGHTS: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _fetch(model: Qwen3, path: str, layer: int | None, dtype: str) -> np.ndarray:
    """One tensor on the host, gathered from its shards."""
    value = functools.reduce(getattr, path.split("."), model)[...]
    place = getattr(value, "sharding", None)
    whole = NamedSharding(place.mesh, P()) if isinstance(place, NamedSharding) else None
    take = _take(jnp.dtype(dtype), whole, layer is not None)
    return np.asarray(take(value, 0 if layer is None else layer))


@functools.lru_cache
def _take(dtype, whole: NamedSharding | None, stacked: bool) -> Callable:
    def take(x, layer):
        x = jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) if stacked else x
        return x.astype(dtype)

    return jax.jit(take, out_shardings=whole)


def _config_json(config: Qwen3Config, dtype: str, like: str | os.PathLike | None) -> dict[str, Any]:
    path = None if like is None else Path(like) / "config.json"
    if path is None or not path.is_file():
        return config.to_hf(dtype)
    try:
        same = Qwen3Config.from_hf(path) == config
    except (ValueError, KeyError):
        same = False
    if not same:
        return config.to_hf(dtype)
    values = json.loads(path.read_text(encoding="utf-8"))
    names = [name for name in ("torch_dtype", "dtype") if name in values] or ["torch_dtype"]
    return {**values, **dict.fromkeys(names, dtype)}


def _carry_over(like: str | os.PathLike | None, directory: Path) -> None:
    for source in sorted(Path(like).iterdir()) if like is not None else ():
        if any(fnmatch.fnmatch(source.name, pattern) for pattern in _CARRIED):
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, directory / source.name)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _take_name(temporary: Path, directory: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o777 & ~umask)  # mkdtemp makes it private
    if not directory.exists():
        temporary.rename(directory)
        return
    # The old directory keeps its content until the new one is in place.
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
    directory.rename(old / directory.name)
    temporary.rename(directory)
    shutil.rmtree(old)
