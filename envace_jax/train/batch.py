"""From episodes to what the update learns from: advantages, packed rows, and the figures of the episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from envace_jax.config import AdvantageConfig, TrainConfig
from envace_jax.grpo import ACT, CONTEXT, REHEARSE, TokenBatch, groups_with_signal, role_advantages
from envace_jax.rollout.trajectory import Trajectory
from envace_jax.train.outline import Outline
from envace_jax.train.packing import pack

FULL_REWARD = 1.0 - 1e-6


def assign_advantages(trajectories: Sequence[Trajectory | Outline], config: AdvantageConfig) -> list[dict[int, float]]:
    """The advantage of every generation of every trajectory, by its number; 0 where the trajectory is not valid."""
    columns = [
        (i, generation, role, t.reward - t.penalties.get(generation, 0.0))
        for i, t in enumerate(trajectories)
        for generation, role in t.generation_roles().items()
    ]
    result: list[dict[int, float]] = [{} for _ in trajectories]
    if not columns:
        return result
    advantages = role_advantages(
        [reward for *_, reward in columns],
        [trajectories[i].group for i, *_ in columns],
        [trajectories[i].trajectory for i, *_ in columns],
        [role for _, _, role, _ in columns],
        valid=[trajectories[i].valid for i, *_ in columns],
        baseline=config.baseline,
        by_role=config.by_role,
        scale_by_std=config.scale_by_std,
        leave_one_out=config.leave_one_out,
    )
    for (i, generation, *_), advantage in zip(columns, advantages, strict=True):
        result[i][generation] = float(advantage)
    return result


def make_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[dict[int, float]],
    row_length: int,
    train: TrainConfig,
    roles: Sequence[int] = (ACT, REHEARSE),
) -> tuple[TokenBatch, np.ndarray]:
    """The valid trajectories as rows [B, T] on the host, and which rows have something to learn, bool[B].

    The tokens of a role that `train` freezes, or that is not among `roles`, become context: they stay in view and are
    not trained.
    """
    kept = [i for i, t in enumerate(trajectories) if t.valid]
    batch = pack([trajectories[i] for i in kept], [advantages[i] for i in kept], row_length)
    frozen = [
        role for role, trained in ((ACT, train.act), (REHEARSE, train.rehearse)) if not trained or role not in roles
    ]
    if frozen:
        roles = np.where(np.isin(batch.roles, frozen), CONTEXT, batch.roles)
        batch = TokenBatch(**{**vars(batch), "roles": roles})
    return batch, np.asarray(batch.roles != CONTEXT).any(axis=1)


def episode_metrics(trajectories: Sequence[Trajectory | Outline]) -> dict[str, float]:
    """What came of a step's episodes. Rewards are of valid ones; `tokens/*` are all that was sampled."""
    episodes = list({(t.group, t.trajectory): t for t in reversed(trajectories)}.values())[::-1]
    valid = [t for t in episodes if t.valid]
    rewards = np.asarray([t.reward for t in valid], np.float64)
    groups = [t.group for t in valid]
    mixed = (
        {g for g, signal in zip(groups, groups_with_signal(rewards, groups), strict=True) if signal} if valid else ()
    )
    metrics = {
        "reward/mean": float(rewards.mean()) if valid else float("nan"),
        "reward/std": float(rewards.std()) if valid else float("nan"),
        "reward/full_fraction": float((rewards >= FULL_REWARD).mean()) if valid else float("nan"),
        "episodes/count": float(len(episodes)),
        "episodes/valid_fraction": len(valid) / max(len(episodes), 1),
        "episodes/mixed_groups": len(mixed) / max(len(set(groups)), 1),
        "episodes/tokens": sum(map(len, episodes)) / max(len(episodes), 1),
        "episodes/generations": sum(len(t.generation_roles()) for t in trajectories) / max(len(episodes), 1),
        "tokens/act": float(sum(t.sampled(ACT) for t in trajectories)),
        "tokens/rehearse": float(sum(t.sampled(REHEARSE) for t in trajectories)),
    }
    for reason, count in sorted(Counter(t.finish for t in episodes).items()):
        metrics[f"finish/{reason}"] = count / len(episodes)
    return metrics
