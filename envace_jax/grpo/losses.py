"""The role-wise GRPO loss of a packed batch.

1. Everything at masked positions is replaced before arithmetic (`fill_masked`).
2. Ratio of policy and old policy, per token or per generation; clipped surrogate with the advantages.
3. Sampler correction on the policy term; KL and entropy terms; the role's weight on their sum.
4. Aggregation into a numerator and a denominator, which add over micro-batches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from envace_jax.grpo.batch import ACT, CONTEXT, REHEARSE, TokenBatch, at_slots, generation_slots, generation_sums
from envace_jax.grpo.config import GRPOConfig
from envace_jax.grpo.kl import ESTIMATORS, LOG_RATIO_LIMIT
from envace_jax.grpo.masked import Pair, fill_masked, masked_pair, safe_divide

Metrics = dict[str, Pair | jax.Array]


def token_log_ratio(logps: jax.Array, old_logps: jax.Array) -> jax.Array:
    """log of the importance ratio of each token (PPO, arXiv 1707.06347): logp - old."""
    return logps - old_logps


def sequence_log_ratio(log_ratio: jax.Array, slots: jax.Array) -> jax.Array:
    """log of the GSPO ratio (arXiv 2507.18071, eq. 7): the mean of the log-ratio over the generation, at its tokens."""
    counts = generation_sums(jnp.ones_like(log_ratio), slots)
    return at_slots(safe_divide(generation_sums(log_ratio, slots), counts), slots)


def clipped_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and for A < 0 at most -A x dual_clip.

    PPO (arXiv 1707.06347, eq. 7), two-sided clip (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729).
    The log-ratio is cut at +-20 to keep r finite. On ties the unclipped branch counts, so a ratio of exactly 1 has its
    full gradient.

    Returns:
        loss, whether the clip decided it, whether the dual clip did.
    """
    ratio = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    plain = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    clipped = bounded > plain
    loss = jnp.where(clipped, bounded, plain)
    if dual_clip is None:
        return loss, clipped, jnp.zeros_like(clipped)
    ceiling = -advantages * dual_clip
    dual_clipped = (advantages < 0) & (loss > ceiling)
    return jnp.where(dual_clipped, ceiling, loss), clipped, dual_clipped


