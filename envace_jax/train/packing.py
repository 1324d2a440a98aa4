"""Trajectories into rows: first-fit packing, one segment per sequence, nothing truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envace_jax.errors import EnvaceError
from envace_jax.grpo import TokenBatch
from envace_jax.rollout.trajectory import Trajectory


class PackingError(EnvaceError, ValueError):
    """A trajectory is longer than the rows."""


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Mapping[int, float]],
    row_length: int,
    *,
    rows_multiple: int = 1,
) -> TokenBatch:
    """Rows [B, row_length] that hold every trajectory once, as NumPy arrays; B is a multiple of `rows_multiple`.

    Longest first, each into the first row with room. Several segments of one trajectory stay in one row.

    Args:
        trajectories: to pack; `old_logps` is left None, `behavior_logps` is carried.
        advantages: for each trajectory, the advantage of each of its generations, by number; missing ones are 0.
        row_length: width of the rows.
        rows_multiple: rows of padding are added to reach a multiple of it (of micro-batch times data shards, say).

    Raises PackingError naming the trajectory that does not fit.
    """
    order = sorted(range(len(trajectories)), key=lambda i: -len(trajectories[i]))
    free: list[int] = []
    places: list[tuple[int, int, int]] = []  # trajectory, row, start
    for i in order:
        length = len(trajectories[i])
        if length > row_length:
            raise PackingError(
                f"trajectory of task {trajectories[i].task_id!r} has {length} tokens, a row {row_length}: "
                "raise train.row_length or lower rollout.max_length"
            )
        row = next((r for r, room in enumerate(free) if room >= length), None)
        if row is None:
            row = len(free)
            free.append(row_length)
        places.append((i, row, row_length - free[row]))
        free[row] -= length

    rows = -(-max(len(free), 1) // rows_multiple) * rows_multiple
    integers = {name: np.zeros((rows, row_length), np.int32) for name in _INTEGERS}
    floats = {name: np.zeros((rows, row_length), np.float32) for name in ("advantages", "behavior_logps")}
    last_segment = np.zeros(rows, np.int32)
    for i, row, start in places:
        t = trajectories[i]
        at = np.s_[row, start : start + len(t)]
        segments = np.ones(len(t), np.int32) if t.segments is None else np.asarray(t.segments, np.int32)
        integers["tokens"][at] = t.tokens
        integers["roles"][at] = t.roles
        integers["generations"][at] = t.generations
        integers["positions"][at] = _positions(segments)
        integers["segments"][at] = segments - segments[0] + 1 + last_segment[row]
        last_segment[row] = integers["segments"][at][-1]
        by_generation = np.zeros(int(t.generations.max(initial=0)) + 1, np.float32)
        for generation, advantage in advantages[i].items():
            by_generation[generation] = advantage
        floats["advantages"][at] = by_generation[t.generations]
        floats["behavior_logps"][at] = t.behavior_logps
    return TokenBatch(**integers, **floats)


def pad_fraction(batch: TokenBatch) -> float:
    """Share of the batch's places that hold no token."""
    return float(np.mean(np.asarray(batch.segments) == 0))


def balance_rows(
    batch: TokenBatch, trained: np.ndarray, shards: int, micro_batch: int
) -> tuple[TokenBatch, np.ndarray]:
    """The same rows in an order in which all data shards have about as many tokens of each micro-batch to attend to.

    Rows go to micro-batches by their number of tokens, the fullest first, and within one to the shards there and back,
    so that each gets full rows and emptier ones. Rows without anything to train come last, as `place_batch` wants them.

    Args:
        batch: [B, T]. trained: bool[B].
        shards: data shards; shard k gets rows k x micro_batch ... of each micro-batch.
        micro_batch: rows of a micro-batch on each shard.
    """
    filled = (np.asarray(batch.segments) > 0).sum(axis=1)
    order = np.lexsort((-filled, ~trained)).tolist()
    if shards > 1:
        rows = shards * micro_batch
        order += [-1] * (-len(order) % rows)  # -1: a row of padding
        balanced = []
        for start in range(0, len(order), rows):
            piece = order[start : start + rows]
            hands: list[list[int]] = [[] for _ in range(shards)]
            for turn in range(micro_batch):
                dealt = piece[turn * shards : (turn + 1) * shards]
                for hand, row in zip(hands if turn % 2 == 0 else hands[::-1], dealt, strict=True):
                    hand.append(row)
            balanced += [row for hand in hands for row in hand]
        order = balanced

    def reorder(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        return np.concatenate([x, np.zeros((1, *x.shape[1:]), x.dtype)])[order]

    values = {name: None if x is None else reorder(x) for name, x in vars(batch).items()}
    return TokenBatch(**values), reorder(trained)


_INTEGERS = ("tokens", "positions", "segments", "roles", "generations")


def _positions(segments: np.ndarray) -> np.ndarray:
    starts = np.flatnonzero(np.diff(segments, prepend=segments[0] - 1))
    return (np.arange(len(segments)) - np.repeat(starts, np.diff([*starts, len(segments)]))).astype(np.int32)
