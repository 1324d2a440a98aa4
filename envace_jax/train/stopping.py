"""How a run ends before its time: SIGTERM and Ctrl-C save what is done, a second Ctrl-C does not wait.

Steps are repeatable, so nothing is lost by leaving one unfinished: inside `at_once` (sampling, evaluation) a signal
breaks off where it is; elsewhere, where parameters are half updated, it is heeded at the end of the step. Several
processes must all stop at the same step: there a signal is agreed on behind the next repeatable part (see `processes`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# What the process returns: 75 (EX_TEMPFAIL) asks a scheduler to start it again.
EXIT_STATUS = {signal.SIGTERM: 75, signal.SIGINT: 130}


class StopRun(BaseException):
    """Raised where a signal breaks a repeatable part off; not an `Exception`, so that no retry swallows it."""


class Stopping:
    """Listens for signals while it is entered; `signal` is the one that came, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at_once = self._passed_on = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heed) for number in EXIT_STATUS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second one: do not wait
        self.signal = self.signal or signal.Signals(number)
        if self._at_once:
            raise StopRun

    def heed_from_afar(self, number: signal.Signals) -> None:
        """A signal that another process got; called from any thread."""
        if self.signal is not None or self._passed_on:
            return
        self._passed_on = True
        if self._before:  # as if it had come here: what is waited for is interrupted too
            signal.pthread_kill(threading.main_thread().ident, number)
        else:
            self.signal = number

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A part that may be broken off anywhere: it changes nothing that is kept."""
        before, self._at_once = self._at_once, True
        try:
            if self.signal is not None:
                raise StopRun
            yield
        finally:
            self._at_once = before

    def due(self) -> bool:
        """Whether to stop at the end of a step, on one process."""
        return self.signal is not None
