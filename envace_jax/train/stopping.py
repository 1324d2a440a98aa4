"""How a run ends before its time: SIGTERM and Ctrl-C save what is done, a second Ctrl-C does not wait.

Steps are repeatable, so nothing is lost by leaving one unfinished: inside `at_once` (sampling, evaluation) a signal
breaks off where it is; elsewhere, where parameters are half updated, it is heeded at the end of the step. On several
hosts all of them must stop at the same step, so there JAX's preemption sync point decides.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax

# What the process returns: 75 (EX_TEMPFAIL) asks a scheduler to start it again.
EXIT_STATUS = {signal.SIGTERM: 75, signal.SIGINT: 130}


class StopRun(BaseException):
    """Raised where a signal breaks a repeatable part off; not an `Exception`, so that no retry swallows it."""


class Stopping:
    """Listens for signals while it is entered; `signal` is the one that came, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at_once = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            # With several processes JAX's own handler must see SIGTERM.
            heeded = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else (signal.SIGINT,)
            self._before = {number: signal.signal(number, self._heed) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second one: do not wait
        self.signal = self.signal or signal.Signals(number)
        if self._at_once and jax.process_count() == 1:
            raise StopRun

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A part that may be broken off anywhere: it changes nothing that is kept."""
        self._at_once = True
        try:
            if self.signal is not None and jax.process_count() == 1:
                raise StopRun
            yield
        finally:
            self._at_once = False

    def due(self, step: int) -> bool:
        """Whether to stop after `step`; the same answer on every process."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self.signal = signal.SIGTERM
                return True
            return False
        return self.signal is not None
