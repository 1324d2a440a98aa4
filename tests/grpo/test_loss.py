"""Each term of the loss on numbers small enough to do by hand.

Old log-probabilities are mostly 0 here, so that a log-probability is its own log-ratio.
"""

import dataclasses
from math import exp, log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.grpo import GRPOConfig, finish_metrics, grpo_loss

WIDE = GRPOConfig(clip_low=0.9, clip_high=9.0)


def test_the_clipped_surrogate(make_batch, value_and_grad):
    ratios = [0.5, 1.0, 1.5, 5.0, 0.5, 1.0, 1.5, 5.0]
    advantages = [1.0] * 4 + [-1.0] * 4
    batch = make_batch([[1] * 8], [advantages], old_logps=[[0.0] * 8])
    config = GRPOConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    (loss, metrics), gradient = value_and_grad(np.log([ratios]), batch, config)
    # A > 0: a gain stops at 1.3, a loss does not. A < 0: a gain stops at 0.8, a loss at 3.
    tokens = [-0.5, -1.0, -1.3, -1.3, 0.8, 1.0, 1.5, 3.0]
    np.testing.assert_allclose(loss, np.mean(tokens), rtol=1e-6)
    np.testing.assert_allclose(gradient[0] * 8, [-0.5, -1.0, 0, 0, 0, 1.0, 1.5, 0], rtol=1e-6)
    metrics = finish_metrics(metrics)
    np.testing.assert_allclose(metrics["clip/fraction"], 3 / 8)
    np.testing.assert_allclose(metrics["clip/dual_fraction"], 1 / 8)
    np.testing.assert_allclose(metrics["ratio/mean"], np.mean(ratios), rtol=1e-6)


def test_dual_clip_can_be_off(make_batch, value_and_grad):
    batch = make_batch([[1, 1]], [[-1.0, 1.0]], old_logps=[[0.0, 0.0]])
    (loss, _), gradient = value_and_grad(np.log([[5.0, 5.0]]), batch, GRPOConfig(dual_clip=None))
    np.testing.assert_allclose(loss, (5.0 - 1.2) / 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[2.5, 0.0]], rtol=1e-6)


def test_at_the_first_update_the_gradient_is_the_policy_gradient(make_batch, value_and_grad):
    """Without old log-probabilities the policy is its own old policy: ratio 1, gradient -A / tokens at any clip."""
    batch = make_batch([[0, 1, 2]], [[9.0, 2.0, -1.0]])
    (loss, _), gradient = value_and_grad(np.array([[-3.0, -1.0, -2.0]]), batch, GRPOConfig(clip_low=0.0, clip_high=0.0))
    np.testing.assert_allclose(loss, -0.5)
    np.testing.assert_allclose(gradient, [[0.0, -1.0, 0.5]])


@pytest.mark.parametrize(
    "aggregate, norm_length, expected",
    [
        ("token-mean", None, -16 / 6),
        ("seq-mean-token-sum", None, -16 / 3),
        ("seq-mean-token-mean", None, -(1 + 2 + 4) / 3),
        ("seq-mean-token-sum-norm", None, -16 / 4),
        ("seq-mean-token-sum-norm", 8, -16 / 8),
    ],
)
def test_aggregation_over_generations(aggregate, norm_length, expected, make_batch, value_and_grad):
    """Generations of 2, 1 and 3 tokens with advantages 1, 2 and 4 at ratio 1; two share a segment."""
    batch = make_batch(
        [[0, 1, 2, 1], [1, 1, 1, 0]], [[0, 1, 2, 1], [4, 4, 4, 0]], generations=[[0, 1, 7, 1], [3, 3, 3, 0]]
    )
    config = GRPOConfig(aggregate=aggregate, norm_length=norm_length)
    (loss, _), _ = value_and_grad(np.zeros((2, 4)), batch, config)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_without_ids_a_generation_is_a_segment_of_a_row(make_batch, value_and_grad):
    batch = make_batch(
        [[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 1, 5], [4, 4, 0, 0]], segments=[[1, 1, 1, 2], [1, 1, 0, 0]]
    )
    (loss, _), _ = value_and_grad(np.zeros((2, 4)), batch, GRPOConfig(aggregate="seq-mean-token-mean"))
    np.testing.assert_allclose(loss, -(1 + 5 + 4) / 3, rtol=1e-6)


def test_a_generation_is_told_from_its_namesake_in_another_segment(make_batch, value_and_grad):
    batch = make_batch([[1, 1, 1, 1]], [[1, 1, 1, 5]], segments=[[1, 1, 1, 2]], generations=[[1, 1, 1, 1]])
    (loss, _), _ = value_and_grad(np.zeros((1, 4)), batch, GRPOConfig(aggregate="seq-mean-token-mean"))
    np.testing.assert_allclose(loss, -3.0, rtol=1e-6)


