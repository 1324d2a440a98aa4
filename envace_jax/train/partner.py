"""The second copy of the policy where parameters are split by role (`world.split_parameters`): it rehearses.

It has state, optimizer and checkpoints of its own, under RUN/rehearser, and starts from the same model.
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

from envace_jax.train.checkpoint import Checkpoints, write_model_source
from envace_jax.train.state import TrainState, create_state
from models.qwen3 import Qwen3, Qwen3Config

DIRECTORY = "rehearser"


class Partner:
    """`state` is the current one; whoever updates it puts the next one there. `sampling` is the model that rehearses
    while a step is sampled."""

    def __init__(self, run: Path, *, keep: int | None):
        self.directory = run / DIRECTORY
        self._checkpoints = Checkpoints(self.directory, keep=keep)
        self.state: TrainState
        self.sampling: Qwen3

    def begin(
        self,
        source: Path,
        config: Qwen3Config,
        params: nnx.State,
        optimizer: optax.GradientTransformation,
        mesh: Mesh | None,
    ) -> None:
        """Start from a copy of `params`."""
        write_model_source(self.directory, source, config)
        self.state = create_state(jax.tree.map(jnp.copy, params), optimizer, mesh)

    def restore(self, like: TrainState, step: int) -> None:
        """Go on from `step`. Raises CheckpointError when it is not there."""
        self.state = self._checkpoints.restore(like, step)

    def save(self, metadata: Mapping[str, Any]) -> None:
        """Returns when the checkpoint is complete: the run's own must never be ahead of it."""
        self._checkpoints.save(self.state, metadata)
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()

    @staticmethod
    def metrics(figures: Mapping[str, float]) -> dict[str, float]:
        """The figures of its update: those of the rehearsal role as they are, the others as `rehearser/NAME`."""
        return {name if "rehearse" in name else f"rehearser/{name}": value for name, value in figures.items()}
