"""Episodes: who speaks next, where responses come from, and the record of what was sampled."""

from envace_jax.rollout.episode import Episode, Rules
from envace_jax.rollout.job import run
from envace_jax.rollout.recorded import encode_conversation
from envace_jax.rollout.runner import make_rules, run_episodes
from envace_jax.rollout.simulator import Simulator
from envace_jax.rollout.trajectory import ACT, CONTEXT, REHEARSE, TokenStream, Trajectory
from envace_jax.rollout.worlds import (
    OPEN,
    Environment,
    MixedWorld,
    RealWorld,
    RehearsalWorld,
    Responder,
    World,
    WorldError,
    make_world,
)

__all__ = [
    "ACT",
    "CONTEXT",
    "OPEN",
    "REHEARSE",
    "Environment",
    "Episode",
    "MixedWorld",
    "RealWorld",
    "RehearsalWorld",
    "Responder",
    "Rules",
    "Simulator",
    "TokenStream",
    "Trajectory",
    "World",
    "WorldError",
    "encode_conversation",
    "make_rules",
    "make_world",
    "run",
    "run_episodes",
]
