"""Few shapes, little padding."""

import pytest

from envace_jax.sampling.buckets import fit, ladder, row_batches, row_buckets


def test_ladders_reach_exactly_to_the_end():
    assert ladder(64, 400) == (64, 96, 128, 192, 256, 384, 400)
    assert ladder(64, 400, halves=False) == (64, 128, 256, 400)
    assert ladder(32, 600, halves=False, factor=4) == (32, 128, 512, 600)
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


def test_row_batches_make_the_listed_buckets():
    assert row_buckets(28, 4) == [4, 8, 16] and row_buckets(128, 8, factor=4) == [8, 32, 128]
    assert list(row_batches(40, 128, 8, factor=4)) == [(32, 32), (8, 8)]
    assert list(row_batches(100, 128, 8, factor=4)) == [(100, 128)]
    for factor in (2, 4):
        made = {bucket for count in range(1, 200) for _, bucket in row_batches(count, 128, 8, factor)}
        assert made == set(row_buckets(128, 8, factor))
