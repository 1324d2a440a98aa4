"""The parameters of `Qwen3` -> a Hugging Face checkpoint.

Tensors go out one by one: a layer of a stacked parameter is sliced, cast where its shards lie, gathered, written, and
forgotten, so that neither a host nor a device ever holds more than one whole tensor besides its own share. Files are
written into a temporary directory that takes the final name when all of it is complete. On several hosts every process
takes part in the gathering, process 0 alone writes, and all raise when it cannot.
"""

import fnmatch
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3
from models.qwen3.weights import CHECKPOINT, INDEX, WEIGHTS, CheckpointError, expected_tensors

SAVABLE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors spells them
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
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")  # of a turn and of a text; either ends a generation
_RELEASED_END_IDS = (151_645, 151_643)

Tensor = tuple[str, tuple[int, ...], str, int | None]  # name, shape; path of the parameter, layer


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
            whose config.json is kept (but for the dtype) when it describes the same model. Without a generation config
            there one is written that names both end ids of Qwen3's chat format, where they are known.
        max_shard_size: bytes of tensors in a file before the weights are split into several with an index.
        overwrite: replace an existing directory, whatever it holds.

    Raises:
        CheckpointError: an unknown dtype, an existing directory, a `like` that is not there, or a failure to write.
    """
    directory = Path(directory).absolute()
    writer = jax.process_index() == 0
    problems = _what_hinders(directory, dtype, like, max_shard_size, overwrite)
    temporary = None
    if writer and not problems:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        except OSError as error:
            problems.append(f"cannot be created ({error})")
    try:
        agree(directory, problems)
        failure = _write_weights(model, temporary, dtype, max_shard_size)
        if temporary is not None and failure is None:
            failure = _attempt(_finish, model.config, temporary, directory, dtype, like)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # gone when it has taken its name
    agree(directory, [] if failure is None else [f"cannot be written ({failure}); nothing is left of it"])


def check_target(
    directory: str | os.PathLike,
    dtype: str = "bfloat16",
    like: str | os.PathLike | None = None,
    *,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Whether `save_hf` would take these arguments: for asking before a model is loaded.

    Raises:
        CheckpointError: lists all that is wrong.
    """
    agree(Path(directory), _what_hinders(Path(directory), dtype, like, max_shard_size, overwrite))


def _what_hinders(directory: Path, dtype: str, like, max_shard_size: int, overwrite: bool) -> list[str]:
    problems = []
    if str(dtype) not in SAVABLE:
        problems.append(f"dtype {dtype!r} cannot be saved; use one of {', '.join(SAVABLE)}")
    if max_shard_size < 1:
        problems.append(f"max_shard_size={max_shard_size} must be positive; it is a number of bytes")
    if like is not None and not Path(like).is_dir():
        problems.append(f"like={str(like)!r} is not a directory; give the Hugging Face directory to carry over from")
    writer = jax.process_index() == 0
    if writer and not overwrite and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        problems.append("it exists and is not empty; choose another name, remove it, or pass overwrite=True")
    return problems


def all_tensors(model: Qwen3) -> list[Tensor]:
    """Every tensor of the checkpoint, in its order, and the parameter it comes from."""
    shapes = {".".join(path): variable.shape for path, variable in nnx.to_flat_state(nnx.state(model))}
    source: dict[str, tuple[str, int | None]] = {}
    for pattern, path in CHECKPOINT.items():
        for layer in range(model.config.num_hidden_layers) if "{layer}" in pattern else (None,):
            source[pattern.format(layer=layer)] = (path, layer)
    return [(name, shape, *source[name]) for name, shape in expected_tensors(model.config, shapes)]


def _plan_files(tensors: Iterable[Tensor], itemsize: int, max_size: int) -> dict[str, list[Tensor]]:
    """Which file holds which tensors."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = int(np.prod(tensor[1])) * itemsize
        if groups[-1] and size + nbytes > max_size:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_weights(model: Qwen3, directory: Path | None, dtype: str, max_size: int) -> OSError | None:
    """Writes all weight files; on the other processes (`directory` None) only takes part in the gathering. A failure
    to write is returned, not raised: the others still wait for this process's share."""
    files = _plan_files(all_tensors(model), jnp.dtype(dtype).itemsize, max_size)
    failure = None
    for file, tensors in files.items():
        # By name, as safetensors' own writer orders tensors of one type.
        tensors = sorted(tensors)
        if directory is not None and failure is None:
            failure = _attempt((directory / file).write_bytes, _header(tensors, dtype))
        for _, _, path, layer in tensors:
            wanted = directory is not None and failure is None
            value = fetch(model, path, layer, dtype, wanted)
            if wanted:
                failure = _attempt(_append, directory / file, value)
        if directory is not None and failure is None:
            failure = _attempt(_sync, directory / file)
    if directory is not None and failure is None and len(files) > 1:
        total = sum(int(np.prod(shape)) for tensors in files.values() for _, shape, _, _ in tensors)
        weight_map = {name: file for file, tensors in files.items() for name, *_ in tensors}
        metadata = {"total_size": total * jnp.dtype(dtype).itemsize}
        failure = _attempt(_write_json, directory / INDEX, {"metadata": metadata, "weight_map": weight_map})
    return failure


