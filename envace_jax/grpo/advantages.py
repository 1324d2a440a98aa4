"""From rewards of generations to role-wise advantages, and the reward filters that come before them.

A *generation* is one turn of one role; `group` says which task it belongs to, `trajectory` which episode of that task.
The functions run on the host, on NumPy arrays of one entry per generation, in float64 inside and float32 outside.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

BASELINES = ("trajectory", "generation")
STD_EPS = 1e-6  # the release's guard in A / (std + eps)


def role_advantages(
    rewards: ArrayLike,
    group: ArrayLike,
    trajectory: ArrayLike,
    role: ArrayLike,
    *,
    valid: ArrayLike | None = None,
    baseline: str = "trajectory",
    by_role: bool = True,
    scale_by_std: bool = False,
    leave_one_out: bool = False,
) -> NDArray[np.float32]:
    """Reward minus the mean of its cell, A_m = R_m - mu_{x,r(m)} (EnvACE, arXiv 2608.06197; no division by std).

    A cell is the generations of one role in the group of one task; of both roles with `by_role=False`. A trajectory is
    known by its group and id, so ids may start again in every group.

    Args:
        rewards: [N] reward of each generation.
        group: [N] id of its task; any integers or strings.
        trajectory: [N] id of its trajectory within the group.
        role: [N] its role (1 act, 2 rehearse).
        valid: [N] false where infrastructure failed. Such a row moves nobody's baseline, has advantage 0, and its
            reward may be NaN. Default: all valid.
        baseline: what is counted once in mean and std. "trajectory": each trajectory of the cell, its value being the
            mean reward of its generations; a cell with one trajectory gets 0. "generation": each generation, as the
            release does; a cell with one generation keeps its raw reward.
        by_role: one baseline per role, or one for both.
        scale_by_std: divide by the standard deviation of the cell (n - 1) plus 1e-6, as GRPO (arXiv 2402.03300) does.
        leave_one_out: leave what is counted (the row's own trajectory, or the row itself) out of the row's mean
            (RLOO, arXiv 2402.14740).

    Returns:
        float32 [N]. Exactly 0 where all rewards of a cell are equal.

    Raises:
        ValueError: unknown `baseline`, shapes that differ, or a valid reward that is not finite.
    """
    if baseline not in BASELINES:
        raise ValueError(f"role_advantages: baseline = {baseline!r}: expected one of {BASELINES}")
    values = _vector("rewards", rewards).astype(np.float64)
    columns = {"group": group, "trajectory": trajectory, "role": role}
    ids = {name: _vector(name, column, len(values)) for name, column in columns.items()}
    kept = _kept(values, valid, "role_advantages")

    advantages = np.zeros(len(values), np.float32)
    if not kept.any():
        return advantages
    values, ids = values[kept], {name: column[kept] for name, column in ids.items()}

    cell = _dense_ids(ids["group"], ids["role"]) if by_role else _dense_ids(ids["group"])
    sample = _dense_ids(cell, ids["trajectory"]) if baseline == "trajectory" else np.arange(len(values))

    # Distances from the lowest reward of the cell, not the rewards: where all are equal every one is exactly 0,
    # and so is their mean, while the mean of 0.35 eight times need not be 0.35.
    lowest = np.full(cell.max() + 1, np.inf)
    np.minimum.at(lowest, cell, values)
    above = values - lowest[cell]

    sample_value = np.bincount(sample, above) / np.bincount(sample)
    sample_cell = np.zeros(len(sample_value), np.int64)
    sample_cell[sample] = cell
    count = np.bincount(sample_cell)
    total = np.bincount(sample_cell, sample_value)
    mean = total / count

    if leave_one_out:
        reference = (total[cell] - sample_value[sample]) / np.maximum(count - 1, 1)[cell]
    else:
        reference = mean[cell]
    singleton = values if baseline == "generation" else np.zeros_like(values)
    centred = np.where(count[cell] > 1, above - reference, singleton)

    if scale_by_std:
        squares = np.bincount(sample_cell, (sample_value - mean[sample_cell]) ** 2)
        std = np.sqrt(squares / np.maximum(count - 1, 1))
        std[count == 1] = 1.0  # one sample has no spread: left unscaled, as the release does
        centred = centred / (std[cell] + STD_EPS)

    advantages[kept] = centred
    return advantages


def groups_with_signal(rewards: ArrayLike, group: ArrayLike, valid: ArrayLike | None = None) -> NDArray[np.bool_]:
    """Rows of the groups whose valid rewards differ: the others have no gradient (dynamic sampling, DAPO 2503.14476).

    Args:
        rewards: [N] reward of each generation or trajectory.
        group: [N] id of its task.
        valid: [N] rows that count; default all.

    Returns:
        bool [N], usable as `valid`: true for the valid rows of a group in which two valid rewards differ.

    Raises:
        ValueError: shapes that differ, or a valid reward that is not finite.
    """
    values = _vector("rewards", rewards).astype(np.float64)
    cell = _dense_ids(_vector("group", group, len(values)))
    kept = _kept(values, valid, "groups_with_signal")
    cells = cell.max(initial=-1) + 1
    low, high = np.full(cells, np.inf), np.full(cells, -np.inf)
    np.minimum.at(low, cell[kept], values[kept])
    np.maximum.at(high, cell[kept], values[kept])
    return kept & (low < high)[cell]


def overlong_penalty(lengths: ArrayLike, max_length: int, buffer: int) -> NDArray[np.float32]:
    """Soft punishment of length, added to the reward (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - buffer, then (max_length - buffer - length) / buffer, and -1 from max_length on.

    Args:
        lengths: [N] sampled tokens.
        max_length: where the penalty reaches -1.
        buffer: tokens over which it grows, 0 < buffer <= max_length.

    Raises:
        ValueError: `buffer` outside that range.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong_penalty: buffer = {buffer}: expected 0 < buffer <= max_length = {max_length}")
    excess = _vector("lengths", lengths).astype(np.float64) - (max_length - buffer)
    return -np.clip(excess / buffer, 0.0, 1.0).astype(np.float32) + np.float32(0.0)


def overlong_mask(lengths: ArrayLike, max_length: int) -> NDArray[np.bool_]:
    """True for rows that ended before the budget; as `valid` it leaves truncated rows out (overlong filtering, DAPO).

    Args:
        lengths: [N] sampled tokens.
        max_length: the budget; a row of this length was cut.
    """
    return _vector("lengths", lengths) < max_length


def _vector(name: str, values: ArrayLike, length: int | None = None) -> NDArray:
    array = np.asarray(values)
    if array.ndim != 1 or (length is not None and len(array) != length):
        expected = "[N]" if length is None else f"[{length}] as rewards has"
        raise ValueError(f"{name} has shape {list(array.shape)}: expected {expected}")
    return array


def _kept(rewards: NDArray, valid: ArrayLike | None, caller: str) -> NDArray[np.bool_]:
    kept = np.ones(len(rewards), bool) if valid is None else _vector("valid", valid, len(rewards)).astype(bool)
    bad = np.flatnonzero(kept & ~np.isfinite(rewards))
    if len(bad):
        raise ValueError(
            f"{caller}: rewards[{bad[0]}] = {rewards[bad[0]]} in a valid row: expected a finite number; "
            "mark rows without a reward as not valid"
        )
    return kept


def _dense_ids(*columns: NDArray) -> NDArray[np.int64]:
    """Number the distinct rows of the columns 0, 1, 2, …, whatever their ids are."""
    ids = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        names, inverse = np.unique(column, return_inverse=True)
        ids = np.unique(ids * max(len(names), 1) + inverse.reshape(-1), return_inverse=True)[1].reshape(-1)
    return ids
