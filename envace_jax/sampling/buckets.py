"""Buckets: the few static shapes that keep the number of compiled programs fixed.

A ladder doubles, goes up by half steps (64, 96, 128, 192, ...) where at most a third of a padded length should be
padding, or in larger steps where a program costs more than padding does; the number of its rungs grows with the
logarithm of the longest length.
"""

from collections.abc import Iterator


def ladder(start: int, stop: int, halves: bool = True, factor: int = 2) -> tuple[int, ...]:
    """Rungs `start, 1.5 start, 2 start, 3 start, ...` below `stop`, then `stop`; without `halves` by `factor` only."""
    rungs = []
    rung = min(start, stop)
    while rung < stop:
        rungs.append(rung)
        if halves and rung + rung // 2 < stop:
            rungs.append(rung + rung // 2)
        rung *= factor
    return (*rungs, stop)


def fit(size: int, rungs: tuple[int, ...]) -> int:
    """The smallest rung that holds `size`. Raises ValueError when none does."""
    for rung in rungs:
        if size <= rung:
            return rung
    raise ValueError(f"size {size} exceeds the largest bucket, {rungs[-1]}")


def row_buckets(largest: int, smallest: int = 1, factor: int = 2) -> list[int]:
    """The batch sizes that `row_batches` makes."""
    buckets = [min(smallest, largest)]
    while buckets[-1] * factor <= largest:
        buckets.append(buckets[-1] * factor)
    return buckets


def row_batches(count: int, largest: int, smallest: int = 1, factor: int = 2) -> Iterator[tuple[int, int]]:
    """Split `count` rows into `(rows, bucket)`, buckets as `row_buckets`, with a quarter of one idle at most.

    Two full small batches are cheaper than one large batch that is mostly padding: 9 rows go as 8 + 1. Below
    `smallest`, a power of two, padding costs less than one more program would.
    """
    buckets = row_buckets(largest, smallest, factor)
    while count > 0:
        full = max((bucket for bucket in buckets if bucket <= count), default=buckets[0])
        above = [bucket for bucket in buckets if bucket > count and 4 * count >= 3 * bucket]
        bucket = above[0] if above else full
        rows = min(count, bucket)
        yield rows, bucket
        count -= rows
