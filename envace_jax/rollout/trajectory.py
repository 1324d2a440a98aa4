"""The record everything meets in: what an episode sampled, exactly, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CONTEXT, ACT, REHEARSE = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One token sequence of an episode. In `inline` form an episode is one such sequence; in `simulator` form one for
    the actor plus one per rehearsal, tied by `trajectory`.

    tokens: int32[T]. roles: int8[T], 0 context, 1 act, 2 rehearse; a token is trained iff its role is not 0.
    generations: int32[T], 0 context, else which generation of the episode (1, 2, ...).
    segments: int32[T], 1, 2, ...; more than one where the history was rendered again at a user message.
    behavior_logps, log_kept_mass: float32[T], as sampled; 0 for context.
    reward: the episode's; `penalties` are taken from single generations' own.
    group: which task of the step. valid: False when infrastructure failed; such a record is left out everywhere.
    finish: why the episode ended (`done`, `malformed`, `error_tool_call`, `length`, `turns`, `checklist`, ...).
    """

    tokens: np.ndarray
    roles: np.ndarray
    generations: np.ndarray
    behavior_logps: np.ndarray
    log_kept_mass: np.ndarray | None = None
    segments: np.ndarray | None = None
    reward: float = 0.0
    penalties: Mapping[int, float] = field(default_factory=dict)
    group: int = 0
    trajectory: int = 0
    task_id: str = ""
    finish: str = "done"
    valid: bool = True
    messages: Sequence[Mapping[str, Any]] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("roles", "generations", "behavior_logps", "log_kept_mass", "segments"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(f"trajectory of {self.task_id!r}: {name} has {len(value)} entries for {length} tokens")

    def __len__(self) -> int:
        return len(self.tokens)

    def generation_roles(self) -> dict[int, int]:
        """The role of each generation, by number, in order."""
        index, first = np.unique(self.generations, return_index=True)
        return {int(g): int(self.roles[i]) for g, i in zip(index, first, strict=True) if g}

    def sampled(self, role: int) -> int:
        """How many tokens a role sampled."""
        return int((self.roles == role).sum())


class TokenStream:
    """Grows a `Trajectory` piece by piece: context as it is forced, generations as they are sampled."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._roles: list[int] = []
        self._generations: list[int] = []
        self._logps: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []
        self._segments: list[int] = []
        self.length = 0
        self.generations = 0
        self.segments = 1

    def segment(self) -> None:
        """What follows does not attend to what came before: the history is written anew."""
        self.segments += 1

    def context(self, tokens: np.ndarray) -> None:
        """Append tokens that were not sampled."""
        zeros = np.zeros(len(tokens), np.float32)
        self._append(tokens, CONTEXT, 0, zeros, zeros)

    def generation(
        self, role: int, tokens: np.ndarray, logps: np.ndarray | None = None, kept: np.ndarray | None = None
    ) -> int:
        """Append one sampled generation of a role and return its number (1, 2, ...)."""
        self.generations += 1
        zeros = np.zeros(len(tokens), np.float32)
        self._append(tokens, role, self.generations, zeros if logps is None else logps, zeros if kept is None else kept)
        return self.generations

    def finish(self, **fields: Any) -> Trajectory:
        """The trajectory; `fields` are those that are not per token."""
        lengths = [len(t) for t in self._tokens]
        return Trajectory(
            tokens=np.concatenate(self._tokens).astype(np.int32),
            roles=np.repeat(np.asarray(self._roles, np.int8), lengths),
            generations=np.repeat(np.asarray(self._generations, np.int32), lengths),
            behavior_logps=np.concatenate(self._logps).astype(np.float32),
            log_kept_mass=np.concatenate(self._kept).astype(np.float32),
            segments=np.repeat(np.asarray(self._segments, np.int32), lengths) if self.segments > 1 else None,
            **fields,
        )

    def _append(self, tokens: np.ndarray, role: int, generation: int, logps: np.ndarray, kept: np.ndarray) -> None:
        if len(tokens) != len(logps):
            raise ValueError(f"{len(tokens)} tokens with {len(logps)} log-probabilities")
        self._tokens.append(np.asarray(tokens, np.int32))
        self._roles.append(role)
        self._generations.append(generation)
        self._segments.append(self.segments)
        self._logps.append(np.asarray(logps, np.float32))
        self._kept.append(np.asarray(kept, np.float32))
        self.length += len(tokens)
