"""On eight simulated devices the model is laid out as the table says and computes the same."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.qwen3 import Qwen3, Qwen3Config, init_cache, load_hf, sharding

EXPECTED = {
    "embed_tokens": P("tp", "fsdp"),
    "lm_head": P("tp", "fsdp"),
    "norm": P(None),
    "layers.q_proj": P(None, "tp", "fsdp"),
    "layers.o_proj": P(None, "fsdp", "tp"),
    "layers.down_proj": P(None, "fsdp", "tp"),
    "layers.gate_proj": P(None, "tp", "fsdp"),
    "layers.q_norm": P(None, None),
    "layers.input_layernorm": P(None, None),
}


def by_name(state):
    return {".".join(path): value for path, value in nnx.to_flat_state(state)}


@pytest.fixture(scope="module", params=[(2, 2, 2), (1, 4, 2), (8, 1, 1)], ids=str)
def mesh(request):
    return sharding.make_mesh(*request.param)


def test_sharded_checkpoint_lies_as_the_table_says_and_gives_the_same_logits(untied, mesh):
    model = load_hf(untied.directory, mesh)
    state = by_name(nnx.state(model))
    for name, spec in EXPECTED.items():
        value = state[name][...]
        assert value.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), value.ndim), name
        assert len(value.addressable_shards) == 8
    local = state["layers.q_proj"][...].addressable_shards[0].data.shape
    assert local == (3, 64 // mesh.shape["tp"], 48 // mesh.shape["fsdp"])

    tokens = np.tile(untied.tokens[:, :16], (4, 1))
    found = forward(model, tokens)
    np.testing.assert_allclose(found, np.tile(untied.expected["logits"][:, :16], (4, 1, 1)), atol=1e-4)
    rows = 8 // (mesh.shape["data"] * mesh.shape["fsdp"])
    assert found.addressable_shards[0].data.shape == (rows, 16, 320 // mesh.shape["tp"])


def forward(model, tokens, positions=None, cache=None):
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, positions, cache):
        model = nnx.merge(graphdef, state)
        hidden, cache = model(tokens, positions, cache=cache)
        out = model.logits(hidden)
        return out if cache is None else (out, cache)

    return run(state, jnp.asarray(tokens), positions, cache)


def test_sharded_cache_is_written_where_it_lies(untied):
    mesh = sharding.make_mesh(2, 2, 2)
    model = load_hf(untied.directory, mesh)
    cache = init_cache(model.config, 4, 16, jnp.float32, mesh)
    assert cache.k.sharding.spec == P(None, ("data", "fsdp"), "tp", None, None)
    tokens = np.tile(untied.tokens[:, :16], (2, 1))
    positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (4, 16))
    found, cache = forward(model, tokens, positions, cache)
    np.testing.assert_allclose(found, np.tile(untied.expected["logits"][:, :16], (2, 1, 1)), atol=1e-4)
    assert cache.k.addressable_shards[0].data.shape == (3, 1, 1, 16, 16)


def test_writing_the_cache_moves_nothing_between_devices():
    mesh = sharding.make_mesh(4, 1, 2)
    config = Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    cache = init_cache(config, 8, 16, jnp.float32, mesh)
    place = jax.sharding.NamedSharding(mesh, P("data", None, "tp", None))
    values = jax.device_put(np.ones((8, 3, 2, 8), np.float32), place)
    positions = jax.device_put(
        np.tile(np.arange(3, dtype=np.int32), (8, 1)), jax.sharding.NamedSharding(mesh, P("data"))
    )
    program = jax.jit(lambda c, p, v: c.write(1, p, v, v, mesh)).lower(cache, positions, values).compile().as_text()
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "collective") if word in program]


def test_batches_too_small_for_the_mesh_are_not_split():
    mesh = sharding.make_mesh(2, 2, 2)
    assert sharding.batch_axes(mesh, 4) == ("data", "fsdp")
    assert sharding.batch_axes(mesh, 2) == ("data",)
    assert sharding.batch_axes(mesh, 1) is None
    assert sharding.batch_axes(sharding.make_mesh(1, 4, 2), 2) == ("data",)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What jax asks of a TPU when it arranges a mesh."""

    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0


@pytest.mark.parametrize("shape, side", [((1, 4, 4), 4), ((1, 16, 4), 8), ((2, 8, 4), 8)])
def test_a_mesh_over_a_torus_keeps_a_group_of_tp_together(shape, side):
    """Also where no axis of the torus is as long as one of the mesh."""
    chips = [Chip((x, y, 0)) for y in range(side) for x in range(side)]
    mesh = sharding.arrange(shape, chips)
    assert mesh.devices.shape == shape and set(mesh.devices.flat) == set(chips)
    for group in mesh.devices.reshape(-1, shape[-1]):
        sides = [1 + np.ptp([chip.coords[axis] for chip in group]) for axis in range(2)]
        assert math.prod(sides) == len(group)  # a block without others in it


def test_one_mesh_size_may_be_left_open():
    assert dict(sharding.make_mesh(data=-1, tp=2).shape) == {"data": 4, "fsdp": 1, "tp": 2}
    assert sharding.make_mesh(fsdp=-1).axis_names == ("data", "fsdp", "tp")


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 8, 1), (2, 2, 1)])
def test_mesh_that_does_not_fit_the_devices_is_refused(sizes):
    with pytest.raises(ValueError, match="mesh"):
        sharding.make_mesh(*sizes)


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_would():
    config = Qwen3Config.preset("qwen3-14b")  # 40 heads, 8 of keys and values
    mesh = sharding.make_mesh(1, 1, 5, devices=jax.devices()[:5])
    with pytest.raises(ValueError, match=r"tp=5 .*num_key_value_heads=8.*use one of \[1, 2, 4, 8\]"):
        nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0), mesh=mesh))
    mesh = sharding.make_mesh(1, 7, 1, devices=jax.devices()[:7])
    with pytest.raises(ValueError, match="fsdp=7 does not divide hidden_size=5120"):
        sharding.check_divisible(config, mesh)


def test_every_parameter_of_a_preset_has_a_spec_that_divides_it():
    mesh = sharding.make_mesh(1, 2, 4)
    state = nnx.state(nnx.eval_shape(lambda: Qwen3(Qwen3Config.preset("qwen3-32b"), rngs=nnx.Rngs(0))))
    local = jax.tree.map(lambda x, place: place.shard_shape(x.shape), state, sharding.state_shardings(state, mesh))
    assert local["layers"]["k_proj"].get_value() == (64, 256, 2560)
    assert local["embed_tokens"].get_value() == (151_936 // 4, 2560)
    sizes = jax.tree.map(
        lambda x, place: x.size // math.prod(place.shard_shape(x.shape)), state, sharding.state_shardings(state, mesh)
    )
    assert set(jax.tree.leaves(sizes)) == {1, 8}  # norms whole, matrices in eighths


def test_model_moved_to_a_mesh_equals_one_loaded_there(untied):
    mesh = sharding.make_mesh(2, 2, 2)
    moved, loaded = sharding.shard_model(untied.model, mesh), load_hf(untied.directory, mesh)
    assert untied.model.mesh is None and moved.mesh == mesh
    assert nnx.split(moved)[0] == nnx.split(loaded)[0]
    places = [jax.tree.map(lambda x: x.sharding, nnx.state(model)) for model in (moved, loaded)]
    assert places[0] == places[1]
