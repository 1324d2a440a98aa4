"""Operations and bytes of a run by formula.

The compiler's own cost analysis counts a scanned layer once, so floating-point operations come from the architecture.
The bytes here are an estimate, good enough to choose what to compile next; what is reported comes from the compiler.
"""

from __future__ import annotations

import dataclasses

from envace_jax.config import Config
from envace_jax.grpo.logps import CHUNK
from launch.topology import Topology
from models.qwen3 import Qwen3Config

EFFICIENCY = 0.5  # of the chip's peak, that matrix products of a training step are assumed to reach


def parameter_count(model: Qwen3Config) -> int:
    """All parameters, a tied embedding once."""
    heads = 1 if model.tie_word_embeddings else 2
    norms = (2 * model.num_hidden_layers + 1) * model.hidden_size + 2 * model.num_hidden_layers * model.head_dim
    return heads * model.vocab_size * model.hidden_size + model.num_hidden_layers * _matrices(model) + norms


def forward_flops(model: Qwen3Config, rows: int, length: int) -> float:
    """One forward pass over `rows` full rows, the head included: two operations for each weight and token, and
    4 H Dh for each pair of a token and one before it in each layer (arXiv 2204.02311, appendix B)."""
    tokens = rows * length
    weights = model.num_hidden_layers * _matrices(model) + model.vocab_size * model.hidden_size
    attention = model.num_hidden_layers * 2 * length * length * model.num_attention_heads * model.head_dim
    return 2.0 * weights * tokens + 1.0 * attention * rows


def step_flops(config: Config, model: Qwen3Config, rows: int, length: int) -> tuple[float, float]:
    """(useful, executed) operations of a training step over `rows` rows, all chips together.

    Useful: forward and backward, three forward passes, for each update, and one for each frozen or old policy that is
    scored. Executed: one more for each update where layers are recomputed, and without the results that are kept.
    """
    forward = forward_flops(model, rows, length)
    scored = (config.grpo.kl != "none") + (config.train.old_logps == "recompute")
    updates = config.train.updates_per_batch
    passes = 4 if config.train.remat_policy in ("layer", "offload") else 3
    return forward * (3 * updates + scored), forward * (passes * updates + scored)


def step_seconds(executed: float, collective_bytes: float, topology: Topology) -> float:
    """The slower of arithmetic at `EFFICIENCY` of the peak and collectives at the speed of the links."""
    chip = topology.chip
    return max(executed / (topology.chips * chip.flops * EFFICIENCY), collective_bytes / chip.ici_bandwidth)


def decode_seconds(weights_bytes: float, cache_bytes: float, collective_bytes: float, topology: Topology) -> float:
    """One token for every slot, with full caches: everything is read once from the chip's memory."""
    chip = topology.chip
    return max((weights_bytes + cache_bytes) / chip.hbm_bandwidth, collective_bytes / chip.ici_bandwidth)


@dataclasses.dataclass(frozen=True)
class Guess:
    """Estimated bytes on each chip, of the update and of the rollout."""

    train: float
    rollout: float

    @property
    def peak(self) -> float:
        return max(self.train, self.rollout)


def guess_peak(config: Config, model: Qwen3Config, data: int, fsdp: int, tp: int, hosts: int = 1) -> Guess:
    """Estimated bytes on each chip for a mesh of these sizes."""
    train, rollout = config.train, config.rollout
    length = train.row_length or rollout.max_length
    count, shards = parameter_count(model), fsdp * tp
    state = count * sum(_state_bytes(config)) / shards
    gradients = 2 * 4 * count / shards
    rows = train.micro_batch
    inner = 2 * rows * length * (6 * model.hidden_size + 3 * model.intermediate_size / tp)
    saved = kept_bytes(config, model, tp)
    gathered = 2 * 2 * (_matrices(model) + 2 * model.vocab_size * model.hidden_size) / tp
    logits = 4 * 4 * rows * CHUNK * model.vocab_size / tp
    update = state + gradients + saved + inner + gathered + logits

    slots = -(-(rollout.slots or rollout.tasks_per_step * rollout.group_size) // hosts)
    spread = data * fsdp // hosts
    here = slots // spread if slots % spread == 0 else slots
    cache = here * cache_bytes(config, model) / tp
    scores = 2.5 * 4 * here * min(512 * rollout.max_length * model.num_attention_heads, 2**25) / tp
    # Several hosts sample from copies in 16 bits, spread over tp alone; one host casts its own.
    copies = 2 * count / (tp if hosts > 1 else shards)
    sampling = state + copies + 1.2 * cache + scores + gathered
    return Guess(update, sampling)


def floor_bytes(config: Config, model: Qwen3Config, topology: Topology, tp: int) -> float:
    """Bytes that lie on each chip while episodes are sampled, spread as far as they can be, before any program takes
    some of its own: parameters, optimizer, the reference policy, the cache, and the copy that each of several hosts
    samples from. A slice whose chips have less cannot do."""
    rollout, count = config.rollout, parameter_count(model)
    slots = -(-(rollout.slots or rollout.tasks_per_step * rollout.group_size) // topology.hosts)
    state = count * sum(_state_bytes(config)) / topology.chips
    copy = 2 * count / tp if topology.hosts > 1 else 0
    return state + copy + slots * cache_bytes(config, model) / topology.host.chips


def cache_bytes(config: Config, model: Qwen3Config) -> int:
    """Bytes of one row of the cache, in 16 bits."""
    return 4 * model.num_hidden_layers * config.rollout.max_length * model.num_key_value_heads * model.head_dim


def _state_bytes(config: Config) -> tuple[float, float, float]:
    """For each parameter: its own bytes, the optimizer's, the reference policy's."""
    stored = 4 if config.train.param_dtype == "float32" else 2
    moments = {"adamw": 8, "muon": 5, "adafactor": 0.1, "sgd": 0}[config.train.optimizer]
    return stored, moments, stored if config.grpo.kl != "none" else 0


def kept_bytes(config: Config, model: Qwen3Config, tp: int) -> int:
    """Bytes that the layers of one micro-batch keep on a chip for the backward pass, in 16 bits: their inputs
    (`layer`), the results of matrix products and of attention too (`dots`), those of the elementwise functions too
    (`none`), or nothing (`offload`: the inputs wait in the host's memory)."""
    train, hidden = config.train, model.hidden_size
    tokens = train.micro_batch * (train.row_length or config.rollout.max_length)
    attended = model.num_attention_heads * model.head_dim
    heads = attended + 2 * model.num_key_value_heads * model.head_dim
    mlp = 2 * model.intermediate_size
    each = {
        "offload": 0,
        "layer": hidden,
        "dots": 3 * hidden + (heads + attended + mlp) / tp,
        "none": 6 * hidden + (3 * heads + 1.5 * mlp) / tp,
    }[train.remat_policy]
    return int(2 * tokens * model.num_hidden_layers * each)


def _matrices(model: Qwen3Config) -> int:
    """Weights of one layer's matrices."""
    attention = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    return model.hidden_size * (attention + 3 * model.intermediate_size)
