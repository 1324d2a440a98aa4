"""Buckets: the few static shapes that keep the number of compiled programs fixed.

A ladder doubles, or goes up by half steps (64, 96, 128, 192, ...) where at most a third of a padded length should be
padding; the number of its rungs grows with the logarithm of the longest length.
"""

from collections.abc import Iterator


def ladder(start: int, stop: int, halves: bool = True) -> tuple[int, ...]:
    """Rungs `start, 1.5 start, 2 start, 3 start, ...` below `stop`, then `stop`; without `halves` only the doubled."""
    rungs = []
    rung = min(start, stop)
    while rung < stop:
        rungs.append(rung)
        if halves and rung + rung // 2 < stop:
            rungs.append(rung + rung // 2)
        rung *= 2
    return (*rungs, stop)


def fit(size: int, rungs: tuple[int, ...]) -> int:
    """The smallest rung that holds `size`. Raises ValueError when none does."""
    for rung in rungs:
        if size <= rung:
            return rung
    raise ValueError(f"size {size} exceeds the largest bucket, {rungs[-1]}")


def row_batches(count: int, largest: int, smallest: int = 1) -> Iterator[tuple[int, int]]:
    """Split `count` rows into `(rows, bucket)` with power-of-two buckets up to `largest`, a quarter idle at most.

    Two full small batches are cheaper than one large batch that is mostly padding: 9 rows go as 8 + 1. Below
    `smallest`, a power of two, padding costs less than one more program would.
    """
    while count > 0:
        bucket = min(smallest, largest)
        while bucket * 2 <= min(count, largest):
            bucket *= 2
        if bucket < count and bucket * 2 <= largest and 4 * count >= 3 * 2 * bucket:
            bucket *= 2
        rows = min(count, bucket)
        yield rows, bucket
        count -= rows
