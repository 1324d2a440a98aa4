"""The optimizer: schedule, clipping, decay, and moments that are float32 whatever the parameters are.

Optimizers see the parameters as a flat dictionary by name (`layers.q_proj`), so masks are rules on names and the
optimizer's state does not depend on how a library nests its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from envace_jax.config import OptimConfig, TrainConfig


def named(params: Any) -> dict[str, Any]:
    """The leaves of a parameter tree by dotted name: `embed_tokens`, `layers.q_proj`, ..."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path if hasattr(key, "key")): leaf for path, leaf in flat}


def make_schedule(config: OptimConfig) -> Callable[[jax.Array | int], jax.Array]:
    """The learning rate of update 0, 1, ...: linear warmup whose first update already moves, then the shape.

    `cosine` and `linear` reach 0 after `steps` (times `updates_per_batch`) updates.
    """
    per_step = config.updates_per_batch if isinstance(config, TrainConfig) else 1
    total, warmup = config.steps * per_step, config.warmup_steps * per_step
    shape = {
        "constant": jnp.ones_like,
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
    }[config.schedule]

    def schedule(count: jax.Array | int) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        warm = jnp.minimum(1.0, (count + 1.0) / max(warmup, 1))
        progress = jnp.clip((count - warmup) / max(total - warmup, 1), 0.0, 1.0)
        return config.learning_rate * warm * shape(progress)

    return schedule


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """The optimizer of a run, for parameters of any tree.

    Global-norm clipping comes first; weight decay is decoupled (AdamW, arXiv 1711.05101) and spares norms. `muon`
    (github.com/KellerJordan/Muon) orthogonalises the layers' matrices, each by itself, and leaves the embedding, the
    head and the norms to Adam.
    """
    schedule = make_schedule(config)
    if config.optimizer == "adamw":
        inner = optax.adamw(schedule, config.b1, config.b2, weight_decay=config.weight_decay, mask=_decayed)
    elif config.optimizer == "adafactor":
        inner = optax.adafactor(
            schedule,
            multiply_by_parameter_scale=False,
            weight_decay_rate=config.weight_decay or None,
            weight_decay_mask=_decayed,
        )
    elif config.optimizer == "muon":
        inner = optax.contrib.muon(
            schedule,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            consistent_rms=0.2,  # steps as large as Adam's (arXiv 2502.16982), so one learning rate serves both
            muon_weight_dimension_numbers=_matrices,
        )
    else:
        inner = optax.chain(optax.add_decayed_weights(config.weight_decay, _decayed), optax.sgd(schedule))
    if config.grad_clip is not None:
        inner = optax.chain(optax.clip_by_global_norm(config.grad_clip), inner)
    return _by_name_in_float32(inner)


def _decayed(params: dict[str, Any]) -> dict[str, bool]:
    return {name: "norm" not in name for name in params}


def _matrices(params: dict[str, Any]) -> dict[str, MuonDimensionNumbers | None]:
    """Stacked matrices [L, out, in]: the layer axis is a batch of matrices. By name: optax hides some values here."""
    numbers = MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    return {name: numbers if name.startswith("layers.") and "norm" not in name else None for name in params}


def _by_name_in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def flat(tree: Any) -> dict[str, jax.Array]:
        return {name: leaf.astype(jnp.float32) for name, leaf in named(tree).items()}

    def init(params: Any) -> Any:
        return inner.init(flat(params))

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = inner.update(flat(gradients), state, flat(params))
        # `named` keeps the order of the leaves; a dictionary that passed through optax may not.
        leaves = [updates[name] for name in named(params)]
        return jax.tree.unflatten(jax.tree.structure(params), leaves), state

    return optax.GradientTransformation(init, update)