def _header(tensors: Iterable[Tensor], dtype: str) -> bytes:
    """What a .safetensors file begins with: the length of a JSON object, and that object, padded to eight bytes.
    Source: the format's description in the README of the safetensors library, whose own writer wants all tensors of a
    file at once."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, _, _ in tensors:
        start, end = end, end + int(np.prod(shape)) * jnp.dtype(dtype).itemsize
        entries[name] = {"dtype": SAVABLE[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _append(file: Path, value: np.ndarray) -> None:
    with file.open("ab") as stream:
        stream.write(value.reshape(-1).view(np.uint8).data)


def _sync(file: Path) -> None:
    # The directory takes its name only when its files are on the disk.
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _attempt(action: Callable, *arguments: Any) -> OSError | None:
    """Does it; a failure of the file system is returned."""
    try:
        action(*arguments)
    except OSError as error:
        return error
    return None


def fetch(model: Qwen3, path: str, layer: int | None, dtype: str, wanted: bool) -> np.ndarray | None:
    """One tensor on the host, gathered from its shards; None where it is not `wanted`."""
    value = functools.reduce(getattr, path.split("."), model)[...]
    place = getattr(value, "sharding", None)
    place = place if isinstance(place, NamedSharding) else None
    tensor = _take(jnp.dtype(dtype), place, layer is not None)(value, 0 if layer is None else layer)
    if wanted:
        return np.asarray(tensor)
    jax.block_until_ready(tensor)  # one at a time here, too
    return None


@functools.lru_cache
def _take(dtype, place: NamedSharding | None, stacked: bool) -> Callable:
    """Slices, casts, and only then gathers."""

    def take(x, layer):
        x = jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) if stacked else x
        x = x.astype(dtype)
        if place is not None:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(place.mesh, P(*place.spec[stacked:])))
        return x

    return jax.jit(take, out_shardings=None if place is None else NamedSharding(place.mesh, P()))


def _finish(config: Qwen3Config, temporary: Path, directory: Path, dtype: str, like: str | os.PathLike | None) -> None:
    """What a directory has besides weights, and its name."""
    _write_json(temporary / "config.json", _config_json(config, dtype, like))
    _carry_over(like, temporary)
    if not (temporary / "generation_config.json").exists():
        _write_generation_config(config, temporary)
    _take_name(temporary, directory)


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


def _write_generation_config(config: Qwen3Config, directory: Path) -> None:
    """Names both end ids: those of the tokenizer beside it, or the released ones where the config has them. A server
    that knew only the config's one would let a generation run past the other."""
    tokenizer, ids = directory / "tokenizer.json", {}
    if tokenizer.is_file():
        try:
            added = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens", [])
            ids = {token["content"]: token["id"] for token in added}
        except (ValueError, AttributeError, KeyError, TypeError):
            ids = {}  # a tokenizer of another make: it is carried over, not understood
    ends = [ids[name] for name in _END_TOKENS if name in ids]
    if len(ends) < len(_END_TOKENS) and (config.eos_token_id, config.bos_token_id) == _RELEASED_END_IDS:
        ends = list(_RELEASED_END_IDS)
    if len(ends) == len(_END_TOKENS):
        values = {"bos_token_id": ends[1], "eos_token_id": ends, "pad_token_id": ends[1]}
        _write_json(directory / "generation_config.json", values)


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


def agree(directory: Path, problems: list[str]) -> None:
    """Raises on every process when one has problems: none is left waiting for the others."""
    bad = bool(problems)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        bad = bool(multihost_utils.process_allgather(np.int32(bad)).any())
    if bad:
        raise CheckpointError(directory, problems or ["another process cannot use it; its message says why"])


def tell(value: int) -> int:
    """The value of process 0, on every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
