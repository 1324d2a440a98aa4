"""The training state and its update.

A batch arrives as [N, M, T]: N micro-batches of M rows. One jitted call

1. runs the first `used` micro-batches through loss and gradient, adding numerators, denominators and metric sums, so
   that the result is the whole batch's to float error, whatever the micro-batching,
2. divides the summed gradient by the summed denominator,
3. lets the optimizer move the parameters, unless a gradient is not finite: then nothing moves and the step is counted.

`used` is a traced number: how full a batch is changes neither the shapes nor the number of compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax.grpo import CONTEXT, GRPOConfig, TokenBatch, finish_metrics, grpo_loss_sums, safe_divide, trained_logps
from envace_jax.train.optim import named
from models.qwen3 import sharding

Batch = TypeVar("Batch")
Tree = TypeVar("Tree")
# loss_sums(params, micro-batch) -> numerator, denominator, metrics as (sum, weight) pairs or totals; all of them add.
LossSums = Callable[[nnx.State, Any], tuple[jax.Array, jax.Array, dict[str, Any]]]
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds and an update changes."""

    params: nnx.State  # of the model, float32 or bfloat16
    opt_state: Any
    step: jax.Array  # int32, batches trained on so far; also the position in the data
    skipped: jax.Array  # int32, updates left out because a gradient was not finite


def create_state(params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh | None = None) -> TrainState:
    """A state at step 0. It takes `params` over, laid out on `mesh`: the first update donates them."""
    places = state_shardings(abstract_state(params, optimizer), mesh)
    if places is not None:
        params = jax.device_put(params, places.params)
    opt_state = jax.jit(optimizer.init, out_shardings=None if places is None else places.opt_state)(params)
    # Two arrays: a donated state must not hold one buffer twice.
    step, skipped = (jnp.zeros((), jnp.int32, device=None if places is None else places.step) for _ in range(2))
    return TrainState(params, opt_state, step, skipped)


def state_shardings(state: TrainState, mesh: Mesh | None) -> TrainState | None:
    """The NamedSharding of every array of `state` (real or abstract): moments lie as their parameters do."""
    if mesh is None:
        return None
    shapes = {name: leaf.shape for name, leaf in named(state.params).items()}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        joined = "." + ".".join(str(key.key) for key in path if hasattr(key, "key"))
        for name, shape in shapes.items():
            if joined.endswith("." + name) and leaf.shape == shape:
                return NamedSharding(mesh, sharding.spec(sharding.PARAM_AXES[name]))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(place, state)


def abstract_state(params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh | None = None) -> TrainState:
    """Shapes, types and places of a state, for restoring a checkpoint into; `params` may be abstract."""
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    shape = TrainState(jax.eval_shape(lambda x: x, params), jax.eval_shape(optimizer.init, params), zero, zero)
    places = state_shardings(shape, mesh)
    if places is None:
        return shape
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape, places)


def data_shards(mesh: Mesh | None) -> int:
    """Over how many devices the rows of a batch are spread."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in sharding.LOGICAL_TO_MESH["batch"])


def own_shards(mesh: Mesh | None) -> int:
    """How many of the data shards are this process's; all processes have as many."""
    if mesh is None:
        return 1
    return data_shards(mesh) // len({device.process_index for device in mesh.devices.flat})


def fit_batch(rows: int, trained: np.ndarray, micro_batch: int, shards: int, capacity: int) -> tuple[int, int]:
    """How many micro-batches of `micro_batch` rows on each of `shards` are used for `rows` rows, and their number N."""
    size = micro_batch * shards
    used = 0 if not trained.any() else int(np.flatnonzero(trained)[-1]) // size + 1
    while capacity * size < rows:
        capacity *= 2
    return used, capacity


