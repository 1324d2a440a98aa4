"""The judge of a run: who gives verdicts, the threads that wait for them, and how many may fail to come."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from envace_jax.config import RewardConfig
from envace_jax.errors import EndpointError
from envace_jax.rewards import make_judge, require_verdicts
from envace_jax.rollout.trajectory import Trajectory


class Judging:
    """`judge` and `pool` are for `run_episodes`: with an LLM as judge, verdicts are waited for in the pool while other
    episodes are sampled. Close it, or use it as a context, so that nobody waits for a verdict that is no longer wanted.

    Args:
        config: section `reward`.
        directory: of the run, where verdicts are kept.
        unruled: the id of a task that has an item without a rule, if there is one.
        episodes: at most how many are sampled at a time.
        process: of this host; each writes its verdicts to a file of its own.

    Raises ConfigError for a task that cannot be judged.
    """

    def __init__(self, config: RewardConfig, directory: Path, *, unruled: str | None, episodes: int, process: int = 0):
        self._config = config
        self.judge = make_judge(config, directory, unruled=unruled, process=process)
        self.pool: Executor | None = None
        if self.judge.waits:
            self.pool = ThreadPoolExecutor(episodes, thread_name_prefix="verdict")

    def __enter__(self) -> Judging:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Those who wait get no verdict; the verdicts so far are on disk."""
        self.judge.close()
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def check(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The figures of a step's judging. Raises EndpointError when too many episodes have no verdict, or ended
        because a call had no answer: training on the rest would be noise."""
        episodes = {t.trajectory: t for t in trajectories}.values()
        unanswered = sum(t.finish == "world_failed" for t in episodes)
        if unanswered > self._config.max_unjudged_fraction * len(episodes):
            raise EndpointError(
                f"{unanswered} of {len(episodes)} episodes ended at a call that had no answer, more than "
                f"reward.max_unjudged_fraction={self._config.max_unjudged_fraction:g}. "
                "See that world.endpoint answers, and start again"
            )
        unjudged = sum(not t.valid and t.finish != "world_failed" for t in episodes)
        require_verdicts(unjudged, len(episodes), self._config, self.judge)
        return self.judge.metrics()
