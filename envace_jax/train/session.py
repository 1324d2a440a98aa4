"""What every training is within: the processes are alike, the run directory is theirs, signals are heeded, and what
goes wrong on one of them becomes known to all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jax.sharding import Mesh

from envace_jax.config import Config, SFTConfig
from envace_jax.train.job import device_mesh
from envace_jax.train.processes import Processes, processes
from envace_jax.train.record import claim
from envace_jax.train.start import check_alike
from envace_jax.train.stopping import Stopping
from envace_jax.train.watch import Watch

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """What is entered by `enter` is closed at the end, after the others have been told of an error."""

    processes: Processes
    mesh: Mesh | None
    stopping: Stopping
    watch: Watch
    stack: contextlib.ExitStack

    def enter(self, resource: AbstractContextManager[T]) -> T:
        return self.stack.enter_context(resource)


@contextlib.contextmanager
def session(config: Config | SFTConfig) -> Iterator[Session]:
    """Claims `config.output_dir` for the processes of this run. Raises as `check_alike` and `claim` do."""
    everyone = processes()
    with everyone.alike():
        mesh = device_mesh(config.mesh)
    check_alike(everyone, config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(everyone.together("claiming the run directory", lambda: claim(config)))
        everyone.wait_s = config.faults.wait_s  # until here nobody had much to do
        stopping = everyone.stopping = stack.enter_context(Stopping())
        stack.callback(setattr, everyone, "stopping", None)
        watch = stack.enter_context(Watch(everyone, Path(config.output_dir), heartbeat_s=config.faults.heartbeat_s))
        try:
            yield Session(everyone, mesh, stopping, watch, stack)
        except BaseException as error:
            watch.failed(error)
            raise
