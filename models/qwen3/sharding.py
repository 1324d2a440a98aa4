"""Where arrays live on a device mesh: one table from logical axes to mesh axes.

Mesh axes: `data` (rows of the batch), `fsdp` (rows of the batch and, for parameters, the hidden dimension), `tp`
(attention heads, MLP width, vocabulary). The same code runs on one device and on a pod: a mesh of 1 x 1 x 1, or no
mesh at all, constrains nothing.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.qwen3.config import Qwen3Config

MESH_AXES = ("data", "fsdp", "tp")

# The table. Everything else in this file applies it.
LOGICAL_TO_MESH = {
    "batch": ("data", "fsdp"),
    "length": None,
    "layers": None,
    "vocab": "tp",
    "embed": "fsdp",
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "mlp": "tp",
    "hidden": None,  # the hidden dimension of activations; of parameters it is "embed"
}

# Logical axes of each parameter, by its path in the model.
PARAM_AXES = {
    "embed_tokens": ("vocab", "embed"),
    "lm_head": ("vocab", "embed"),
    "norm": ("hidden",),
    "layers.input_layernorm": ("layers", "hidden"),
    "layers.post_attention_layernorm": ("layers", "hidden"),
    "layers.q_norm": ("layers", "head_dim"),
    "layers.k_norm": ("layers", "head_dim"),
    "layers.q_proj": ("layers", "heads", "embed"),
    "layers.k_proj": ("layers", "kv_heads", "embed"),
    "layers.v_proj": ("layers", "kv_heads", "embed"),
    "layers.o_proj": ("layers", "embed", "heads"),
    "layers.gate_proj": ("layers", "mlp", "embed"),
    "layers.up_proj": ("layers", "mlp", "embed"),
    "layers.down_proj": ("layers", "embed", "mlp"),
}


def spec(axes: Sequence[str]) -> P:
    """The PartitionSpec of an array with these logical axes."""
    return P(*(LOGICAL_TO_MESH[axis] for axis in axes))


def make_mesh(data: int = 1, fsdp: int = 1, tp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes (data, fsdp, tp) over `devices` (default: all). One size may be -1: the rest of the devices.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tp": tp}
    free = [axis for axis, size in sizes.items() if size == -1]
    wrong = [axis for axis, size in sizes.items() if size != -1 and size < 1]
    if wrong or len(free) > 1:
        raise ValueError(f"mesh sizes {sizes}: each must be positive, and at most one may be -1 (the rest)")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"mesh data={data}, fsdp={fsdp}, tp={tp} needs {'a multiple of ' if free else ''}{fixed} devices, "
            f"there are {len(devices)}; set one of mesh.data, mesh.fsdp, mesh.tp to -1 to use the rest"
        )
    shape = tuple(sizes.values())
    if len(devices) == len(jax.devices()) and devices == list(jax.devices()):
        return arrange(shape, devices)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES)


def arrange(shape: Sequence[int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of this shape, with axes (data, fsdp, tp), over all `devices`: neighbours in the torus of a TPU slice are
    neighbours in the mesh. Where no axes of the torus make one of the mesh (a tp of 4 on 8 x 8 chips), they are cut."""
    auto = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
    try:
        return jax.make_mesh(shape, MESH_AXES, axis_types=auto, devices=devices)
    except NotImplementedError:
        cut = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(cut, MESH_AXES, axis_types=auto)


def check_divisible(config: Qwen3Config, mesh: Mesh) -> None:
    """Refuses a mesh that would split a head or leave a shard uneven.

    Raises:
        ValueError: names each count that does not divide and the sizes of that axis that would work.
    """
    counts = {
        "tp": {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        "fsdp": {"hidden_size": config.hidden_size},
    }
    problems = []
    for axis, fields in counts.items():
        size = mesh.shape[axis]
        bad = [f"{name}={count}" for name, count in fields.items() if count % size]
        if bad:
            common = math.gcd(*fields.values())
            works = [n for n in range(1, common + 1) if common % n == 0]
            problems.append(f"mesh axis {axis}={size} does not divide {', '.join(bad)}; use one of {works}")
    if problems:
        raise ValueError("; ".join(problems))


def batch_axes(mesh: Mesh, batch: int) -> tuple[str, ...] | None:
    """The mesh axes over which `batch` rows can be split evenly: the table's, fewer, or None for a batch too small."""
    for axes in (("data", "fsdp"), ("data",), ("fsdp",)):
        if batch % math.prod(mesh.shape[axis] for axis in axes) == 0:
            return axes
    return None


def activation_spec(mesh: Mesh, axes: Sequence[str], batch: int) -> P:
    """As `spec`, with the batch axis split only as far as `batch` rows allow."""
    return P(*(batch_axes(mesh, batch) if axis == "batch" else LOGICAL_TO_MESH[axis] for axis in axes))


def cache_spec(mesh: Mesh, batch: int) -> P:
    """PartitionSpec of a KV cache array [L, B, Hkv, S, Dh]."""
    return activation_spec(mesh, ("layers", "batch", "kv_heads", "length", "head_dim"), batch)


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str) -> jax.Array:
    """Tells the partitioner the layout of an activation whose axes are `axes` (batch first)."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(mesh, axes, x.shape[0])))


def state_shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """The NamedSharding of every parameter of a `Qwen3`'s state, real or abstract.

    The result has the tree structure of `state`, so that it serves `jax.tree.map`, `jax.device_put` and `jax.jit`.

    Raises:
        KeyError: a parameter that `PARAM_AXES` does not list.
    """

    def place(path: tuple[str, ...], leaf):
        sharding = NamedSharding(mesh, spec(PARAM_AXES[".".join(path)]))
        return leaf.replace(sharding) if isinstance(leaf, nnx.Variable) else sharding

    return nnx.from_flat_state([(path, place(path, leaf)) for path, leaf in nnx.to_flat_state(state)])


def shard_model(model: nnx.Module, mesh: Mesh) -> nnx.Module:
    """The same `Qwen3` with its parameters laid out on `mesh`, computing there.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    check_divisible(model.config, mesh)
    graphdef, state = nnx.split(model)
    placed = nnx.merge(graphdef, jax.device_put(state, state_shardings(state, mesh)))
    placed.mesh = mesh
    return placed
