"""The policy on the devices of one process, so that it samples without the others.

Training lays parameters out over all processes (data x fsdp x tp). Episodes take as long as they take, and a program
over all devices would have every process wait for the slowest at every token; so each samples with an engine of its
own, on a mesh of its own devices: tp as in training, everything else copies. The copy is made once for every update:
what fsdp has spread is gathered over the processes, in the type of the arithmetic; where there is nothing to gather or
to cast, parameters are used where they lie.

The limit: a device holds 1/tp of the parameters besides its share of the training state, and tp must not span
processes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from envace_jax.errors import ConfigError
from envace_jax.train.optim import named
from models.qwen3 import Qwen3
from models.qwen3.sharding import MESH_AXES, PARAM_AXES, spec


def local_mesh(mesh: Mesh | None, process: int) -> Mesh | None:
    """The part of `mesh` [data, fsdp, tp] that lies in `process`, as [data x fsdp, 1, tp]; None is one device.

    Raises ConfigError where a tensor-parallel group spans processes.
    """
    if mesh is None:
        return None
    tp = mesh.shape["tp"]
    groups = mesh.devices.reshape(-1, tp)
    owners = np.vectorize(lambda device: device.process_index)(groups)
    if (owners != owners[:, :1]).any():
        here = sum(device.process_index == process for device in mesh.devices.flat)
        raise ConfigError(
            f"mesh.tp={tp} spans processes of {here} devices each, and each samples by itself: "
            f"set mesh.tp to a divisor of {here} and mesh.fsdp higher"
        )
    own = groups[owners[:, 0] == process]
    if not own.size:
        raise ConfigError(f"the mesh has no device of process {process}: set one of its sizes to -1 (the rest)")
    return None if own.size == 1 else Mesh(own.reshape(len(own), 1, tp), MESH_AXES)


def make_local_copy(build: Callable[[Mesh | None], Qwen3], mesh: Mesh, process: int) -> Callable[[nnx.State], Qwen3]:
    """copy(params over `mesh`) -> the same policy on this process's devices; all processes call it together.

    `build` makes the model for a mesh, with abstract parameters. The copy shares memory with `params` where it can, so
    it ends with them, when an update donates them.
    """
    here = local_mesh(mesh, process)
    model = build(here)
    graphdef, abstract = nnx.split(model)

    def narrow(name: str, array: jax.Array) -> jax.Array:
        # The model casts its matrices to the type of its arithmetic before it uses them, its norms it does not.
        matrix = len(PARAM_AXES[name]) - PARAM_AXES[name].count("layers") > 1
        return array.astype(model.dtype) if matrix and model.dtype.itemsize < array.dtype.itemsize else array

    def place(name: str, on: Mesh | None) -> NamedSharding | SingleDeviceSharding:
        if on is None:
            (device,) = (d for d in mesh.devices.flat if d.process_index == process)
            return SingleDeviceSharding(device)
        return NamedSharding(on, P(*(axis if axis == "tp" else None for axis in spec(PARAM_AXES[name]))))

    whole = {name: place(name, mesh) for name in named(abstract)}
    spread = mesh.shape["fsdp"] > 1
    wide = any(x.dtype.itemsize > model.dtype.itemsize for x in named(abstract).values())

    def gather(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: narrow(name, array) for name, array in arrays.items()}

    if spread or wide:
        gather = jax.jit(gather, out_shardings=whole)

    def copy(params: nnx.State) -> Qwen3:
        local = {
            name: jax.make_array_from_single_device_arrays(
                array.shape, place(name, here), [shard.data for shard in array.addressable_shards]
            )
            for name, array in gather(named(params)).items()
        }
        return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(abstract), [local[n] for n in whole]))

    return copy
