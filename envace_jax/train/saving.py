"""Saving while training goes on, with a store that may fail for a while.

A checkpoint that could not be written is reported, and the next one tried when it is due. When `faults.saves_behind`
in a row have failed the run stops, with the last whole checkpoint to go on from. On several processes a checkpoint that
failed on one has failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from envace_jax.errors import CheckpointError
from envace_jax.train.checkpoint import Checkpoints
from envace_jax.train.job import Job
from envace_jax.train.processes import Processes
from envace_jax.train.state import TrainState

PAUSE_S = 5.0  # before a last checkpoint is tried again


class Saving:
    """Args: note: gets a line for each failure. saves_behind: how many failures in a row are borne."""

    def __init__(
        self,
        job: Job,
        checkpoints: Checkpoints,
        processes: Processes,
        *,
        saves_behind: int,
        note: Callable[[str], None],
    ):
        self._job, self._checkpoints, self._processes = job, checkpoints, processes
        self._allowed, self._note = saves_behind, note
        self._failed = 0

    def save(self, state: TrainState) -> None:
        """Starts a checkpoint; returns once the state may be donated. CheckpointError after too many failures."""
        self._try("saving", lambda: self._begin(state))

    def finish(self, state: TrainState) -> None:
        """Until a checkpoint of `state` is complete; tried again, with a pause, as often as failures are borne."""

        def complete() -> None:
            self._begin(state)
            self._checkpoints.wait()

        while not self._try("saving at the end", complete):
            time.sleep(PAUSE_S)

    def _begin(self, state: TrainState) -> None:
        if self._job.partner is not None:
            self._job.partner.save(self._job.metadata)
        self._checkpoints.save(state, self._job.metadata)

    def _try(self, what: str, work: Callable[[], None]) -> bool:
        def attempt() -> str | None:
            try:
                work()
            except Exception as error:  # a store fails in the words of its library
                return " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return None

        failures = self._processes.each(what, attempt)
        reason = next((f"process {i}: {text}" for i, text in enumerate(failures) if text is not None), None)
        if reason is None:
            self._failed = 0
            return True
        self._failed += 1
        self._checkpoints.reopen()
        where = self._checkpoints.directory
        latest = self._processes.each("looking for checkpoints", self._checkpoints.latest)[0]
        since = "none is complete" if latest is None else f"the last is that of step {latest}"
        if self._failed >= self._allowed:
            with self._processes.alike():
                raise CheckpointError(
                    f"{where}: {self._failed} checkpoints in a row could not be written ({reason}); {since}. Mend the "
                    "store and start again"
                )
        self._note(
            f"a checkpoint could not be written ({reason}); {since}; failure {self._failed} of "
            f"faults.saves_behind={self._allowed}, it is tried again"
        )
        return False
