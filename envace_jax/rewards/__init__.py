"""Rewards: checklists, verdicts by rule or by an LLM, and how verdicts become the reward of an episode."""

from envace_jax.rewards.cache import VerdictCache
from envace_jax.rewards.checklist import Judge, Question, Step, TurnVerdict, episode_reward, judge_turn
from envace_jax.rewards.llm import LLMJudge
from envace_jax.rewards.routing import RoutedJudge, make_judge, require_verdicts
from envace_jax.rewards.rules import RuleJudge

__all__ = [
    "Judge",
    "LLMJudge",
    "Question",
    "RoutedJudge",
    "RuleJudge",
    "Step",
    "TurnVerdict",
    "VerdictCache",
    "episode_reward",
    "judge_turn",
    "make_judge",
    "require_verdicts",
]
