"""Two sets of parameters: each learns from its own role, is saved with the other, and goes on with it."""

import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from envace_jax.errors import ConfigError
from envace_jax.train import load_model, run
from envace_jax.train.optim import named
from envace_jax.train.record import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
from runs import episodes, make_config  # noqa: E402


def parameters(path):
    return named(nnx.state(load_model(path)))


def equal(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def train(policy, out, steps, **sections):
    return run(make_config(policy, out, steps, world={"split_parameters": True}, **sections), rollout=episodes)


def test_each_copy_learns_from_its_own_role_and_resumes_with_the_other(policy, tmp_path):
    out = train(policy, tmp_path / "straight", 2)
    actor, rehearser, before = parameters(out), parameters(out / "rehearser"), parameters(policy)
    assert not equal(actor, before) and not equal(rehearser, before) and not equal(actor, rehearser)
    lines = read_metrics(out)
    assert all(line["tokens/act"] > 0 and line["advantage/rehearse_abs"] > 0 for line in lines)
    assert all(line["rehearser/grad/norm"] > 0 and line["grad/norm"] > 0 for line in lines)

    train(policy, tmp_path / "stopped", 1)
    again = train(policy, tmp_path / "stopped", 2)
    assert equal(parameters(again), actor) and equal(parameters(again / "rehearser"), rehearser)


def test_a_frozen_role_leaves_its_copy_alone(policy, tmp_path):
    out = train(policy, tmp_path / "run", 1, train={"rehearse": False})
    before = parameters(policy)
    assert equal(parameters(out / "rehearser"), before) and not equal(parameters(out), before)


def test_only_a_policy_that_rehearses_can_be_split(policy, tmp_path):
    with pytest.raises(ConfigError, match="split_parameters"):
        make_config(policy, tmp_path, world={"split_parameters": True, "kind": "real"})