def test_the_sequence_ratio_is_the_mean_log_ratio_of_a_generation(make_batch, value_and_grad):
    batch = make_batch([[1, 1, 0, 2]], 1.0, old_logps=[[0.0] * 4], generations=[[1, 1, 0, 2]])
    logps = np.array([[0.1, 0.3, 7.0, -0.5]])
    (loss, metrics), gradient = value_and_grad(logps, batch, dataclasses.replace(WIDE, ratio="sequence"))
    np.testing.assert_allclose(loss, -(2 * exp(0.2) + exp(-0.5)) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-exp(0.2) / 3, -exp(0.2) / 3, 0, -exp(-0.5) / 3]], rtol=1e-6)
    np.testing.assert_allclose(finish_metrics(metrics)["ratio/act_mean"], exp(0.2), rtol=1e-6)
    # clipped as a whole: the token with ratio e^0.1 has no gradient either
    (loss, _), gradient = value_and_grad(logps, batch, GRPOConfig(ratio="sequence", clip_high=0.15))
    np.testing.assert_allclose(loss, -(2 * 1.15 + exp(-0.5)) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, 0, 0, -exp(-0.5) / 3]], rtol=1e-6)


def test_sampler_correction_weighs_the_policy_term_and_has_no_gradient(make_batch, value_and_grad):
    old, behavior = [[-1.0, -1.0]], [[-1.5, -3.0]]
    batch = make_batch([[1, 2]], [[1.0, 3.0]], old_logps=old, behavior_logps=behavior, ref_logps=[[0.0, 0.0]])
    token = GRPOConfig(sampler_correction="token", sampler_correction_cap=2.0, kl="k2", kl_coef=0.1)
    (loss, metrics), gradient = value_and_grad(np.array(old), batch, token)
    np.testing.assert_allclose(loss, -(exp(0.5) + 2.0 * 3.0) / 2 + 0.1 * 0.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-exp(0.5) / 2 - 0.05, -2.0 * 3.0 / 2 - 0.05]], rtol=1e-6)
    metrics = finish_metrics(metrics)
    np.testing.assert_allclose(metrics["logps/sampler_trainer_diff"], (0.5 + 2.0) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["logps/rehearse_sampler_trainer_diff"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(metrics["correction/capped_fraction"], 0.5)
    np.testing.assert_allclose(metrics["correction/weight"], (exp(0.5) + 2.0) / 2, rtol=1e-6)


def test_sequence_correction_uses_the_likelihood_ratio_of_the_generation(make_batch, value_and_grad):
    batch = make_batch(
        [[1, 1, 2]], 1.0, old_logps=[[-1.0] * 3], behavior_logps=[[-1.1, -0.8, -9.0]], generations=[[1, 1, 2]]
    )
    (loss, _), _ = value_and_grad(np.full((1, 3), -1.0), batch, GRPOConfig(sampler_correction="sequence"))
    np.testing.assert_allclose(loss, -(2 * exp(-0.1) + 2.0) / 3, rtol=1e-6)


def test_mismatch_is_measured_even_where_it_is_not_corrected(make_batch, value_and_grad):
    batch = make_batch([[1, 0]], 1.0, old_logps=[[-1.0, 0.0]], behavior_logps=[[-1.25, 5.0]])
    (_, metrics), _ = value_and_grad(np.array([[-1.0, 0.0]]), batch, GRPOConfig())
    np.testing.assert_allclose(finish_metrics(metrics)["logps/sampler_trainer_diff"], 0.25)


def test_the_entropy_bonus_lowers_the_loss(make_batch):
    batch = make_batch([[1, 1, 0]], 0.0)
    entropy = jnp.array([[0.5, 1.5, 99.0]])

    def loss(entropy):
        return grpo_loss(jnp.zeros((1, 3)), batch, GRPOConfig(entropy_coef=0.1), entropy)[0]

    np.testing.assert_allclose(loss(entropy), -0.1, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(entropy), [[-0.05, -0.05, 0.0]], rtol=1e-6)


def test_role_weights_scale_the_tokens_of_a_role_and_not_the_denominator(make_batch, value_and_grad):
    batch = make_batch([[1, 2, 2]], [[1.0, 2.0, 2.0]], ref_logps=[[0.0, 0.0, 0.0]])
    logps = np.full((1, 3), -1.0)
    config = GRPOConfig(role_weights=(0.5, 0.0), kl="k2", kl_coef=1.0)
    (loss, metrics), gradient = value_and_grad(logps, batch, config)
    np.testing.assert_allclose(loss, 0.5 * (-1.0 + 0.5) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.5 * (-1.0 - 1.0) / 3, 0.0, 0.0]], rtol=1e-6)
    assert (float(metrics["tokens/act"]), float(metrics["tokens/rehearse"])) == (1.0, 2.0)
    metrics = finish_metrics(metrics)
    np.testing.assert_allclose([metrics["advantage/act_abs"], metrics["advantage/rehearse_abs"]], [1.0, 2.0])


