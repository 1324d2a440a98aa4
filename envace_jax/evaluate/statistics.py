"""Shares with their uncertainty."""

from __future__ import annotations

import math
from typing import NamedTuple

Z95 = 1.959963984540054  # the standard normal's 97.5 % point


class Share(NamedTuple):
    """`hits` of `count`, with the Wilson score interval `low`..`high` at 95 %."""

    hits: int
    count: int
    value: float
    low: float
    high: float


def share(hits: int, count: int) -> Share:
    """The share of hits and its Wilson score interval (Wilson 1927, eq. 5); of nothing, 0 within 0..1."""
    if count == 0:
        return Share(0, 0, 0.0, 0.0, 1.0)
    p, z2 = hits / count, Z95**2
    centre = (p + z2 / (2 * count)) / (1 + z2 / count)
    reach = Z95 * math.sqrt(p * (1 - p) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    # The exact ends at 0 and 1 are 0 and 1; rounding must not put the share outside of its interval.
    return Share(hits, count, p, min(max(0.0, centre - reach), p), max(min(1.0, centre + reach), p))
