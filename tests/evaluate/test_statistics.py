"""Shares and their intervals."""

import pytest

from envace_jax.evaluate import share


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_wilson_intervals_as_tabulated(hits, count, low, high):
    s = share(hits, count)
    assert (s.value, s.low, s.high) == pytest.approx((hits / count, low, high), abs=5e-5)


def test_of_nothing_nothing_is_known():
    assert share(0, 0) == (0, 0, 0.0, 0.0, 1.0)