def correction_weights(
    old_logps: jax.Array, behavior_logps: jax.Array, cap: float, slots: jax.Array | None
) -> jax.Array:
    """min(exp(old - behavior), cap), gradient stopped: truncated importance sampling (Yao et al. 2025).

    Per token; with `slots` per generation, where the log-ratio of the generation is the sum over its tokens.
    """
    difference = old_logps - behavior_logps
    if slots is not None:
        difference = at_slots(generation_sums(difference, slots), slots)
    weights = jnp.exp(jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return jax.lax.stop_gradient(jnp.minimum(weights, cap))


def token_scale(mask: jax.Array, slots: jax.Array | None, config: GRPOConfig) -> jax.Array:
    """The factor of each token's loss in the numerator of the aggregation: 1, 1 / its generation's length, 1 / norm."""
    if config.aggregate == "seq-mean-token-mean":
        lengths = generation_sums(jnp.ones(mask.shape, jnp.float32), slots)
        return at_slots(1.0 / jnp.maximum(lengths, 1.0), slots)
    if config.aggregate == "seq-mean-token-sum-norm":
        return jnp.full(mask.shape, 1.0 / (config.norm_length or mask.shape[-1]), jnp.float32)
    return jnp.ones(mask.shape, jnp.float32)


def loss_denominator(batch: TokenBatch, config: GRPOConfig) -> jax.Array:
    """What `grpo_loss_sums` returns as denominator, without the loss: float32 scalar.

    token-mean: trained tokens. seq-mean-token-sum, seq-mean-token-mean: generations with a trained token.
    seq-mean-token-sum-norm: 0, since that sum is divided by a length, not averaged (see `safe_divide`).
    """
    slots = generation_slots(batch) if config.aggregate.startswith("seq-mean") else None
    return _denominator(batch.roles != CONTEXT, slots, config)


def grpo_loss(
    logps: jax.Array, batch: TokenBatch, config: GRPOConfig, entropy: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """The loss of a whole batch; pure, to be jitted and differentiated through `logps`.

    Args:
        logps: [B, T] log p(tokens[b, t] | before) under the policy. Masked positions may hold anything.
        batch: the batch; `roles != 0` is the mask.
        config: static.
        entropy: [B, T] entropy of the distribution each token was drawn from.

    Returns:
        scalar loss, and metrics by name: (sum, weight) pairs, or totals (`tokens/*`); see `finish_metrics`.

    Raises:
        ValueError: an array the configuration needs is missing, or a shape differs from that of `logps`.
    """
    numerator, denominator, metrics = grpo_loss_sums(logps, batch, config, entropy)
    return safe_divide(numerator, denominator), metrics


def grpo_loss_sums(
    logps: jax.Array, batch: TokenBatch, config: GRPOConfig, entropy: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, Metrics]:
    """`grpo_loss` before the division: numerator, denominator and metrics all add over micro-batches.

    The loss of the whole is safe_divide(sum of numerators, sum of denominators), its gradient the sum of the
    numerators' gradients over that denominator. Arguments and errors as in `grpo_loss`.
    """
    _check(logps, batch, config, entropy)
    mask = batch.roles != CONTEXT
    logps = jnp.asarray(logps)
    logps = logps.astype(jnp.promote_types(logps.dtype, jnp.float32))
    logps, advantages, old_logps, behavior_logps, ref_logps, entropy = (
        None if x is None else fill_masked(x.astype(logps.dtype), mask)
        for x in (logps, batch.advantages, batch.old_logps, batch.behavior_logps, batch.ref_logps, entropy)
    )
    old_logps = jax.lax.stop_gradient(logps if old_logps is None else old_logps)
    per_sequence = "sequence" in (config.ratio, config.sampler_correction)
    slots = generation_slots(batch) if per_sequence or config.aggregate.startswith("seq-mean") else None

    log_ratio = token_log_ratio(logps, old_logps)
    if config.ratio == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, slots)
    policy, clipped, dual_clipped = clipped_surrogate(
        log_ratio, advantages, config.clip_low, config.clip_high, config.dual_clip
    )
    tracked = {  # per token; becomes metrics, over all trained tokens and per role
        "clip/fraction": clipped.astype(logps.dtype),
        "clip/dual_fraction": dual_clipped.astype(logps.dtype),
        "ratio/mean": jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)),
        "advantage/abs": jnp.abs(advantages),
        "logps/mean": logps,
        "logps/approx_kl": old_logps - logps,
    }
    if behavior_logps is not None:
        tracked["logps/sampler_trainer_diff"] = jnp.abs(old_logps - behavior_logps)
        tracked["logps/sampler_trainer_kl"] = behavior_logps - old_logps
    if config.sampler_correction != "none":
        cap = config.sampler_correction_cap
        weights = correction_weights(
            old_logps, behavior_logps, cap, slots if config.sampler_correction == "sequence" else None
        )
        tracked["correction/weight"] = weights
        tracked["correction/capped_fraction"] = (weights >= cap).astype(logps.dtype)
        policy = policy * weights

    terms = {"policy": policy}
    if config.kl != "none":
        terms["kl"] = tracked["kl/reference"] = ESTIMATORS[config.kl](logps, ref_logps)
    if entropy is not None:
        terms["entropy"] = tracked["entropy/mean"] = entropy
    tracked["loss/policy_tokens"] = policy

    token_loss = policy
    if config.kl_coef and config.kl != "none":
        token_loss = token_loss + config.kl_coef * terms["kl"]
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * entropy
    act_weight, rehearse_weight = config.role_weights
    token_loss = token_loss * jnp.where(batch.roles == ACT, act_weight, rehearse_weight).astype(logps.dtype)

    scale = token_scale(mask, slots, config).astype(logps.dtype)
    numerator = jnp.sum(fill_masked(token_loss * scale, mask))
    denominator = _denominator(mask, slots, config)
    metrics: Metrics = {"loss/total": (numerator, denominator)}
    for name, term in terms.items():
        metrics[f"loss/{name}"] = (jnp.sum(fill_masked(term * scale, mask)), denominator)
    metrics |= _role_metrics(tracked, mask, batch.roles)
    return numerator, denominator, jax.lax.stop_gradient(metrics)


def _denominator(mask: jax.Array, slots: jax.Array | None, config: GRPOConfig) -> jax.Array:
    if config.aggregate == "token-mean":
        return jnp.sum(mask, dtype=jnp.float32)
    if config.aggregate == "seq-mean-token-sum-norm":
        return jnp.zeros((), jnp.float32)
    return jnp.sum(generation_sums(mask.astype(jnp.float32), slots) > 0, dtype=jnp.float32)


def _role_metrics(tracked: dict[str, jax.Array], mask: jax.Array, roles: jax.Array) -> Metrics:
    """Every tracked quantity as a pair over all trained tokens and over each role's: group/name, group/role_name."""
    metrics: Metrics = {}
    for role_name, member in (("", mask), ("act_", roles == ACT), ("rehearse_", roles == REHEARSE)):
        for name, values in tracked.items():
            group, _, quantity = name.partition("/")
            metrics[f"{group}/{role_name}{quantity}"] = masked_pair(values, member)
        if role_name:
            metrics[f"tokens/{role_name[:-1]}"] = jnp.sum(member, dtype=jnp.float32)
    return metrics


def _check(logps: jax.Array, batch: TokenBatch, config: GRPOConfig, entropy: jax.Array | None) -> None:
    if config.kl != "none" and batch.ref_logps is None:
        raise ValueError(f"TokenBatch.ref_logps is None: GRPOConfig.kl = {config.kl!r} needs the reference's logps")
    if config.sampler_correction != "none" and batch.behavior_logps is None:
        raise ValueError(
            "TokenBatch.behavior_logps is None: "
            f"GRPOConfig.sampler_correction = {config.sampler_correction!r} needs the sampler's logps"
        )
    if config.entropy_coef and entropy is None:
        raise ValueError(f"entropy is None: GRPOConfig.entropy_coef = {config.entropy_coef} needs it")
    arrays = {f"TokenBatch.{name}": value for name, value in vars(batch).items()} | {"entropy": entropy}
    for name, array in arrays.items():
        if array is not None and array.shape != logps.shape:
            raise ValueError(f"{name} has shape {list(array.shape)}: expected {list(logps.shape)} as logps has")
