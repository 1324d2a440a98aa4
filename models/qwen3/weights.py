"""Hugging Face checkpoints of Qwen3 -> the parameters of `Qwen3`; `saving` goes the other way.

`CHECKPOINT` is the whole mapping. Loading reads every header first and reports all that is wrong with a checkpoint at
once; then tensors are read one by one (with a mesh: only the part each device of this process holds) and written into
the stacked parameters in place, so that host memory never holds more than one tensor.
"""

import functools
import json
import os
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

from models.qwen3 import sharding
from models.qwen3.attention import SPLASH_BLOCK
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

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_LOADABLE = ("F32", "F16", "BF16")
_PART = 64 * 2**20  # bytes of a table that are read at a time


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
    attention_block: int = SPLASH_BLOCK,
) -> Qwen3:
    """Loads a Hugging Face Qwen3 directory (config.json and one or several .safetensors files).

    Args:
        directory: local path.
        mesh: place parameters on it, sharded by `sharding.PARAM_AXES`; None: on the default device.
        param_dtype: type of the parameters.
        dtype, remat, attention, attention_block: as in `Qwen3`.

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
            attention_block=attention_block,
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


def stored_dtype(directory: str | os.PathLike) -> jnp.dtype:
    """The type that all tensors of a checkpoint are stored in; float32 where they differ or cannot be read."""
    found = set()
    for path in Path(directory).glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy") as handle:
                found |= {handle.get_slice(name).get_dtype() for name in handle.keys()}
        except (SafetensorError, OSError):
            found.add(None)
    return jnp.dtype(
        {"BF16": "bfloat16", "F16": "float16"}.get(found.pop(), "float32") if len(found) == 1 else "float32"
    )


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
    places: dict[str, str] = {}  # the file that each tensor lies in
    broken = set()
    for file in files:
        path = directory / file
        try:
            handle = safe_open(path, framework="numpy")
            for name in handle.keys():
                if name in places:
                    problems.append(f"{name}: stored twice, in {places[name]} and {file}; remove one of them")
                places[name], tensors[name] = file, handle.get_slice(name)
        except FileNotFoundError:
            broken.add(file)
            problems.append(f"{file}: missing, but {INDEX} names it; download it again")
        except (SafetensorError, OSError) as error:
            broken.add(file)
            size = path.stat().st_size
            problems.append(f"{file}: truncated or not a safetensors file ({size:,} bytes; {error}); copy it again")
    for name, file in sorted(places.items()) if promised else ():
        if promised.get(name) != file:
            says = f"says {promised[name]}" if name in promised else "does not list it"
            problems.append(f"{name}: lies in {file}, but {INDEX} {says}; copy the index that belongs to these files")
    unreadable = {name for name, file in promised.items() if file in broken} - tensors.keys()
    everything_broken = bool(broken) and not promised  # a single file without an index: nothing is known of its names

    expected = dict(expected_tensors(config, shapes))
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
    index = directory / INDEX
    if index.is_file():
        try:
            promised = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{INDEX}: not a safetensors index ({error!r}); copy it again")
            return [], {}
        return sorted(set(promised.values())), promised
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS], {}
    others = sorted(p.name for p in directory.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf", ".pth"))
    found = f"found only {', '.join(others)}" if others else "found no weights"
    problems.append(f"neither {WEIGHTS} nor {INDEX} is there ({found}); save the model as safetensors")
    return [], {}


def expected_tensors(config: Qwen3Config, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
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
        if place is None and len(shape) == 2:
            return _load_table(shape, dtype, tensors[pattern])
        return _cast(dtype, place)(_put(tensors[pattern], place))
    piece = None if place is None else NamedSharding(place.mesh, P(*place.spec[1:]))
    stacked = _zeros(shape, jnp.dtype(dtype), place)
    for layer in range(shape[0]):
        value = _put(tensors[pattern.format(layer=layer)], piece)
        # One is read while another is set; without waiting, all that were read would queue up.
        stacked = _set_layer(place)(stacked.block_until_ready(), layer, value)
    return stacked


def _load_table(shape, dtype, tensor) -> jax.Array:
    # In parts: it is the largest tensor there is, and reading it whole would hold it three times, twice as stored.
    table = _zeros(shape, jnp.dtype(dtype), None)
    rows = max(1, _PART // (np.dtype(np.float32).itemsize * shape[1]))
    for start in range(0, shape[0], rows):
        end = min(start + rows, shape[0])
        value = jnp.asarray(tensor[start:end])
        table = _set_rows(table.block_until_ready(), start, value)
    return table


@functools.partial(jax.jit, donate_argnums=0)
def _set_rows(table: jax.Array, start: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(table, value.astype(table.dtype), start, 0)


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
