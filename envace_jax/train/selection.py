"""What of a step's episodes is learned from: the length of episodes in their reward, and groups without signal.

A group whose rewards are all equal has no gradient. Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) leaves such
groups out and samples others in their place, for a limited number of rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from envace_jax.config import RewardConfig
from envace_jax.grpo import groups_with_signal, overlong_penalty
from envace_jax.rollout.trajectory import Trajectory
from envace_jax.train.outline import Outline

Episode = TypeVar("Episode", Trajectory, Outline)

# Refills take their tasks and draws from steps that no run comes to.
FIRST_REFILL = 1 << 24


def shape_rewards(trajectories: Sequence[Episode], config: RewardConfig, max_length: int) -> list[Episode]:
    """The trajectories as they are learned from, by `reward.overlong`.

    "mask": an episode that was cut by a budget is not valid. "shape": an episode's reward falls by up to 1 over the
    last `reward.overlong_buffer` tokens before `max_length` (DAPO, eq. 13). "keep": as they are.
    """
    if config.overlong == "mask":
        return [dataclasses.replace(t, valid=t.valid and t.finish != "length") for t in trajectories]
    if config.overlong == "shape":
        actors: dict[tuple[int, int], int] = {}
        for t in trajectories:
            actors.setdefault((t.group, t.trajectory), len(t))
        fines = overlong_penalty(list(actors.values()), max_length, config.overlong_buffer)
        fine = dict(zip(actors, fines.tolist(), strict=True))
        return [dataclasses.replace(t, reward=t.reward + fine[t.group, t.trajectory]) for t in trajectories]
    return list(trajectories)


def sample_with_signal(
    sample: Callable[[int], list[Episode]],
    step: int,
    *,
    groups: int,
    max_refills: int,
    shape: Callable[[Sequence[Episode]], list[Episode]],
) -> tuple[list[Episode], list[Episode]]:
    """All episodes that a step samples, and those it learns from: of at most `groups` groups, all with signal.

    Args:
        sample: step -> the episodes of its groups. Refills ask for steps from FIRST_REFILL on, so that they depend on
            the step alone.
        groups: how many are wanted.
        max_refills: how often others are sampled when there are fewer; 0: whatever was sampled first is learned from.
        shape: episodes as they are learned from (see `shape_rewards`).
    """
    everything = sample(step)
    learned = shape(everything)
    if not max_refills:
        return everything, learned
    kept = _with_signal(learned)
    for refill in range(max_refills):
        if len({t.group for t in kept}) >= groups:
            break
        fresh = _renumbered(sample(FIRST_REFILL + step * max_refills + refill), everything)
        everything = everything + fresh
        kept = kept + _with_signal(shape(fresh))
    first = list(dict.fromkeys(t.group for t in kept))[:groups]
    return everything, [t for t in kept if t.group in first]


def _with_signal(trajectories: Sequence[Episode]) -> list[Episode]:
    rewards, groups = [t.reward for t in trajectories], [t.group for t in trajectories]
    signal = groups_with_signal(rewards, groups, [t.valid for t in trajectories]) if trajectories else ()
    wanted = {group for group, has in zip(groups, signal, strict=True) if has}
    return [t for t in trajectories if t.group in wanted]


def _renumbered(fresh: Sequence[Episode], before: Sequence[Episode]) -> list[Episode]:
    group = max((t.group for t in before), default=-1) + 1
    number = max((t.trajectory for t in before), default=-1) + 1
    return [dataclasses.replace(t, group=t.group + group, trajectory=t.trajectory + number) for t in fresh]
