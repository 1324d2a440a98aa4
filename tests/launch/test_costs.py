"""Operations and parameters by formula."""

import dataclasses

import jax
import pytest
from flax import nnx

from envace_jax.config import Config, MeshConfig
from envace_jax.grpo import GRPOConfig
from launch import costs, parse_topology
from models.qwen3 import Qwen3, Qwen3Config

CONFIG = Config(model="qwen3-8b", output_dir="out")


# Hugging Face's model cards: 0.6B, 1.7B, 8.2B, 14.8B, 32.8B.
@pytest.mark.parametrize(
    ("preset", "billions"), [("0.6b", 0.6), ("1.7b", 1.7), ("8b", 8.2), ("14b", 14.8), ("32b", 32.8)]
)
def test_parameters_are_those_of_the_model_card(preset, billions):
    assert round(costs.parameter_count(Qwen3Config.preset(f"qwen3-{preset}")) / 1e9, 1) == billions


def test_parameters_are_those_of_the_model(tiny_qwen3_config):
    model = nnx.eval_shape(lambda: Qwen3(tiny_qwen3_config, rngs=nnx.Rngs(0)))
    assert costs.parameter_count(tiny_qwen3_config) == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


def test_forward_flops_by_hand():
    model = Qwen3Config(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
    )
    # One layer: q 4x4, k and v 4x2, o 4x4, three 4x6. Head: 4x10. Attention: half of 2 x 2 x 5 x 5 x (2 heads x 2).
    layer = 16 + 8 + 8 + 16 + 3 * 24
    assert costs.forward_flops(model, rows=7, length=5) == 7 * (2 * 5 * (3 * layer + 40) + 3 * 2 * 25 * 4)


def test_a_step_is_three_forward_passes_and_recomputation_a_fourth():
    model = Qwen3Config.preset("qwen3-0.6b")
    forward = costs.forward_flops(model, 2, 128)
    assert costs.step_flops(CONFIG, model, 2, 128) == (3 * forward, 4 * forward)
    kept = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, remat=False))
    assert costs.step_flops(kept, model, 2, 128) == (3 * forward, 3 * forward)


def test_what_layers_keep_by_policy():
    model = Qwen3Config.preset("qwen3-8b")

    def kept(remat, tp=1):
        changed = dataclasses.replace(CONFIG.train, remat=remat, micro_batch=1, row_length=20_000)
        return costs.kept_bytes(dataclasses.replace(CONFIG, train=changed), model, tp)

    assert kept(True) == kept("layer") == 2 * 20_000 * 36 * 4096
    # Its input, q k v, attention, o, gate and up, down: 4096 + 6144 + 4096 + 4096 + 24576 + 4096 numbers a token and
    # layer.
    assert kept("dots") == 2 * 20_000 * 36 * 47_104
    assert kept("dots", tp=8) == 2 * 20_000 * 36 * (3 * 4096 + 34_816 // 8)
    assert kept("offload") == 0 and kept("none") == kept(False) > kept("dots")


def test_the_reference_policy_costs_one_more_pass():
    model = Qwen3Config.preset("qwen3-0.6b")
    with_reference = dataclasses.replace(CONFIG, grpo=GRPOConfig(kl="k3", kl_coef=1e-4))
    assert costs.step_flops(with_reference, model, 1, 128)[0] == 4 * costs.forward_flops(model, 1, 128)


def test_time_is_that_of_the_slower_of_arithmetic_and_links():
    slice_ = parse_topology("v5p-64")  # 32 chips of 459 TFLOP/s, links of 600 GB/s
    assert costs.step_seconds(32 * 459e12, 0, slice_) == pytest.approx(1 / costs.EFFICIENCY)
    assert costs.step_seconds(1, 1200e9, slice_) == pytest.approx(2.0)


def test_more_rows_and_fewer_chips_are_guessed_to_take_more():
    model = Qwen3Config.preset("qwen3-8b")
    wide = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, micro_batch=16))
    narrow = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, micro_batch=1))
    assert costs.guess_peak(wide, model, 1, 32, 1).train > costs.guess_peak(narrow, model, 1, 32, 1).train
    assert costs.guess_peak(CONFIG, model, 1, 8, 1).peak > costs.guess_peak(CONFIG, model, 1, 32, 1).peak


def test_what_lies_on_a_chip_by_hand():
    model, setting = Qwen3Config.preset("qwen3-8b"), dataclasses.replace(CONFIG.rollout, max_length=20_480)
    config = dataclasses.replace(CONFIG, rollout=dataclasses.replace(setting, tasks_per_step=16, group_size=4))
    count, row = costs.parameter_count(model), 36 * 20_480 * 2 * 8 * 128 * 2
    # One host of four chips: float32 parameters and two moments, and all 64 rows of the cache.
    assert costs.floor_bytes(config, model, parse_topology("v5p-8"), 4) == 12 * count / 4 + 64 * row / 4
    # Two such hosts: each keeps half of the rows, and a copy in 16 bits over tp.
    assert (
        costs.floor_bytes(config, model, parse_topology("v5p-16"), 2) == 12 * count / 8 + 32 * row / 4 + 2 * count / 2
    )


def test_one_mesh_axis_may_take_the_rest():
    assert MeshConfig(data=1, fsdp=-1).fsdp == -1
