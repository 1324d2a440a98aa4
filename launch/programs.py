"""The programs of a run, lowered for a TPU topology without one, and without a single weight.

`lower` yields the functions that a run on this mesh would compile, from the same code: the update of
`envace_jax.train` (with the pass of the reference policy where there is one), and prefill and decode of
`envace_jax.sampling`, each with the shapes and shardings the run would give it. Arguments are `ShapeDtypeStruct`s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from envace_jax.chat import ControlIds
from envace_jax.config import Config, MeshConfig
from envace_jax.errors import ConfigError
from envace_jax.grpo import TokenBatch
from envace_jax.sampling import Engine, SamplingParams
from envace_jax.sampling.fused import FusedLoop, FusedState
from envace_jax.sampling.grammar import Budgets, Forced, Grammar
from envace_jax.sampling.params import SlotSampling
from envace_jax.sampling.slots import Slots
from envace_jax.train.optim import make_optimizer, named
from envace_jax.train.state import abstract_state, data_shards, make_logps, make_update, state_shardings
from launch.topology import Topology
from models.qwen3 import KVCache, Qwen3, Qwen3Config
from models.qwen3.sharding import LOGICAL_TO_MESH, PARAM_AXES, arrange, batch_axes, cache_spec

TOKENIZER_IDS = 151_669  # that Qwen3's tokenizer has, of the 151,936 the released models have rows for
_REPLICATED = P()
# Qwen3's control ids, and forced tokens as many as its templates have; no shape depends on their values.
_CONTROL = ControlIds(
    think_open=151_667,
    think_close=151_668,
    im_start=151_644,
    im_end=151_645,
    endoftext=151_643,
    call_open=151_657,
    call_close=151_658,
    response_open=151_665,
    response_close=151_666,
)
_FORCED = Forced(
    first=(198, 151_644, 872, 198, 151_665, 198), between=(198, 151_665, 198), done=(151_645, 198, 151_644)
)


class MissingCompiler(ConfigError):
    """libtpu is not installed."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What a configuration and a mesh come to."""

    episodes: int  # of a step
    slots: int  # rows of the KV cache
    row_length: int  # tokens of a training row
    rows: int  # of one micro-batch, over all chips
    micro_batches: int
    max_length: int  # tokens of an episode, and of a row of the cache


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run on a topology: everything that the programs are made from."""

    config: Config
    model: Qwen3Config
    topology: Topology
    mesh: Mesh | None
    shapes: Shapes
    graphdef: nnx.GraphDef
    params: nnx.State  # abstract, in the trainer's type
    state: Any  # abstract TrainState

    @property
    def reference(self) -> bool:
        """Whether a frozen copy of the policy is kept for the KL term."""
        return self.config.grpo.kl != "none"

    def array(self, shape: tuple[int, ...], dtype=jnp.int32, spec: P = _REPLICATED) -> jax.ShapeDtypeStruct:
        """An abstract array on the plan's chips; by default integers, the same on each."""
        place = place_on(self.topology) if self.mesh is None else NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def make_plan(config: Config, topology: Topology) -> Plan:
    """The run of `config` on `topology`.

    Raises:
        ConfigError: the model is unknown, or the mesh fits neither the topology nor the model.
        MissingCompiler: libtpu is not there.
    """
    model_config = read_model(config.model)
    mesh = topology_mesh(config.mesh, topology)
    train = config.train
    settings = {
        "param_dtype": jnp.dtype(train.param_dtype),
        "dtype": _arithmetic(config),
        "remat": train.remat_policy,
        "attention": "splash",
        "attention_block": train.attention_block,
        "mesh": mesh,
    }
    try:
        model = nnx.eval_shape(lambda: Qwen3(model_config, rngs=nnx.Rngs(0), **settings))
    except ValueError as error:  # a mesh that does not divide the model
        raise ConfigError(str(error)) from error
    graphdef, params = nnx.split(model)
    state = abstract_state(params, make_optimizer(train), mesh)
    if mesh is None:
        place = place_on(topology)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)
    return Plan(config, model_config, topology, mesh, make_shapes(config, mesh), graphdef, state.params, state)


