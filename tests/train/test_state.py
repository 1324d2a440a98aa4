"""One update is the whole batch's whatever the micro-batching, moves nothing on bad gradients, and lives on a mesh."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from envace_jax.config import TrainConfig
from envace_jax.grpo import GRPOConfig, grpo_loss, token_logps
from envace_jax.train.optim import make_optimizer, named
from envace_jax.train.state import (
    create_state,
    make_logps,
    make_update,
    place_batch,
    state_shardings,
)
from models.qwen3 import Qwen3
from models.qwen3.sharding import make_mesh

SGD = TrainConfig(optimizer="sgd", learning_rate=1.0, weight_decay=0.0, grad_clip=None)


def start(model, config=SGD, mesh=None):
    graphdef, params = nnx.split(model)
    optimizer = make_optimizer(config)
    return graphdef, optimizer, create_state(jax.tree.map(jnp.copy, params), optimizer, mesh)


def host(tree):
    return {name: np.asarray(leaf) for name, leaf in named(tree).items()}


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
def test_any_micro_batching_is_the_full_batch(tiny_model, make_rows, aggregate):
    batch = make_rows(6)
    config = GRPOConfig(aggregate=aggregate, role_weights=(1.0, 0.5), entropy_coef=0.01)
    graphdef, params = nnx.split(tiny_model)

    def loss(params):
        model = nnx.merge(graphdef, params)
        logps, entropy = token_logps(
            model, batch.tokens, batch.positions, batch.segments, temperature=0.7, vocab_size=90, with_entropy=True
        )
        return grpo_loss(logps, batch, config, entropy)[0]

    # With SGD at rate 1, what the parameters lost is the gradient.
    expected_loss, gradient = jax.jit(jax.value_and_grad(loss))(params)
    expected = {name: np.asarray(named(params)[name] - g) for name, g in named(gradient).items()}
    for micro_batch in (1, 4, 6):  # 4: the last micro-batch is padded
        graphdef, optimizer, state = start(tiny_model)
        update = make_update(graphdef, optimizer, config, temperature=0.7, vocab_size=90)
        state, metrics = update(state, *place_batch(batch, micro_batch, capacity=8))
        np.testing.assert_allclose(metrics["loss/total"], expected_loss, rtol=1e-5)
        for name, value in host(state.params).items():
            np.testing.assert_allclose(value, expected[name], atol=2e-7, err_msg=name)
        assert int(state.step) == 1 and int(metrics["tokens/act"]) == int((batch.roles == 1).sum())


def test_fuller_and_emptier_batches_share_one_program(tiny_model, make_rows):
    graphdef, optimizer, state = start(tiny_model)
    traced = []

    class Counted:
        def update(self, *args):
            traced.append(1)
            return optimizer.update(*args)

    update = make_update(graphdef, Counted(), GRPOConfig())
    for rows in (1, 3, 8):
        state, _ = update(state, *place_batch(make_rows(rows), 2, capacity=4))
    assert len(traced) == 1 and int(state.step) == 3


def test_micro_batches_without_anything_to_learn_are_not_run(make_rows):
    batch = make_rows(5)
    placed, used = place_batch(batch, 2, trained=np.array([True, True, True, False, False]), capacity=2)
    assert placed.tokens.shape == (4, 2, 24) and used == 2
    assert place_batch(batch, 2, trained=np.zeros(5, bool))[1] == 0


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(tiny_model, make_rows):
    graphdef, optimizer, state = start(tiny_model, TrainConfig(learning_rate=0.1))
    update = make_update(graphdef, optimizer, GRPOConfig())
    bad = make_rows(2)
    bad.advantages[0, 2] = np.inf
    before = host(state.params), [np.asarray(x) for x in jax.tree.leaves(state.opt_state)]
    state, metrics = update(state, *place_batch(bad, 2))
    assert not np.isfinite(metrics["grad/norm"]) and int(metrics["train/skipped"]) == 1
    after = host(state.params), [np.asarray(x) for x in jax.tree.leaves(state.opt_state)]
    jax.tree.map(np.testing.assert_array_equal, before, after)
    state, metrics = update(state, *place_batch(make_rows(2), 2))
    assert int(state.step) == 2 and int(metrics["train/skipped"]) == 1
    assert any((value != before[0][name]).any() for name, value in host(state.params).items())


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_an_empty_batch_does_not_drift_along_the_moments(tiny_model, make_rows, micro_batch):
    graphdef, optimizer, state = start(tiny_model, TrainConfig(learning_rate=0.1))
    update = make_update(graphdef, optimizer, GRPOConfig())
    state, _ = update(state, *place_batch(make_rows(2), micro_batch))
    before = host(state.params)
    state, metrics = update(state, *place_batch(make_rows(2), micro_batch, trained=np.zeros(2, bool)))
    jax.tree.map(np.testing.assert_array_equal, before, host(state.params))
    assert int(state.step) == 2 and int(state.skipped) == 0 and float(metrics["grad/norm"]) == 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how a CPU's program is ordered")
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_the_moments_change_in_place(tiny_model, make_rows, micro_batch):
    graphdef, optimizer, state = start(tiny_model, TrainConfig())
    update = make_update(graphdef, optimizer, GRPOConfig())
    batch, used = place_batch(make_rows(2), micro_batch)
    text = jax.jit(update, donate_argnums=0).lower(state, batch, jnp.int32(used)).compile().as_text()
    moments = [line for line in text.splitlines() if re.search(r"parameter\(\d+\).*opt_state.*\.(mu|nu)", line)]
    names = {line.split()[0] for line in moments}
    assert len(names) == 2 * len(jax.tree.leaves(state.params))
    assert not names & set(re.findall(r" copy\((%\S+)\)", text))
    # Nor in a branch, whose operands have other names there.
    branches = [name for pair in re.findall(r"branch_computations=\{(%\S+), (%\S+)\}", text) for name in pair]
    bodies = [re.search(rf"\n{re.escape(name)} \(.*?\n}}", text, re.S)[0] for name in branches]
    assert bodies and not any(re.search(r"f32\[\d.* copy\(%get-tuple-element", body) for body in bodies)


def test_recomputed_old_logps_hold_the_policy_still_over_several_updates(tiny_model, make_rows):
    """The second update's ratio is measured against the policy before the first: clipping must begin to act."""
    batch = make_rows(4)
    train = dataclasses.replace(SGD, old_logps="recompute", updates_per_batch=3, learning_rate=5.0)
    graphdef, optimizer, state = start(tiny_model, train)
    config = GRPOConfig(clip_low=0.0, clip_high=0.0)  # any move in the wanted direction is clipped
    update = make_update(graphdef, optimizer, config, old_logps="recompute", updates_per_batch=3)
    state, metrics = update(state, *place_batch(batch, 4))
    assert metrics["ratio/mean"] == pytest.approx(1.0) and int(state.step) == 1
    graphdef, optimizer, single = start(tiny_model, train)
    single, _ = make_update(graphdef, optimizer, config)(single, *place_batch(batch, 4))
    moved_once, moved = host(single.params), host(state.params)
    assert any((moved[name] != moved_once[name]).any() for name in moved)


