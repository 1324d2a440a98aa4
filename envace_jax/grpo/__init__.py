"""Role-wise GRPO as pure functions of arrays: advantages, token batches, loss, KL and log-probabilities."""

from envace_jax.grpo.advantages import groups_with_signal, overlong_mask, overlong_penalty, role_advantages
from envace_jax.grpo.batch import ACT, CONTEXT, REHEARSE, TokenBatch
from envace_jax.grpo.config import GRPOConfig
from envace_jax.grpo.logps import token_logps, trained_logps
from envace_jax.grpo.losses import grpo_loss, grpo_loss_sums, loss_denominator
from envace_jax.grpo.masked import finish_metrics, safe_divide

__all__ = [
    "ACT",
    "CONTEXT",
    "REHEARSE",
    "GRPOConfig",
    "TokenBatch",
    "finish_metrics",
    "groups_with_signal",
    "grpo_loss",
    "grpo_loss_sums",
    "loss_denominator",
    "overlong_mask",
    "overlong_penalty",
    "role_advantages",
    "safe_divide",
    "token_logps",
    "trained_logps",
]
