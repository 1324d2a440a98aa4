"""Rewards: checklists, verdicts by rule, and how verdicts become the reward of an episode."""

from envace_jax.rewards.checklist import Judge, Question, Step, TurnVerdict, episode_reward, judge_turn
from envace_jax.rewards.rules import RuleJudge

__all__ = ["Judge", "Question", "RuleJudge", "Step", "TurnVerdict", "episode_reward", "judge_turn"]
