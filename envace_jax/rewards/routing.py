"""Which judge answers what: rules where an item carries one, an LLM for the others, as the configuration says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envace_jax.errors import ConfigError, EndpointError
from envace_jax.rewards.cache import VerdictCache
from envace_jax.rewards.checklist import Judge, Question
from envace_jax.rewards.llm import LLMJudge
from envace_jax.rewards.rules import RuleJudge

if TYPE_CHECKING:  # the configuration imports jax
    from envace_jax.config import RewardConfig

CACHE = "verdicts.jsonl"


class RoutedJudge:
    """Items with a rule are answered by it, the others by `llm`; without one they have no verdict."""

    def __init__(self, llm: LLMJudge | None = None, rules: Judge | None = None):
        self.llm, self._rules = llm, RuleJudge() if rules is None else rules

    @property
    def waits(self) -> bool:
        """Whether an answer may take long, so that it is better waited for in a thread."""
        return self.llm is not None

    def answer(self, questions: Sequence[Question]) -> list[bool | None]:
        ruled = [i for i, question in enumerate(questions) if question.item.rule is not None]
        asked = [i for i, question in enumerate(questions) if question.item.rule is None]
        verdicts: list[bool | None] = [None] * len(questions)
        for judge, chosen in ((self._rules, ruled), (self.llm, asked)):
            if judge is not None and chosen:
                for i, verdict in zip(chosen, judge.answer([questions[i] for i in chosen]), strict=True):
                    verdicts[i] = verdict
        return verdicts

    def metrics(self) -> dict[str, float]:
        """`judge/*` since the last call; nothing where no LLM is asked."""
        return {} if self.llm is None else self.llm.metrics()

    def close(self) -> None:
        """Callers that still wait get no verdict."""
        if self.llm is not None:
            self.llm.close()


def make_judge(
    config: RewardConfig, directory: str | Path | None = None, *, unruled: str | None = None, process: int = 0
) -> RoutedJudge:
    """The judge that a configuration names.

    Args:
        config: section `reward`.
        directory: of the run, where verdicts are kept unless `reward.cache` says otherwise; None: in memory.
        unruled: the id of a task that has an item without a rule, if there is one.
        process: of several that share the directory; each writes a file of its own and reads all of them.

    Raises ConfigError when such a task cannot be judged because no endpoint is configured.
    """
    endpoint = config.judge
    urls = list(dict.fromkeys([*([endpoint.base_url] if endpoint.base_url else []), *config.endpoints]))
    if not urls:
        if unruled is not None:
            raise ConfigError(
                f"task {unruled!r} has checklist items that only a judge can answer, and none is configured: "
                "set reward.judge.base_url and reward.judge.model"
            )
        return RoutedJudge()
    if endpoint.model is None:
        raise ConfigError("reward.judge.model must be set when reward.judge.base_url is: the name the endpoint knows")
    path = config.cache or (None if directory is None else Path(directory) / CACHE)
    if path is not None and process:
        path = Path(path).with_stem(f"{Path(path).stem}-{process}")
    return RoutedJudge(
        LLMJudge(
            urls,
            endpoint.model,
            cache=VerdictCache(path),
            api_key=os.environ.get(endpoint.api_key_env),
            temperature=endpoint.temperature,
            top_p=endpoint.top_p,
            max_new_tokens=endpoint.max_new_tokens,
            timeout_s=endpoint.timeout_s,
            tries=endpoint.tries,
            max_in_flight=endpoint.max_in_flight,
        )
    )


def require_verdicts(unjudged: int, episodes: int, config: RewardConfig, judge: RoutedJudge) -> None:
    """Raises EndpointError when too many of a step's episodes have no verdict: training on the rest would be noise."""
    share = unjudged / episodes if episodes else 0.0
    if share <= config.max_unjudged_fraction:
        return
    reason = judge.llm.last_error if judge.llm is not None else None
    because = f"the last failed request: {reason}" if reason else "their items have rules of an unknown kind"
    raise EndpointError(
        f"{unjudged} of {episodes} episodes have no verdict, more than reward.max_unjudged_fraction="
        f"{config.max_unjudged_fraction:g}; {because}. See that reward.judge answers, and start again: "
        "verdicts so far are kept"
    )
