"""Episodes: who speaks next, where responses come from, and the record of what was sampled."""

from envace_jax.rollout.recorded import encode_conversation
from envace_jax.rollout.trajectory import ACT, CONTEXT, REHEARSE, TokenStream, Trajectory

__all__ = ["ACT", "CONTEXT", "REHEARSE", "TokenStream", "Trajectory", "encode_conversation"]
