"""What the model bench compares and when it says that its aim is met."""

import pytest

from bench.model_step import compare, product_flops

SHAPE = (8, 128, 128)


def test_the_bound_is_that_of_the_products_alone():
    # By hand: a layer has 512 x (16 + 8) x 64 + 3 x 512 x 1536 weights, the head, for half of the tokens,
    # 8192 x 512; six operations each.
    assert product_flops(*SHAPE) == 6 * 8 * (8 * 3_145_728 * 256 + 4_194_304 * 128)
    found = compare({"envace_jax": 400.0}, 100e9, SHAPE)
    assert found["bound_tokens_per_s"] == pytest.approx(611.4, abs=0.2)
    assert found["of_bound"] == pytest.approx(0.654, abs=1e-3)
    assert "met" not in found  # nothing to compare with was measured


@pytest.mark.parametrize(
    "ours, tunix, aim, met",
    [
        (400.0, 290.0, 406.0, False),
        (410.0, 290.0, 406.0, True),
        (490.0, 400.0, 489.1, True),
        (480.0, 400.0, 489.1, False),
    ],
)
def test_the_aim_is_the_lower_of_tunix_and_the_bound(ours, tunix, aim, met):
    found = compare({"envace_jax": ours, "tunix": tunix, "hf": 100.0}, 100e9, SHAPE)
    assert found["aim_tokens_per_s"] == pytest.approx(aim, abs=0.2) and found["met"] is met
    assert found["ratio"] == {"tunix": round(ours / tunix, 3), "hf": ours / 100}
