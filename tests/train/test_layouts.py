"""A training step on eight devices, in every split of them between `fsdp` and `tp`, is the step of one device, and
never gathers a parameter that the table of `models.qwen3.sharding` spreads."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from envace_jax.config import TrainConfig
from envace_jax.grpo import GRPOConfig
from envace_jax.train.optim import make_optimizer, named
from envace_jax.train.state import create_state, make_update, place_batch, state_shardings
from models.qwen3 import Qwen3, Qwen3Config
from models.qwen3.sharding import PARAM_AXES, make_mesh, spec

CONFIG = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=16,
    rope_theta=10_000.0,
    tie_word_embeddings=False,
)
# With SGD at rate 1, what the parameters lose is the gradient.
SGD = TrainConfig(optimizer="sgd", learning_rate=1.0, weight_decay=0.0, grad_clip=None)


def compiled_step(mesh, batch):
    """The update on `mesh`, compiled, and its arguments."""
    model = Qwen3(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32, remat="layer", mesh=mesh)
    graphdef, params = nnx.split(model)
    optimizer = make_optimizer(SGD)
    state = create_state(params, optimizer, mesh)
    shardings = state_shardings(state, mesh)
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    placed, used = place_batch(batch, len(batch.tokens) // shards, mesh)
    update = make_update(graphdef, optimizer, GRPOConfig(), vocab_size=500, shardings=shardings)
    out = None if shardings is None else (shardings, None)
    used = jnp.asarray(used, jnp.int32)
    return jax.jit(update, donate_argnums=0, out_shardings=out).lower(state, placed, used).compile(), (
        state,
        placed,
        used,
    )


@pytest.fixture(scope="module")
def single(make_rows):
    step, arguments = compiled_step(None, make_rows(8))
    state, metrics = step(*arguments)
    return {name: np.asarray(x) for name, x in named(state.params).items()}, jax.device_get(metrics)


def gathered(text):
    """Elements of the results of all all-gathers in a compiled module."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]*? all-gather(?:-start)?\(", text)
    assert shapes or "all-gather" not in text
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]


@pytest.mark.slow(reason="compiles the training step for eight devices")
@pytest.mark.parametrize("fsdp, tp", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_the_step_is_that_of_one_device_and_gathers_no_whole_parameter(fsdp, tp, single, make_rows):
    mesh = make_mesh(1, fsdp, tp)
    step, arguments = compiled_step(mesh, make_rows(8))
    state, metrics = step(*arguments)

    params, expected = single
    for name in ("loss/total", "grad/norm", "logps/mean"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for name, value in named(state.params).items():
        assert value.sharding == NamedSharding(mesh, spec(PARAM_AXES[name])), name
        np.testing.assert_allclose(value, params[name], atol=2e-5, err_msg=name)

    # A layer's matrices, and the head's, are gathered over fsdp when their turn comes; never those of all layers, and
    # nothing over tp.
    sizes = gathered(step.as_text())
    stacked = [x.size for name, x in named(state.params).items() if name.startswith("layers.") and x.ndim == 3]
    assert max(sizes, default=0) < min(stacked)
    if fsdp == 1:
        one_layer = min(stacked) // CONFIG.num_hidden_layers
        assert max(sizes, default=0) < one_layer
