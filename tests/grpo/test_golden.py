"""The public torch release, number by number: advantages, policy and KL loss, clip fraction, gradients."""

import json

import numpy as np
import pytest

from envace_jax.grpo import GRPOConfig, finish_metrics, role_advantages

AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MODES = {
    "rolewise": dict(by_role=True, baseline="generation"),
    "taskwise": dict(by_role=False, baseline="trajectory"),
    "rolewise_std": dict(by_role=True, baseline="generation", scale_by_std=True),
    "taskwise_std": dict(by_role=False, baseline="trajectory", scale_by_std=True),
}


@pytest.fixture(scope="module")
def golden(fixtures_dir):
    return json.loads((fixtures_dir / "grpo_golden.json").read_text())


def advantages_of(case, mode):
    return role_advantages(case["reward"], case["task"], case["trajectory"], case["role"], **MODES[mode])


def check_loss(golden, case, mask, advantages, expected, aggregate, make_batch, value_and_grad):
    config = GRPOConfig(
        clip_low=golden["clip_low"],
        clip_high=golden["clip_high"],
        dual_clip=golden["dual_clip"],
        kl="k3",
        kl_coef=golden["kl_coef"],
        aggregate=aggregate,
    )
    roles = mask * np.array([1 if role == "act" else 2 for role in case["role"]])[:, None]
    batch = make_batch(roles, np.asarray(advantages)[:, None], old_logps=case["old_logp"], ref_logps=case["ref_logp"])
    (loss, metrics), gradient = value_and_grad(np.asarray(case["logp"], np.float32), batch, config)
    metrics = finish_metrics(metrics)
    got = [loss, *(metrics[name] for name in ("loss/policy", "loss/kl", "clip/fraction", "logps/approx_kl"))]
    want = [expected[name] for name in ("total", "policy_loss", "kl_loss", "clip_fraction", "approx_kl")]
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(gradient, expected["grad_logp"], atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_advantages_of_the_release(golden, mode):
    for case in golden["cases"]:
        np.testing.assert_allclose(advantages_of(case, mode), case["expected"][mode]["advantages"], atol=1e-5)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_losses_and_gradients_of_the_release(golden, aggregate, make_batch, value_and_grad):
    checked = 0
    for case in golden["cases"]:
        width = len(case["logp"][0])
        mask = (np.arange(width) < np.array(case["lengths"])[:, None]).astype(int)
        for mode, expected in case["expected"].items():
            if aggregate in expected.get("loss", {}):
                numbers = expected["loss"][aggregate]
                check_loss(
                    golden, case, mask, advantages_of(case, mode), numbers, aggregate, make_batch, value_and_grad
                )
                checked += 1
    assert checked >= 2


def test_every_golden_case(shared_dir, make_batch, value_and_grad):
    golden = json.loads((shared_dir / "golden" / "rolewise_grpo.json").read_text())
    for case in golden["cases"]:
        mask = np.array(case["mask"]).astype(int)
        for mode, expected in case["expected"].items():
            advantages = advantages_of(case, mode)
            np.testing.assert_allclose(advantages[:, None] * mask, expected["advantages"], atol=1e-5)
            for aggregate, numbers in expected["loss"].items():
                check_loss(golden, case, mask, advantages, numbers, aggregate, make_batch, value_and_grad)
