"""The configuration of the loss refuses what it cannot mean, in words that help."""

import dataclasses
import warnings

import pytest

from envace_jax.config import Config, from_dict
from envace_jax.grpo import GRPOConfig


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("ratio", "tokn", "'token', 'sequence'"),
        ("aggregate", "mean", "'token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm'"),
        ("kl", "k4", "'none', 'k1', 'k2', 'k3', 'k3+'"),
        ("sampler_correction", "seq", "'none', 'token', 'sequence'"),
        ("kl", None, "'none'"),
        ("clip_low", -0.1, "in [0, 1]"),
        ("clip_low", 1.5, "in [0, 1]"),
        ("clip_high", float("nan"), ">= 0"),
        ("dual_clip", 1.0, "> 1, or None"),
        ("kl_coef", -1e-3, ">= 0"),
        ("sampler_correction_cap", 0.0, "> 0"),
        ("norm_length", 0, "> 0, or None"),
        ("entropy_coef", True, ">= 0"),
        ("role_weights", (1.0,), "(act, rehearse)"),
        ("role_weights", (1.0, -1.0), "(act, rehearse)"),
        ("role_weights", 1.0, "(act, rehearse)"),
    ],
)
def test_an_invalid_choice_names_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError) as error:
        GRPOConfig(**{field: value})
    assert f"GRPOConfig.{field} = {value!r}" in str(error.value) and allowed in str(error.value)


def test_k1_warns_that_its_gradient_vanishes_and_the_others_do_not():
    with pytest.warns(UserWarning, match="k1.*gradient vanishes"):
        GRPOConfig(kl="k1", kl_coef=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kl in ("none", "k2", "k3", "k3+"):
            GRPOConfig(kl=kl, kl_coef=0.1)


def test_a_configuration_that_says_k1_warns_too():
    with pytest.warns(UserWarning, match="k1.*gradient vanishes"):
        from_dict(Config, {"model": "m", "output_dir": "o", "grpo": {"kl": "k1", "kl_coef": 0.1}})


def test_it_is_frozen_hashable_and_takes_lists_for_pairs():
    config = GRPOConfig(role_weights=[1, 0.5])
    assert config == GRPOConfig(role_weights=(1, 0.5)) and hash(config) == hash(GRPOConfig(role_weights=(1, 0.5)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.clip_low = 0.1