def test_the_samplers_logps_can_be_the_old_ones(tiny_model, make_rows):
    batch = make_rows(3)
    graphdef, optimizer, state = start(tiny_model)
    placed, used = place_batch(batch, 3)
    logps = np.asarray(make_logps(graphdef)(state.params, placed, used))[0]
    trained = batch.roles > 0
    expected = np.abs(logps - batch.behavior_logps)[trained].mean()
    ratio = np.exp(logps - batch.behavior_logps)[trained].mean()
    _, metrics = make_update(graphdef, optimizer, GRPOConfig(), old_logps="sampler")(state, placed, used)
    assert metrics["ratio/mean"] == pytest.approx(ratio, rel=1e-4)
    assert metrics["logps/sampler_trainer_diff"] == pytest.approx(expected, rel=1e-4)


def test_scored_logps_are_those_of_the_trained_tokens(tiny_model, make_rows):
    batch = make_rows(3)
    graphdef, params = nnx.split(tiny_model)
    expected = token_logps(tiny_model, batch.tokens, batch.positions, batch.segments, temperature=0.6)
    placed, used = place_batch(batch, 2, capacity=4)
    found = np.asarray(make_logps(graphdef, temperature=0.6)(params, placed, used)).reshape(8, 24)
    np.testing.assert_allclose(found[:3], np.where(batch.roles == 0, 0.0, expected), atol=1e-5)
    assert (found[3:] == 0).all()


@pytest.mark.slow("compiles for eight devices")
def test_on_a_mesh_the_update_is_the_same(tiny_qwen3_config, tiny_model, make_rows):
    batch = make_rows(6)
    graphdef, optimizer, state = start(tiny_model)
    state, expected = make_update(graphdef, optimizer, GRPOConfig())(state, *place_batch(batch, 3))

    mesh = make_mesh(2, 2, 2)
    model = Qwen3(tiny_qwen3_config, rngs=nnx.Rngs(0), dtype=jnp.float32, mesh=mesh)
    graphdef, optimizer, sharded = start(model, mesh=mesh)
    shardings = state_shardings(sharded, mesh)
    update = make_update(graphdef, optimizer, GRPOConfig(), shardings=shardings)
    placed, used = place_batch(batch, 1, mesh)
    assert placed.tokens.shape == (2, 4, 24) and used == 2
    sharded, metrics = update(sharded, placed, used)
    for name in ("loss/total", "grad/norm", "logps/mean"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    for name, value in host(sharded.params).items():
        np.testing.assert_allclose(value, host(state.params)[name], atol=1e-6, err_msg=name)
    assert jax.tree.map(lambda x: x.sharding, sharded) == shardings


def test_moments_lie_where_their_parameters_do(tiny_model):
    mesh = make_mesh(2, 2, 2)
    *_, state = start(tiny_model, TrainConfig(), mesh)
    specs = {name: leaf.sharding.spec for name, leaf in named(state.params).items()}
    assert specs["layers.q_proj"] == PartitionSpec(None, "tp", "fsdp")
    (adam,) = [
        part for part in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
    ]
    for moments in (adam.mu, adam.nu):
        assert {name: leaf.sharding.spec for name, leaf in moments.items()} == specs
