"""Verdicts on user turns: at once, or in a pool of threads while the other episodes go on."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait

from envace_jax.errors import EnvaceError
from envace_jax.rewards import TurnVerdict
from envace_jax.rollout.episode import Episode


class Bench:
    """Episodes that wait for a verdict, by slot. A slot parks here for as long as its judge takes."""

    def __init__(self, pool: Executor | None = None):
        self._pool = pool
        self._ready: dict[int, Episode] = {}
        self._asked: dict[Future[TurnVerdict], tuple[int, Episode]] = {}

    def submit(self, slot: int, episode: Episode) -> None:
        """Ask for the verdict on the user turn that `episode` has just ended."""
        if self._pool is None:
            _settle(episode, episode.verdict)
            self._ready[slot] = episode
        else:
            self._asked[self._pool.submit(episode.verdict)] = slot, episode

    def collect(self, block: bool) -> list[int]:
        """The slots whose verdicts have come, their episodes settled. `block`: wait for one if any is asked for."""
        if self._asked:
            done, _ = wait(self._asked, timeout=None if block and not self._ready else 0, return_when=FIRST_COMPLETED)
            for future in done:
                slot, episode = self._asked.pop(future)
                _settle(episode, future.result)
                self._ready[slot] = episode
        slots = sorted(self._ready)
        self._ready.clear()
        return slots


def _settle(episode: Episode, verdict) -> None:
    try:
        episode.settle(verdict())
    except (EnvaceError, OSError):  # no verdict is not a zero
        episode.abandon("judge_failed")
