"""The loss does not depend on how the episodes are laid out, and its gradient is the derivative of its value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from envace_jax.grpo import GRPOConfig, finish_metrics, grpo_loss, loss_denominator, safe_divide

CONFIGS = {
    "token-mean": GRPOConfig(kl="k3", kl_coef=0.1, sampler_correction="token", entropy_coef=0.01),
    "seq-mean-token-sum": GRPOConfig(aggregate="seq-mean-token-sum", ratio="sequence", clip_low=0.1, clip_high=0.1),
    "seq-mean-token-mean": GRPOConfig(
        aggregate="seq-mean-token-mean", ratio="sequence", sampler_correction="sequence", kl="k2", kl_coef=0.2
    ),
    "seq-mean-token-sum-norm": GRPOConfig(
        aggregate="seq-mean-token-sum-norm", norm_length=32, role_weights=(1.0, 0.5), kl="k3+", kl_coef=0.1
    ),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture
def whole(episodes, config, value_and_grad):
    """Loss, gradient and metrics of all episodes in one batch: what every other layout has to give."""
    logps, entropy, batch = episodes
    (loss, metrics), gradient = value_and_grad(logps, batch, config, entropy)
    return loss, gradient, finish_metrics(metrics)


@every_config
def test_micro_batches_add_up(config, whole, episodes, map_batch, sums_and_grad):
    logps, entropy, batch = episodes
    loss, gradient, metrics = whole
    parts = []
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        part = map_batch(lambda x, rows=rows: x[rows], batch)
        parts.append(sums_and_grad(logps[rows], part, config, entropy[rows]))
        np.testing.assert_array_equal(loss_denominator(part, config), parts[-1][0][1])
    (top, bottom, sums), _ = jax.tree.map(lambda *x: sum(x), *[(part[0], None) for part in parts])
    np.testing.assert_allclose(safe_divide(top, bottom), loss, rtol=1e-6)
    gradients = safe_divide(jnp.concatenate([part[1] for part in parts]), bottom)
    np.testing.assert_allclose(gradients, gradient, rtol=1e-6, atol=1e-9)
    for name, value in finish_metrics(sums).items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-5, atol=1e-7, err_msg=name)


@every_config
def test_padding_rows_and_columns_change_nothing(config, whole, episodes, map_batch, sums_and_grad):
    logps, entropy, batch = episodes
    loss, gradient, _ = whole

    def pad(x):
        return jnp.pad(x, ((0, 2), (0, 5)))

    (top, bottom, _), padded = sums_and_grad(pad(logps), map_batch(pad, batch), config, pad(entropy))
    np.testing.assert_allclose(safe_divide(top, bottom), loss, rtol=1e-6)
    np.testing.assert_allclose(safe_divide(padded, bottom)[:6, :8], gradient, rtol=1e-6, atol=1e-9)


@every_config
def test_repacking_segments_into_other_rows_changes_nothing(config, whole, episodes, map_batch, sums_and_grad):
    logps, entropy, batch = episodes
    loss, gradient, _ = whole
    order = np.array([4, 0, 5, 3, 1, 2])

    def repack(x):  # rows of two old rows each, in another order
        return x[order].reshape(3, 16)

    packed = map_batch(repack, batch)
    packed = dataclasses.replace(packed, segments=repack(batch.segments + 10 * jnp.arange(6)[:, None]))
    (top, bottom, _), repacked = sums_and_grad(repack(logps), packed, config, repack(entropy))
    np.testing.assert_allclose(safe_divide(top, bottom), loss, rtol=1e-6)
    repacked = safe_divide(repacked, bottom).reshape(6, 8)
    np.testing.assert_allclose(repacked, gradient[order], rtol=1e-6, atol=1e-9)


@every_config
def test_the_gradient_is_the_slope_of_the_loss(config, episodes, map_batch):
    if config.kl == "k3+":  # whose gradient is another function's, on purpose
        config = dataclasses.replace(config, kl="k3")
    logps, entropy, batch = episodes
    with jax.enable_x64(True):
        batch = map_batch(lambda x: jnp.asarray(np.asarray(x, float)) if x.dtype == jnp.float32 else x, batch)
        logps, entropy = (jnp.asarray(np.asarray(x, float)) for x in (logps, entropy))
        step = 1e-6
        nudges = step * jnp.eye(logps.size).reshape(-1, *logps.shape)

        @jax.jit
        def slopes(logps):
            def loss(x):
                return grpo_loss(x, batch, config, entropy)[0]

            both = jax.vmap(lambda d: (loss(logps + d) - loss(logps - d)) / (2 * step))(nudges)
            return both.reshape(logps.shape), jax.grad(loss)(logps)

        measured, gradient = slopes(logps)
        assert float(jnp.abs(gradient).max()) > 1e-2
        np.testing.assert_allclose(gradient, measured, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(6)), st.sampled_from(sorted(CONFIGS)), st.integers(-(10**6), 10**6))
def test_neither_the_order_of_rows_nor_the_names_of_segments_matter(
    episodes, map_batch, value_and_grad, order, name, offset
):
    logps, entropy, batch = episodes
    order, config = np.array(order), CONFIGS[name]
    (loss, _), gradient = value_and_grad(logps, batch, config, entropy)
    other = map_batch(lambda x: x[order], batch)
    other = dataclasses.replace(other, segments=other.segments + offset, generations=other.generations - offset)
    (other_loss, _), other_gradient = value_and_grad(logps[order], other, config, entropy[order])
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(other_gradient, gradient[order], rtol=1e-5, atol=1e-8)


SHAPE = (3, 6)
numbers = st.floats(-30, 30, width=32)
anything = st.one_of(numbers, st.sampled_from([np.nan, np.inf, -np.inf, 200.0]))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_there_is_never_a_nan(make_batch, value_and_grad, data):
    """Any numbers at trained tokens, anything at masked ones, any ids."""
    roles = data.draw(arrays.arrays(np.int32, SHAPE, elements=st.integers(0, 2)))

    def draw():
        trained = data.draw(arrays.arrays(np.float32, SHAPE, elements=numbers))
        masked = data.draw(arrays.arrays(np.float32, SHAPE, elements=anything))
        return np.where(roles > 0, trained, masked)

    ids = st.integers(-(2**31), 2**31 - 1)
    batch = make_batch(
        roles,
        draw(),
        old_logps=draw(),
        ref_logps=draw(),
        behavior_logps=draw(),
        segments=data.draw(arrays.arrays(np.int32, SHAPE, elements=ids)),
        generations=data.draw(arrays.arrays(np.int32, SHAPE, elements=ids)),
    )
    (loss, metrics), gradient = value_and_grad(draw(), batch, CONFIGS["seq-mean-token-mean"], draw())
    assert np.isfinite(loss) and np.isfinite(gradient).all()
    assert all(np.isfinite(value) for value in finish_metrics(metrics).values())
    assert (np.asarray(gradient)[roles == 0] == 0).all()
