"""What episodes wait for, verdicts and answers from elsewhere: at once, or in threads while the others go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from functools import partial
from typing import Any

from envace_jax.errors import EnvaceError
from envace_jax.rewards import TurnVerdict
from envace_jax.rollout.endpoint import Endpoint
from envace_jax.rollout.episode import Answer, Episode


class Bench:
    """Episodes that wait, by slot: for a verdict where they have replied, else for the answers to what they asked.

    Args:
        judge_pool: where verdicts are waited for; None: they are had at once.
        endpoint, pool: who answers, and where that is waited for; without an endpoint nobody asks here.
    """

    def __init__(
        self, judge_pool: Executor | None = None, endpoint: Endpoint | None = None, pool: Executor | None = None
    ):
        self._judge_pool = judge_pool
        self._endpoint = endpoint
        self._pool = pool
        self._ready: dict[int, Episode] = {}
        self._asked: dict[Future, tuple[int, Episode, Callable[[], Any]]] = {}

    def submit(self, slot: int, episode: Episode) -> None:
        """Ask for the verdict on the user turn that `episode` has just ended, or for its responses."""
        if episode.replied:
            pool, job, settle = self._judge_pool, episode.verdict, _settle
        else:
            pool, job, settle = self._pool, partial(self._endpoint.complete, episode.asked), _answer
        if pool is None:
            settle(episode, job)
            self._ready[slot] = episode
        else:
            self._asked[pool.submit(job)] = slot, episode, settle

    def collect(self, block: bool) -> list[int]:
        """The slots whose wait is over, their episodes settled. `block`: wait for one if any is asked for."""
        if self._asked:
            done, _ = wait(self._asked, timeout=None if block and not self._ready else 0, return_when=FIRST_COMPLETED)
            for future in done:
                slot, episode, settle = self._asked.pop(future)
                settle(episode, future.result)
                self._ready[slot] = episode
        slots = sorted(self._ready)
        self._ready.clear()
        return slots


def _settle(episode: Episode, verdict: Callable[[], TurnVerdict]) -> None:
    try:
        episode.settle(verdict())
    except (EnvaceError, OSError):  # no verdict is not a zero
        episode.abandon("judge_failed")


def _answer(episode: Episode, texts: Callable[[], list[str]]) -> None:
    try:
        episode.rehearsed([Answer(text) for text in texts()])
    except (EnvaceError, OSError):  # the endpoint failed, not the policy
        episode.abandon("world_failed")
