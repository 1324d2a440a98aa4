"""Test-time rehearsal: private plans in a rehearsed world, a memory of them, and what is then committed."""

from envace_jax.rehearse.commit import Course, Decision, DryRun, Guarded, act_task, act_turn, save_decisions
from envace_jax.rehearse.memory import Memory, condense, vote
from envace_jax.rehearse.plans import ACTOR, PLANNER, REHEARSER, Plan, Rehearsed, RehearseSettings, rehearse
from envace_jax.rehearse.policy import Ask, EndpointPolicy, LocalPolicy, Policy, Spoken, drive, together

__all__ = [
    "ACTOR",
    "PLANNER",
    "REHEARSER",
    "Ask",
    "Course",
    "Decision",
    "DryRun",
    "EndpointPolicy",
    "Guarded",
    "LocalPolicy",
    "Memory",
    "Plan",
    "Policy",
    "RehearseSettings",
    "Rehearsed",
    "Spoken",
    "act_task",
    "act_turn",
    "condense",
    "drive",
    "rehearse",
    "save_decisions",
    "together",
    "vote",
]
