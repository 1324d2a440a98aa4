"""The second copy of the policy where parameters are split by role (`world.split_parameters`): it rehearses.

It has state, optimizer and checkpoints of its own, under RUN/rehearser (and in a directory of that name where
`train.checkpoints` is set), and starts from the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from envace_jax.train.checkpoint import Checkpoints
from envace_jax.train.state import TrainState, create_state
from models.qwen3 import Qwen3

DIRECTORY = "rehearser"


class Partner:
    """`state` is the current one; whoever updates it puts the next one there. `sampling` is the model that rehearses
    while a step is sampled."""

    def __init__(self, run: Path, *, place: str | None, keep: int | None):
        self.directory = run / DIRECTORY
        place = None if place is None else f"{place.rstrip('/')}/{DIRECTORY}"
        self._checkpoints = Checkpoints(self.directory, place=place, keep=keep)
        self.state: TrainState
        self.sampling: Qwen3

    def begin(self, params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh | None) -> None:
        """Start from a copy of `params`."""
        self.state = create_state(jax.tree.map(jnp.copy, params), optimizer, mesh)

    def restore(self, like: TrainState, step: int) -> None:
        """Go on from `step`. Raises CheckpointError when it is not there."""
        self.state = self._checkpoints.restore(like, step)

    def save(self, metadata: Mapping[str, Any]) -> None:
        """Returns when the checkpoint is complete: the run's own must never be ahead of it."""
        self._checkpoints.save(self.state, metadata)
        self._checkpoints.wait()

    def give_up(self) -> None:
        """After a failure to write."""
        self._checkpoints.give_up()

    def close(self) -> None:
        self._checkpoints.close()

    @staticmethod
    def metrics(figures: Mapping[str, float]) -> dict[str, float]:
        """The figures of its update: those of the rehearsal role as they are, the others as `rehearser/NAME`."""
        return {name if "rehearse" in name else f"rehearser/{name}": value for name, value in figures.items()}