POISON_CONFIGS = [
    GRPOConfig(kl="k3", kl_coef=0.1, sampler_correction="token", entropy_coef=0.01),
    GRPOConfig(aggregate="seq-mean-token-mean", ratio="sequence", kl="k3+", kl_coef=0.1, sampler_correction="sequence"),
]


@pytest.mark.parametrize("config", POISON_CONFIGS, ids=["token", "sequence"])
def test_nothing_at_a_masked_position_matters(config, episodes, map_batch, value_and_grad):
    logps, entropy, batch = episodes
    masked = batch.roles == 0
    (loss, metrics), gradient = value_and_grad(logps, batch, config, entropy)
    assert np.isfinite(gradient).all() and (np.asarray(gradient)[masked] == 0).all()
    for poison in (-np.inf, np.nan, 200.0, -200.0):

        def spoil(x, poison=poison):
            return jnp.where(masked, poison, x) if jnp.issubdtype(x.dtype, jnp.floating) else x

        for case in (
            (spoil(logps), batch, entropy),
            (logps, map_batch(spoil, batch), entropy),
            (spoil(logps), map_batch(spoil, batch), spoil(entropy)),
        ):
            (other, other_metrics), other_gradient = value_and_grad(case[0], case[1], config, case[2])
            assert float(other) == float(loss)
            np.testing.assert_array_equal(other_gradient, gradient)
            jax.tree.map(np.testing.assert_array_equal, other_metrics, metrics)


def test_a_trained_token_of_any_log_ratio_has_finite_loss_and_gradient(make_batch, value_and_grad):
    logps = np.array([[200.0, -200.0, 200.0, -200.0]])
    zeros = [[0.0] * 4]
    batch = make_batch([[1, 1, 2, 2]], [[1, 1, -1, -1]], old_logps=zeros, ref_logps=zeros, behavior_logps=zeros)
    for dual_clip in (3.0, None):
        config = GRPOConfig(kl="k3", kl_coef=1.0, sampler_correction="token", dual_clip=dual_clip)
        (loss, metrics), gradient = value_and_grad(logps, batch, config)
        assert np.isfinite(loss) and np.isfinite(gradient).all()
        assert all(np.isfinite(value) for value in finish_metrics(metrics).values())


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_batch_without_trained_tokens_is_a_loss_of_zero(aggregate, make_batch, value_and_grad):
    batch = make_batch([[0, 0]], np.nan)
    (loss, metrics), gradient = value_and_grad(np.full((1, 2), np.nan), batch, GRPOConfig(aggregate=aggregate))
    assert loss == 0 and (gradient == 0).all()
    assert all(np.isfinite(value) for value in finish_metrics(metrics).values())


def test_bfloat16_log_probabilities_are_summed_in_float32(make_batch):
    batch = make_batch([[1, 1]], [[1.0, 1.0]], old_logps=[[0.0, 0.0]])
    loss, _ = grpo_loss(jnp.full((1, 2), log(1.125), jnp.bfloat16), batch, GRPOConfig())
    assert loss.dtype == jnp.float32


def test_what_the_configuration_needs_is_asked_for(make_batch):
    batch, logps = make_batch([[1, 1]], 1.0), jnp.zeros((1, 2))
    with pytest.raises(ValueError, match=r"ref_logps is None.*kl = 'k2'"):
        grpo_loss(logps, batch, GRPOConfig(kl="k2"))
    with pytest.raises(ValueError, match=r"behavior_logps is None.*sampler_correction = 'token'"):
        grpo_loss(logps, batch, GRPOConfig(sampler_correction="token"))
    with pytest.raises(ValueError, match=r"entropy is None.*entropy_coef = 0.1"):
        grpo_loss(logps, batch, GRPOConfig(entropy_coef=0.1))
    with pytest.raises(ValueError, match=r"TokenBatch.tokens has shape \[1, 2\]: expected \[1, 3\]"):
        grpo_loss(jnp.zeros((1, 3)), batch, GRPOConfig())
