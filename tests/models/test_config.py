"""Qwen3Config: the released sizes, the spellings of config.json, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from models.qwen3 import Qwen3, Qwen3Config

# Number of unique parameters and q_proj's shape of each released checkpoint.
RELEASED = {
    "qwen3-0.6b": (596_049_920, (2048, 1024)),
    "qwen3-1.7b": (1_720_574_976, (2048, 2048)),
    "qwen3-4b": (4_022_468_096, (4096, 2560)),
    "qwen3-8b": (8_190_735_360, (4096, 4096)),
    "qwen3-14b": (14_768_307_200, (5120, 5120)),
    "qwen3-32b": (32_762_123_264, (8192, 5120)),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name", RELEASED)
def test_preset_has_the_parameters_of_the_release(name):
    config = Qwen3Config.preset(name)
    state = nnx.state(nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0))))
    parameters, q_proj = RELEASED[name]
    assert sum(x.size for x in jax.tree.leaves(state)) == parameters
    assert state["layers"]["q_proj"].shape == (config.num_hidden_layers, *q_proj)


def test_presets_equal_the_released_configs(shared_dir):
    released = json.loads((shared_dir / "qwen3" / "configs.json").read_text())["models"]
    assert len(released) == len(RELEASED)
    for name, model in released.items():
        assert Qwen3Config.from_hf(model["config"]) == Qwen3Config.preset(name.lower())


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"'qwen3-7b'.*qwen3-0\.6b.*qwen3-8b"):
        Qwen3Config.preset("qwen3-7b")


def test_config_is_hashable_and_takes_rope_scaling_as_a_dict():
    one = Qwen3Config.preset("qwen3-8b", rope_scaling=YARN)
    other = dataclasses.replace(Qwen3Config.preset("qwen3-8b"), rope_scaling=dict(YARN))
    assert one == other and hash(one) == hash(other)
    assert one != Qwen3Config.preset("qwen3-8b")


def test_both_spellings_of_rope_are_read():
    shape = Qwen3Config.preset("qwen3-8b").to_hf()
    del shape["rope_theta"], shape["rope_scaling"]
    old = {**shape, "rope_theta": 5e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    new = {**shape, "rope_parameters": {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0}}
    plain = {**shape, "rope_theta": 5e6, "rope_scaling": None}
    default = {**shape, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}
    assert Qwen3Config.from_hf(old) == Qwen3Config.from_hf(new)
    assert Qwen3Config.from_hf(plain) == Qwen3Config.from_hf(default)
    assert Qwen3Config.from_hf(plain).rope_theta == 5e6


@pytest.mark.parametrize("scaling", [None, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_to_hf_reads_back_as_the_same_config(scaling, tmp_path):
    config = Qwen3Config.preset("qwen3-0.6b", rope_scaling=scaling)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert Qwen3Config.from_hf(tmp_path) == config
    assert Qwen3Config.from_hf(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unquantized"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta": 1}}, r"\['beta'\]"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_what_the_forward_pass_lacks_is_refused(change, message):
    values = {**Qwen3Config.preset("qwen3-8b").to_hf(), **change}
    with pytest.raises(ValueError, match=message):
        Qwen3Config.from_hf(values)


def test_absent_sizes_are_not_guessed():
    with pytest.raises(ValueError, match="hidden_size, num_hidden_layers missing"):
        values = Qwen3Config.preset("qwen3-8b").to_hf()
        del values["hidden_size"], values["num_hidden_layers"]
        Qwen3Config.from_hf(values)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        Qwen3Config.from_hf(tmp_path)


@pytest.mark.parametrize("scaling", [YARN, {"rope_type": "linear", "factor": 8.0}])
def test_scaled_frequencies_equal_transformers(scaling, fixtures_dir):
    expected = np.load(fixtures_dir / "qwen3_rope.npz")
    frequencies, factor = Qwen3Config.preset("qwen3-8b", rope_scaling=scaling).rope_frequencies()
    np.testing.assert_allclose(frequencies, expected[scaling["rope_type"]], rtol=1e-6)
    assert factor == pytest.approx(float(expected[scaling["rope_type"] + "_factor"]), rel=1e-9)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, 0.1 * np.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1)),
    ],
)
def test_yarn_attention_factor(options, expected):
    _, factor = Qwen3Config.preset("qwen3-8b", rope_scaling={**YARN, **options}).rope_frequencies()
    assert factor == pytest.approx(expected)
