"""Saving while training goes on, with a store that may fail for a while.

A checkpoint that could not be written is reported, and the next one tried when it is due. When `faults.saves_behind`
in a row have failed the run stops, with the last whole checkpoint to go on from. On several processes a checkpoint that
failed on one has failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from envace_jax.errors import CheckpointError
from envace_jax.train.checkpoint import Checkpoints
from envace_jax.train.gate import GIVEN_UP
from envace_jax.train.partner import Partner
from envace_jax.train.processes import Processes
from envace_jax.train.state import TrainState

PAUSE_S = 5.0  # before a last checkpoint is tried again


class Saving:
    """Args: metadata: is saved beside each state. partner: is saved with it. note: gets a line for each failure.
    saves_behind: how many failures in a row are borne."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        processes: Processes,
        *,
        metadata: Mapping[str, Any],
        partner: Partner | None = None,
        saves_behind: int,
        note: Callable[[str], None],
    ):
        self._checkpoints, self._processes = checkpoints, processes
        self._metadata, self._partner = metadata, partner
        self._allowed, self._note = saves_behind, note
        self._failed, self._begun = 0, False

    def save(self, state: TrainState) -> None:
        """Starts a checkpoint; returns once the state may be donated. CheckpointError after too many failures."""
        self._settle()
        self._begun = self._begin(state)

    def finish(self, state: TrainState) -> None:
        """Until a checkpoint of `state` is complete; tried again, with a pause, as often as failures are borne."""
        self._settle()
        while not (self._begin(state) and self._try("the end of saving", self._checkpoints.wait)):
            time.sleep(PAUSE_S)
        self._begun, self._failed = False, 0

    def _settle(self) -> None:
        """What was begun before is complete, or has failed. Orbax must find the same on all processes."""
        if self._begun and self._try("the checkpoint before", self._checkpoints.wait):
            self._failed = 0
        self._begun = False

    def _begin(self, state: TrainState) -> bool:
        """Whether it could be begun. Each part is agreed on by itself: within Orbax processes wait for each other."""
        partner, checkpoints = self._partner, self._checkpoints
        parts = [
            ("the store", lambda: checkpoints.probe(state)),
            *([] if partner is None else [("saving the rehearser", lambda: partner.save(self._metadata))]),
            ("saving", lambda: checkpoints.save(state, self._metadata)),
        ]
        return all(self._try(what, work) for what, work in parts)

    def _latest(self) -> int | None:
        try:
            return self._checkpoints.latest()
        except OSError:  # a store that cannot be read either
            return None

    def _try(self, what: str, work: Callable[[], None]) -> bool:
        def attempt() -> str | None:
            try:
                work()
            except Exception as error:  # a store fails in the words of its library
                return " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return None

        failures = self._processes.each(what, attempt)
        reasons = [f"process {i}: {text}" for i, text in enumerate(failures) if text is not None]
        if not reasons:
            return True
        reason = min(reasons, key=lambda text: GIVEN_UP in text)  # rather the cause than who was told of it
        self._failed += 1
        self._checkpoints.give_up()
        if self._partner is not None:
            self._partner.give_up()
        where = self._checkpoints.directory
        latest = self._processes.each("looking for checkpoints", self._latest)[0]
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