def place_batch(
    batch: Batch, micro_batch: int, mesh: Mesh | None = None, *, trained: np.ndarray | None = None, capacity: int = 1
) -> tuple[Batch, int]:
    """A host batch [B, T] as micro-batches [N, M, T] on the devices, M = `micro_batch` rows on every data shard.

    N is `capacity`, doubled until the rows fit; rows of zeros (no segment, no role) fill up. On several processes each
    brings its own rows, for its own shards; they must have agreed on an N that fits all (see `fit_batch`).

    Args:
        batch: any tree of [B, T] arrays.
        micro_batch: rows per data shard in one forward and backward pass.
        mesh: where to; None is the default device.
        trained: bool[B], rows that have something to learn; default: all. Micro-batches behind the last one of them
            are not used.
        capacity: the smallest N.

    Returns:
        the batch, and how many of its micro-batches are used.
    """
    count = len(jax.tree.leaves(batch)[0])
    trained = np.ones(count, bool) if trained is None else np.asarray(trained)
    used, capacity = fit_batch(count, trained, micro_batch, own_shards(mesh), capacity)
    rows = micro_batch * own_shards(mesh)

    def place(x: Any) -> jax.Array:
        x = np.asarray(x)
        padded = np.zeros((capacity * rows, *x.shape[1:]), x.dtype)
        padded[:count] = x
        padded = padded.reshape(capacity, rows, *x.shape[1:])
        if mesh is None:
            return jax.device_put(padded)
        spec = NamedSharding(mesh, P(None, sharding.LOGICAL_TO_MESH["batch"]))
        whole = (capacity, micro_batch * data_shards(mesh), *x.shape[1:])
        return jax.make_array_from_process_local_data(spec, padded, whole)

    return jax.tree.map(place, batch), used


def make_step(
    loss_sums: LossSums, optimizer: optax.GradientTransformation, shardings: TrainState | None = None
) -> Callable[..., tuple[TrainState, Metrics]]:
    """One optimizer step: step(state, batch [N, M, T], used, advance=1) -> state, metrics. The state is donated.

    `advance` is what is added to `state.step`. Metrics are scalars on the device: those of `loss_sums`, and
    `grad/norm` (before clipping), `train/skipped`.
    """

    def step(state: TrainState, batch: Any, used: jax.Array, advance: jax.Array) -> tuple[TrainState, Metrics]:
        def sums(micro: Any) -> tuple[Any, jax.Array, dict[str, Any]]:
            def loss(params: nnx.State) -> tuple[jax.Array, Any]:
                numerator, denominator, metrics = loss_sums(params, micro)
                return numerator, (denominator, metrics)

            gradient, (denominator, metrics) = jax.grad(loss, has_aux=True)(state.params)
            gradient = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
            if shardings is not None:
                gradient = jax.lax.with_sharding_constraint(gradient, shardings.params)
            return gradient, denominator, metrics

        def add(i: jax.Array, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, sums(_at(batch, i)))

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, _at(batch, 0)))
        if len(jax.tree.leaves(batch)[0]) == 1:  # nothing to add up
            gradient, denominator, metrics = jax.lax.cond(used > 0, lambda: sums(_at(batch, 0)), lambda: zeros)
        else:
            gradient, denominator, metrics = jax.lax.fori_loop(0, used, add, zeros)
        gradient = jax.tree.map(lambda g: safe_divide(g, denominator), gradient)
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(norm)

        # Nothing to learn is no reason to drift along the old moments.
        moves = finite & (used > 0)

        def move() -> tuple[nnx.State, Any]:
            updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
            return optax.apply_updates(state.params, updates), opt_state

        old = state.params, state.opt_state
        if jax.default_backend() == "cpu":
            # A branch changes the moments in place. Selected, they would be copied first, and written in a pass of
            # their own: 4 % of a step on a CPU. On a TPU a selection costs nothing.
            params, opt_state = jax.lax.cond(moves, move, lambda: old)
        else:
            params, opt_state = _where(moves, move(), old)
        skipped = state.skipped + jnp.where(finite, 0, 1)
        state = TrainState(params, opt_state, state.step + advance, skipped)
        return state, {**finish_metrics(metrics), "grad/norm": norm, "train/skipped": skipped}

    jitted = jax.jit(step, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))

    def call(state: TrainState, batch: Any, used: int, advance: int = 1) -> tuple[TrainState, Metrics]:
        return jitted(state, batch, _count(used), np.int32(advance))

    return call


