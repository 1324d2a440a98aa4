"""How much of the chips a training step uses: model operations by formula, over what the chips could have done.

Model operations are those of the architecture: two for each weight and token, and 4 H Dh for each pair of a token and
one before it in each layer (PaLM, arXiv 2204.02311, appendix B); a backward pass is two forward passes. The head counts
for tokens that are trained, since it is left out for the others. What is computed again, padding, and a row's other
sequences do not count.
"""

from __future__ import annotations

from collections.abc import Iterable

from envace_jax.config import Config
from models.qwen3 import Qwen3Config

# Peak of dense bfloat16 arithmetic, FLOP/s, by what a kind of device is called; from the vendors' data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(kind: str) -> float | None:
    """Of a device by its `device_kind`; None where it is not known, as for CPUs."""
    return next((peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)), None)


def forward_flops(model: Qwen3Config, lengths: Iterable[int], scored: float) -> float:
    """One forward pass over sequences of these lengths, and the head for `scored` tokens of theirs."""
    attention = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    layer = model.hidden_size * (2 * attention + 2 * keys + 3 * model.intermediate_size)
    layers = sum(2 * model.num_hidden_layers * (layer * n + attention * n * n) for n in lengths)
    return float(layers + 2 * model.vocab_size * model.hidden_size * scored)


def step_flops(config: Config, model: Qwen3Config, lengths: Iterable[int], trained: float) -> float:
    """A training step on these sequences, of which so many tokens are trained: its updates, and a pass for each frozen
    or old policy that is scored."""
    scored = (config.grpo.kl != "none") + (config.train.old_logps == "recompute")
    return forward_flops(model, lengths, trained) * (3 * config.train.updates_per_batch + scored)
