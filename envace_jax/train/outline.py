"""What of an episode every process must know: enough for baselines, selection and figures, without its tokens.

Processes sample and pack their own episodes. Advantages need the rewards of the whole group, dynamic sampling needs all
groups, and both are computed on every process from the same outlines, in the same order: that of the episodes' numbers,
however many processes there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envace_jax.grpo import ACT, REHEARSE
from envace_jax.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class Outline:
    """One `Trajectory` without its tokens. `process` has it, as number `index` of those it sampled for the step."""

    process: int
    index: int
    group: int
    trajectory: int
    reward: float
    valid: bool
    finish: str
    length: int
    tokens: Mapping[int, int]  # how many each role sampled
    roles: Mapping[int, int]  # of the generations, by number
    penalties: Mapping[int, float]

    def __len__(self) -> int:
        return self.length

    def generation_roles(self) -> Mapping[int, int]:
        """As `Trajectory.generation_roles`."""
        return self.roles

    def sampled(self, role: int) -> int:
        """As `Trajectory.sampled`."""
        return self.tokens[role]

    def to_json(self) -> list[Any]:
        """Plain values; `from_json` takes them back."""
        return [list(value.items()) if isinstance(value, Mapping) else value for value in vars(self).values()]

    @classmethod
    def from_json(cls, values: list[Any]) -> Outline:
        return cls(*values[:-3], *(dict(pairs) for pairs in values[-3:]))


def outline(t: Trajectory, process: int, index: int) -> Outline:
    """Of a trajectory."""
    return Outline(
        process=process,
        index=index,
        group=t.group,
        trajectory=t.trajectory,
        reward=float(t.reward),
        valid=bool(t.valid),
        finish=t.finish,
        length=len(t),
        tokens={role: t.sampled(role) for role in (ACT, REHEARSE)},
        roles=t.generation_roles(),
        penalties={int(g): float(p) for g, p in t.penalties.items()},
    )


def filled(o: Outline, t: Trajectory) -> Trajectory:
    """The trajectory as its outline says it is learned from: numbered over all processes, its reward shaped."""
    return dataclasses.replace(t, group=o.group, trajectory=o.trajectory, reward=o.reward, valid=o.valid)