def make_logps(
    graphdef: nnx.GraphDef, *, temperature: float = 1.0, vocab_size: int | None = None
) -> Callable[[nnx.State, TokenBatch, int], jax.Array]:
    """logps(params, batch [N, M, T], used) -> float32 [N, M, T]: those of trained tokens in the micro-batches that are
    used, 0 elsewhere."""

    @jax.jit
    def logps(params: nnx.State, batch: TokenBatch, used: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)

        def fill(i: jax.Array, out: jax.Array) -> jax.Array:
            scored = trained_logps(model, _at(batch, i), temperature=temperature, vocab_size=vocab_size)
            return out.at[i].set(scored)

        return jax.lax.fori_loop(0, used, fill, jnp.zeros(batch.tokens.shape, jnp.float32))

    return lambda params, batch, used: logps(params, batch, _count(used))


def grpo_sums(
    graphdef: nnx.GraphDef,
    config: GRPOConfig,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    entropy: bool = True,
) -> LossSums:
    """The role-wise GRPO loss of a micro-batch as a function of the parameters.

    `entropy` adds the entropy of the policy to the metrics; the loss has it where `config.entropy_coef` asks.
    """
    entropy = entropy or config.entropy_coef > 0

    def sums(params: nnx.State, batch: TokenBatch) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        model = nnx.merge(graphdef, params)
        scored = trained_logps(model, batch, temperature=temperature, vocab_size=vocab_size, with_entropy=entropy)
        logps, entropies = scored if entropy else (scored, None)
        numerator, denominator, metrics = grpo_loss_sums(logps, batch, config, entropies)
        if batch.behavior_logps is not None:
            # Against this forward pass, not against `old_logps`, which may be the sampler's own.
            mask = batch.roles != CONTEXT
            gap = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logps) - batch.behavior_logps), 0.0)
            metrics["logps/sampler_trainer_diff"] = (jnp.sum(gap), jnp.sum(mask, dtype=jnp.float32))
        return numerator, denominator, metrics

    return sums


def make_update(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    grpo_config: GRPOConfig,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    old_logps: str = "current",
    updates_per_batch: int = 1,
    entropy: bool = True,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, TokenBatch, int], tuple[TrainState, Metrics]]:
    """Learning from one batch: update(state, batch [N, M, T], used) -> state, metrics. The state is donated.

    Args:
        graphdef: of the model, from `nnx.split`.
        optimizer: from `make_optimizer`.
        grpo_config: the objective.
        temperature, vocab_size: of the rollout; log-probabilities are those of the sampler's distribution.
        old_logps: "current" (each update's own forward pass), "recompute" (a forward pass before the first update),
            or "sampler" (`behavior_logps`).
        updates_per_batch: optimizer steps, each on the whole batch.
        entropy: whether to measure the policy's entropy.
        shardings: of the state, on a mesh; see `state_shardings`.

    Metrics are those of the first update, where the policy still is the one that sampled, but for `train/skipped`.
    """
    if old_logps not in ("current", "recompute", "sampler"):
        raise ValueError(f"old_logps = {old_logps!r}: expected current, recompute or sampler")
    sums = grpo_sums(graphdef, grpo_config, temperature=temperature, vocab_size=vocab_size, entropy=entropy)
    step = make_step(sums, optimizer, shardings)
    recompute = make_logps(graphdef, temperature=temperature, vocab_size=vocab_size)

    def update(state: TrainState, batch: TokenBatch, used: int) -> tuple[TrainState, Metrics]:
        fields = vars(batch)
        if old_logps == "recompute":
            batch = TokenBatch(**{**fields, "old_logps": recompute(state.params, batch, used)})
        elif old_logps == "sampler":
            batch = TokenBatch(**{**fields, "old_logps": batch.behavior_logps})
        first: Metrics = {}
        for i in range(updates_per_batch):
            state, metrics = step(state, batch, used, advance=int(i == updates_per_batch - 1))
            first = first or metrics
        return state, {**first, "train/skipped": metrics["train/skipped"]}

    return update


def _where(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)


def _count(used: int | jax.Array) -> np.int32 | jax.Array:
    # A traced number goes through, so that the whole update can be lowered ahead of time.
    return used if isinstance(used, jax.Array) else np.int32(used)


def _at(batch: Batch, i: jax.Array | int) -> Batch:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), batch)
