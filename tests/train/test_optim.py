"""The optimizer against optax, PyTorch's published formulas written out by hand, and its promises about names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from envace_jax.config import OptimConfig, TrainConfig
from envace_jax.train.optim import make_optimizer, make_schedule, named


def optim(**fields):
    return OptimConfig(**{"learning_rate": 0.1, "steps": 10, "grad_clip": None, **fields})


def test_names_are_those_of_the_model(tiny_model):
    names = named(nnx.state(tiny_model))
    assert {"embed_tokens", "lm_head", "norm", "layers.q_proj", "layers.input_layernorm"} <= names.keys()
    assert names["layers.q_proj"].shape == (2, 32, 32)


def test_adamw_moves_as_its_paper_says_and_spares_norms():
    params = {"layers": {"q_proj": jnp.full((1, 2, 2), 2.0), "q_norm": jnp.full((1, 2), 2.0)}}
    gradient = jax.tree.map(lambda x: jnp.full_like(x, 3.0), params)
    optimizer = make_optimizer(optim(weight_decay=0.5, b1=0.9, b2=0.99))
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    # First step: bias-corrected moments are g and g^2, so the step is -lr x sign(g), and -lr x decay x weight.
    np.testing.assert_allclose(updates["layers"]["q_norm"], -0.1, rtol=1e-5)
    np.testing.assert_allclose(updates["layers"]["q_proj"], -0.1 - 0.1 * 0.5 * 2.0, rtol=1e-5)


def test_clipping_is_by_the_norm_of_the_whole_gradient():
    params = {"layers": {"q_proj": jnp.zeros((1, 1, 1))}, "norm": jnp.zeros(1)}
    gradient = {"layers": {"q_proj": jnp.full((1, 1, 1), 30.0)}, "norm": jnp.full(1, 40.0)}  # norm 50
    optimizer = make_optimizer(optim(optimizer="sgd", grad_clip=1.0))
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["norm"], -0.1 * 0.8, rtol=1e-6)
    np.testing.assert_allclose(updates["layers"]["q_proj"], -0.1 * 0.6, rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.05, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.05, 0.1, 0.1, 0.05, 0.0]),
        ("cosine", [0.05, 0.1, 0.1, 0.05, 0.0]),
    ],
)
def test_schedules_warm_up_and_then_take_their_shape(schedule, expected):
    at = make_schedule(optim(schedule=schedule, warmup_steps=2, steps=10))
    np.testing.assert_allclose([at(i) for i in (0, 1, 2, 6, 10)], expected, atol=1e-7)


def test_a_schedule_counts_updates_not_batches():
    config = TrainConfig(learning_rate=0.1, steps=4, schedule="linear", old_logps="recompute", updates_per_batch=2)
    np.testing.assert_allclose([make_schedule(config)(i) for i in (0, 4, 8)], [0.1, 0.05, 0.0], atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "sgd"])
def test_state_is_float32_and_updates_fit_bfloat16_parameters(tiny_model, optimizer):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(tiny_model))
    optimizer = make_optimizer(optim(optimizer=optimizer, weight_decay=0.01, grad_clip=1.0))
    state = optimizer.init(params)
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(x.dtype == jnp.float32 for x in floats)
    updates, state = jax.jit(optimizer.update)(params, state, params)
    moved = optax.apply_updates(params, updates)
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    for name, leaf in named(moved).items():
        assert leaf.dtype == jnp.bfloat16 and leaf.shape == named(params)[name].shape, name


def test_muon_orthogonalises_each_layers_matrix_by_itself():
    rng = np.random.default_rng(0)
    params = {"layers": {"q_proj": jnp.zeros((2, 4, 4))}, "norm": jnp.ones(4)}
    scales = jnp.asarray([1.0, 1e-3]).reshape(2, 1, 1)  # one layer's gradient must not drown the other's
    gradient = {"layers": {"q_proj": jnp.asarray(rng.normal(size=(2, 4, 4))) * scales}, "norm": jnp.ones(4)}
    optimizer = make_optimizer(optim(optimizer="muon", weight_decay=0.0))
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    for layer in np.asarray(updates["layers"]["q_proj"]):
        singular = np.linalg.svd(layer / (0.1 * 0.2 * 2.0), compute_uv=False)  # lr x 0.2 x sqrt(4)
        assert singular.min() > 0.5 and singular.max() < 1.3
