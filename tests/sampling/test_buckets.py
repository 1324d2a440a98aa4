"""Few shapes, little padding."""

import pytest

from envace_jax.sampling.buckets import fit, ladder, row_batches


def test_ladders_reach_exactly_to_the_end():
    assert ladder(64, 400) == (64, 96, 128, 192, 256, 384, 400)
    assert ladder(64, 400, halves=False) == (64, 128, 256, 400)
    assert ladder(64, 64) == (64,)
    assert ladder(64, 20) == (20,)


def test_fit_takes_the_smallest_rung_that_holds():
    assert [fit(n, (16, 24, 32)) for n in (1, 16, 17, 32)] == [16, 16, 24, 32]
    with pytest.raises(ValueError, match="33 exceeds the largest bucket, 32"):
        fit(33, (16, 24, 32))


def test_row_batches_waste_at_most_a_quarter():
    assert list(row_batches(9, 16)) == [(8, 8), (1, 1)]
    assert list(row_batches(7, 16)) == [(7, 8)]
    assert list(row_batches(5, 4)) == [(4, 4), (1, 1)]
    assert list(row_batches(11, 16, smallest=4)) == [(8, 8), (3, 4)]
    assert list(row_batches(1, 16, smallest=8)) == [(1, 8)]
    for count in range(1, 70):
        batches = list(row_batches(count, 16))
        assert sum(rows for rows, _ in batches) == count
        for rows, bucket in batches:
            assert bucket <= 16 and bucket & (bucket - 1) == 0 and 4 * rows >= 3 * bucket
