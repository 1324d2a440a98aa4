"""What each KL estimator is worth, and what its gradient does in expectation over the policy's own samples."""

import warnings
from math import exp, log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.grpo import GRPOConfig, grpo_loss
from envace_jax.grpo.kl import ESTIMATORS


def config(kl: str) -> GRPOConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k1 warns, see test_config
        return GRPOConfig(kl=kl, kl_coef=1.0)


# Policy (0.9, 0.1), reference (0.5, 0.5). The true KL(p || q) has the gradient p_0 (log(p_0 / q_0) - KL) = 0.1978 with
# respect to the first logit; KL(q || p), which k3 descends, has p_0 - q_0 = 0.4.
@pytest.mark.parametrize("kl, expected", [("k1", 0.0), ("k2", 0.1978), ("k3", 0.4), ("k3+", 0.1978)])
def test_expected_gradient_over_the_policys_own_samples(kl, expected, make_batch):
    samples = jnp.array([0] * 9 + [1])  # exactly as often as the policy draws them: the mean is the expectation
    batch = make_batch([[1] * 10], 0.0, ref_logps=[[log(0.5)] * 10])

    def loss(logits):
        return grpo_loss(jax.nn.log_softmax(logits)[samples][None], batch, config(kl))[0]

    gradient = jax.grad(loss)(jnp.log(jnp.array([0.9, 0.1])))
    np.testing.assert_allclose(gradient, [expected, -expected], atol=1e-4)


def test_estimates_agree_with_the_kl_in_expectation():
    p, q = np.array([0.9, 0.1]), np.array([0.5, 0.5])
    true = np.sum(p * np.log(p / q))
    for name in ("k1", "k3", "k3+"):
        estimate = np.sum(p * np.asarray(ESTIMATORS[name](jnp.log(p), jnp.log(q))))
        np.testing.assert_allclose(estimate, true, rtol=1e-5)


@pytest.mark.parametrize(
    "kl, value, slope",
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", exp(-0.5) - 0.5, 1 - exp(-0.5)), ("k3+", exp(-0.5) - 0.5, 0.5)],
)
def test_value_and_gradient_of_one_token(kl, value, slope):
    got = jax.value_and_grad(ESTIMATORS[kl])(jnp.float32(-1.0), jnp.float32(-1.5))
    np.testing.assert_allclose(got, (value, slope), rtol=1e-5)


def test_k3_stops_at_ten():
    for kl in ("k3", "k3+"):
        assert float(ESTIMATORS[kl](jnp.float32(-50.0), jnp.float32(0.0))) == 10.0
    assert float(jax.grad(ESTIMATORS["k3"])(jnp.float32(-50.0), jnp.float32(0.0))) == 0.0
    assert float(jax.grad(ESTIMATORS["k3+"])(jnp.float32(-50.0), jnp.float32(0.0))) == -50.0
