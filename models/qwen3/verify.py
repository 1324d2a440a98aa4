"""Proof that a saved directory is the model it was saved from, and that transformers makes the same of it."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3
from models.qwen3.saving import SAVABLE, agree, all_tensors, fetch, tell
from models.qwen3.weights import CheckpointError, load_hf

_TOLERANCE = 1e-3  # of the largest logit; float32 on both sides leaves about 1e-5


def verify_hf(model: Qwen3, directory: str | os.PathLike) -> int:
    """Reads every tensor of a saved `directory` back and compares it, bit for bit, with `model` in the stored type.

    On several hosts every process must call this; process 0 reads.

    Returns:
        the number of tensors compared.

    Raises:
        CheckpointError: lists every tensor that is missing, superfluous or different.
    """
    directory, problems, count = Path(directory), [], 0
    reader = jax.process_index() == 0
    files: dict[str, Any] = {}
    if reader:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="numpy") as handle:
                files |= {name: (path, handle.get_slice(name).get_dtype()) for name in handle.keys()}
    # The type of one tensor is that of all; every process gathers in it.
    stored = [name for name, spelt in SAVABLE.items() if {kind for _, kind in files.values()} == {spelt}]
    if reader and not stored:
        problems.append(f"no .safetensors of one type out of {', '.join(SAVABLE)} are there")
    agree(directory, problems)
    dtype = list(SAVABLE)[tell(list(SAVABLE).index(stored[0]) if reader else 0)]
    for name, _, path, layer in all_tensors(model):
        value = fetch(model, path, layer, dtype, reader)
        count += 1
        if not reader:
            continue
        if name not in files:
            problems.append(f"{name}: missing")
            continue
        with safe_open(files.pop(name)[0], framework="numpy") as handle:
            found = handle.get_tensor(name)
        if found.shape != value.shape or found.tobytes() != value.tobytes():
            problems.append(f"{name}: not what was saved")
    problems += [f"{name}: not a tensor of this model" for name in sorted(files)]
    agree(directory, problems)
    return count


def compare_logits(directory: str | os.PathLike, length: int = 64) -> float | None:
    """Our logits of `length` random tokens against those of transformers, both reading `directory`, in float32.

    Returns:
        the largest difference, as a share of the largest logit; None where transformers or torch is not installed.

    Raises:
        CheckpointError: they differ by more than arithmetic explains.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    vocab_size = Qwen3Config.from_hf(directory).vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, (1, length), np.int32)
    ours = _logits(directory, tokens)  # one of the two models at a time
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        theirs = reference.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not difference < _TOLERANCE:
        raise CheckpointError(
            directory, [f"transformers' logits differ from ours by {difference:.1e} of the largest; do not serve it"]
        )
    return difference


def _logits(directory: str | os.PathLike, tokens: np.ndarray) -> np.ndarray:
    # On the CPU whatever else there is: products of float32 are computed in less elsewhere.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        graphdef, state = nnx.split(load_hf(directory, dtype=jnp.float32, attention="xla"))

        def run(state: nnx.State, tokens: jax.Array) -> jax.Array:
            model = nnx.merge(graphdef, state)
            return model.logits(model(tokens)[0])

        return np.asarray(jax.jit(run)(state, tokens))