def sampling_plan(plan: Plan) -> Plan:
    """The plan of one host, which samples its share of the episodes by itself: from a copy of the parameters over tp on
    its own chips, matrices in the type of the arithmetic (`envace_jax.train.local`). Of a single host, `plan` itself.

    Raises ConfigError when a tensor-parallel group spans hosts.
    """
    host, (_, _, tp) = plan.topology.host, mesh_sizes(plan.config.mesh, plan.topology)
    if plan.topology.hosts == 1:
        return plan
    if host.chips % tp:
        raise ConfigError(f"mesh.tp={tp} spans hosts of {host.chips} chips each, and each samples by itself: lower it")
    config = plan.config
    rollout = dataclasses.replace(config.rollout, slots=-(-plan.shapes.slots // plan.topology.hosts))
    mesh = dataclasses.replace(config.mesh, data=host.chips // tp, fsdp=1, tp=tp)
    local = make_plan(dataclasses.replace(config, rollout=rollout, mesh=mesh), host)
    return dataclasses.replace(local, params=_narrowed(local.params, _arithmetic(config)))


def make_shapes(config: Config, mesh: Mesh | None) -> Shapes:
    """The static shapes of a run, as `envace_jax.train` and `envace_jax.sampling` choose them."""
    rollout, train = config.rollout, config.train
    episodes = rollout.tasks_per_step * rollout.group_size
    rows = train.micro_batch * data_shards(mesh)
    return Shapes(
        episodes=episodes,
        slots=rollout.slots or episodes,
        row_length=train.row_length or rollout.max_length,
        rows=rows,
        micro_batches=-(-episodes // rows),
        max_length=rollout.max_length,
    )


def lower(plan: Plan) -> Iterator[tuple[str, Callable[[], jax.stages.Lowered]]]:
    """(name, how to lower it) of each program: `train`, `reference` where there is one, `prefill`, `decode`."""

    def on_tpu(make: Callable[[Plan], jax.stages.Lowered]) -> Callable[[], jax.stages.Lowered]:
        def run() -> jax.stages.Lowered:
            with as_on_tpu():
                return make(plan)

        return run

    yield "train", on_tpu(_lower_train)
    if plan.reference:
        yield "reference", on_tpu(_lower_reference)
    yield "prefill", on_tpu(lambda plan: _lower_prefill(sampling_plan(plan)))
    yield "decode", on_tpu(lambda plan: _lower_decode(sampling_plan(plan)))


def read_model(name: str) -> Qwen3Config:
    """The architecture of an HF directory (only its config.json is read) or a preset.

    Raises ConfigError when it is neither.
    """
    path = Path(name)
    try:
        return Qwen3Config.from_hf(path) if (path / "config.json").is_file() else Qwen3Config.preset(path.name)
    except ValueError as error:
        raise ConfigError(f"model={name!r}: no directory with a config.json, and as a preset: {error}") from error


def topology_mesh(config: MeshConfig, topology: Topology) -> Mesh | None:
    """The mesh of the configuration over the chips of `topology`; None on one chip. One size may be -1, the rest.

    Raises ConfigError when the sizes do not multiply to the number of chips.
    """
    sizes = mesh_sizes(config, topology)
    if topology.chips == 1:
        return None
    return arrange(sizes, devices(topology))


def mesh_sizes(config: MeshConfig, topology: Topology) -> tuple[int, int, int]:
    """(data, fsdp, tp) with -1 replaced. Raises ConfigError when they do not multiply to the number of chips."""
    sizes = [config.data, config.fsdp, config.tp]
    fixed = math.prod(size for size in sizes if size != -1)
    sizes = [topology.chips // fixed if size == -1 else size for size in sizes]
    if math.prod(sizes) != topology.chips:
        raise ConfigError(
            f"mesh data={config.data}, fsdp={config.fsdp}, tp={config.tp} does not make the {topology.chips} chips of "
            f"{topology.name}: set one of mesh.data, mesh.fsdp, mesh.tp to -1 to use what the others leave"
        )
    return tuple(sizes)


def devices(topology: Topology) -> list[jax.Device]:
    """The chips of a slice, as the compiler sees them.

    Raises:
        MissingCompiler: libtpu is not installed.
        ConfigError: libtpu refuses the topology.
    """
    # Without these, libtpu asks a metadata server that is not there.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", topology.gcloud)
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Its lock is for processes that share real chips; compiling shares none.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    if find_compiler() is None:
        raise MissingCompiler("compiling for a TPU needs libtpu: pip install -e '.[tpu-compile]' (Linux only)")
    # Slices smaller than a host of four chips have hosts of their own size.
    host = (*(min(size, 2) for size in topology.shape[:2]), 1)
    try:
        return list(topologies.get_topology_desc(topology.name, platform="tpu", chips_per_host_bounds=host).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"topology {topology.name}: the TPU compiler refuses it ({_first_line(error)})") from error


def place_on(topology: Topology) -> SingleDeviceSharding:
    """Of arrays on a slice of one chip."""
    return SingleDeviceSharding(devices(topology)[0])


def find_compiler() -> str | None:
    """Where libtpu is installed; None where it is not."""
    import importlib.util

    spec = importlib.util.find_spec("libtpu")
    return None if spec is None else spec.origin


@contextlib.contextmanager
def as_on_tpu() -> Iterator[None]:
    """Tracing here takes the branches that a process on a TPU takes: they ask for the process's platform."""
    with mock.patch.object(jax, "default_backend", lambda: "tpu"):
        yield


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _lower_train(plan: Plan) -> jax.stages.Lowered:
    config, shardings = plan.config, state_shardings(plan.state, plan.mesh)
    update = make_update(
        plan.graphdef,
        make_optimizer(config.train),
        config.grpo,
        temperature=config.rollout.temperature,
        vocab_size=_ids(plan),
        old_logps=config.train.old_logps,
        updates_per_batch=config.train.updates_per_batch,
        shardings=shardings,
    )
    out = None if shardings is None else (shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out).lower(plan.state, _batch(plan), plan.array(()))


def _lower_reference(plan: Plan) -> jax.stages.Lowered:
    score = make_logps(plan.graphdef, temperature=plan.config.rollout.temperature, vocab_size=_ids(plan))
    batch = dataclasses.replace(_batch(plan), ref_logps=None)
    return jax.jit(score).lower(plan.params, batch, plan.array(()))


def _lower_prefill(plan: Plan) -> jax.stages.Lowered:
    engine = _engine(plan)
    size = engine.shapes.pieces.sizes[-1]
    rows = engine.slots if engine.whole else min(engine.slots, max(1, engine.shapes.pieces.most_tokens // size))
    return engine._append.lower(
        graph=plan.graphdef,
        params=(plan.params, None),
        state=_slots(plan, engine),
        tokens=plan.array((rows, size)),
        rows=None if engine.whole else plan.array((rows,)),
        starts=plan.array((rows,)),
        counts=plan.array((rows,)),
        window=engine.shapes.windows[-1],
    )


def _lower_decode(plan: Plan) -> jax.stages.Lowered:
    engine, rollout = _engine(plan), plan.config.rollout
    vector = plan.array((engine.slots,))
    real = plan.array((engine.slots,), jnp.float32)
    sampling = SlotSampling(real, real, vector, plan.array((engine.slots, 8)))
    common = {
        "graph": plan.graphdef,
        "params": (plan.params, None),
        "rows": None,
        "sampling": sampling,
        "steps": plan.array(()),
        "enough": plan.array(()),
        "window": engine.shapes.windows[-1],
    }
    slots = _slots(plan, engine)
    if rollout.engine == "hosted" or plan.config.world.form != "inline":
        return engine._decode.lower(state=slots, budgets=vector, min_tokens=vector, **common)
    budgets = Budgets(rollout.turn_tokens, rollout.response_tokens, rollout.max_turns, rollout.max_length)
    grammar = Grammar(_CONTROL, _FORCED, budgets)
    loop = FusedLoop(engine, grammar, SamplingParams(), look_every=rollout.look_every)
    machine = jax.tree.map(lambda x: plan.array((engine.slots,), jnp.asarray(x).dtype), grammar.start())
    state = FusedState(slots, machine, vector, vector, vector, vector)
    return loop._run.lower(state=state, **common)


def _engine(plan: Plan) -> Engine:
    # Its compiled functions are private, and are what is to be compiled here.
    shapes = plan.shapes
    return Engine(plan.model, slots=shapes.slots, max_length=shapes.max_length, vocab_size=_ids(plan), mesh=plan.mesh)


def copied_rows(plan: Plan) -> int:
    """How many rows of the cache a decoding loop over fewer than all slots copies, at most."""
    with as_on_tpu():
        return max(_engine(plan).shapes.decoding_rows()[1:], default=0)


def _slots(plan: Plan, engine: Engine) -> Slots:
    config, mesh, count = plan.model, plan.mesh, engine.slots
    shape = (config.num_hidden_layers, count, config.num_key_value_heads, engine.max_length, config.head_dim)
    rows = None if mesh is None else batch_axes(mesh, count)
    cache = plan.array(shape, engine.dtype, P() if mesh is None else cache_spec(mesh, count))
    return Slots(
        cache=KVCache(cache, cache),
        hidden=plan.array((count, config.hidden_size), jnp.float32, P(rows, None)),
        lengths=plan.array((count,)),
        keys=plan.array((count, 2), jnp.uint32),
    )


def _batch(plan: Plan) -> TokenBatch:
    shapes = plan.shapes
    shape = (shapes.micro_batches, shapes.rows, shapes.row_length)
    spec = P(None, LOGICAL_TO_MESH["batch"])
    integers = plan.array(shape, jnp.int32, spec)
    reals = plan.array(shape, jnp.float32, spec)
    return TokenBatch(
        tokens=integers,
        positions=integers,
        segments=integers,
        roles=integers,
        generations=integers,
        advantages=reals,
        behavior_logps=reals,
        ref_logps=reals if plan.reference else None,
    )


def _narrowed(params: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """Abstract parameters with their matrices in `dtype`, where that is the smaller."""

    def narrow(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        matrix = len(PARAM_AXES[name]) - PARAM_AXES[name].count("layers") > 1
        smaller = dtype if matrix and dtype.itemsize < leaf.dtype.itemsize else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, smaller, sharding=leaf.sharding)

    return jax.tree.unflatten(jax.tree.structure(params), [narrow(*item) for item in named(params).items()])


def _arithmetic(config: Config) -> jnp.dtype:
    return jnp.dtype("bfloat16" if config.train.compute_dtype == "auto" else config.train.compute_dtype)


def _ids(plan: Plan) -> int:
    return min(TOKENIZER_IDS, plan.model.vocab_size)
