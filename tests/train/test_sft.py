"""The supervised warm start is one thing however often it was stopped, and leaves a model."""

import os
import signal
from importlib import import_module

import numpy as np
import pytest
from flax import nnx

from envace_jax.config import SFTConfig, from_dict
from envace_jax.train import load_model, sft
from envace_jax.train.optim import named
from envace_jax.train.record import read_metrics


def make_config(policy, out, steps):
    values = {
        "model": str(policy),
        "output_dir": str(out),
        "data": {"kind": "mini", "conversations": 1, "reading_steps": steps, "max_tokens": 768, "thinking": False},
        "train": {"steps": steps, "learning_rate": 1e-2, "micro_batch": 1, "remat": False, "schedule": "constant"},
        "mesh": {"data": 1, "fsdp": 1, "tp": 1},
        "logging": {"tensorboard": False},
    }
    return from_dict(SFTConfig, values)


def figures(out):
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(out)]


def parameters(path):
    return named(nnx.state(load_model(path)))


def test_a_signal_saves_the_steps_that_are_done_and_the_rest_comes_to_the_same(policy, tmp_path, monkeypatch):
    straight = sft(make_config(policy, tmp_path / "straight", 2))
    module = import_module("envace_jax.train.sft")
    batches = module.batches

    def interrupted(*arguments):
        read = batches(*arguments)

        def batch(step):
            if step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return read(step)

        return batch

    monkeypatch.setattr(module, "batches", interrupted)
    with pytest.raises(SystemExit) as stopped:
        sft(make_config(policy, tmp_path / "stopped", 2))
    assert stopped.value.code == 75 and [line["step"] for line in read_metrics(tmp_path / "stopped")] == [1]
    monkeypatch.undo()
    resumed = sft(make_config(policy, tmp_path / "stopped", 2))
    assert figures(tmp_path / "stopped") == figures(tmp_path / "straight")
    assert figures(tmp_path / "straight")[1]["loss/total"] < figures(tmp_path / "straight")[0]["loss/total"]
    before, ours, theirs = (parameters(path) for path in (policy, resumed, straight))
    assert any((before[name] != theirs[name]).any() for name in theirs)
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])
