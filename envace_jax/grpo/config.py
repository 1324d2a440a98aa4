"""What the objective is made of: the one frozen, hashable record that names every choice of the loss."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

CHOICES = {
    "ratio": ("token", "sequence"),
    "aggregate": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "kl": ("none", "k1", "k2", "k3", "k3+"),
    "sampler_correction": ("none", "token", "sequence"),
}


@dataclass(frozen=True)
class GRPOConfig:
    """Choices of the role-wise GRPO loss. Hashable, so it can be a static argument of a jitted function.

    "Sequence" means a generation (one turn of one role) throughout.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: for negative advantages the loss is at most -A x dual_clip; None turns it off.
        ratio: importance ratio per token (PPO) or per sequence (GSPO).
        aggregate: how token losses become one number.
        kl: estimator of KL(policy || reference) added to the loss; needs `ref_logps` in the batch.
        kl_coef: its factor.
        sampler_correction: weights min(exp(old - behavior), sampler_correction_cap) on the policy term, per token or
            per sequence; needs `behavior_logps` in the batch.
        sampler_correction_cap: the cap.
        norm_length: divisor of "seq-mean-token-sum-norm"; None is the row width.
        entropy_coef: factor of the entropy bonus; needs the `entropy` argument of the loss.
        role_weights: factors on the token losses (policy, KL and entropy terms) of act and rehearse. The denominator
            counts the tokens of both roles whatever their weights.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    ratio: str = "token"
    aggregate: str = "token-mean"
    kl: str = "none"
    kl_coef: float = 0.0
    sampler_correction: str = "none"
    sampler_correction_cap: float = 2.0
    norm_length: float | None = None
    entropy_coef: float = 0.0
    role_weights: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise _invalid(name, value, f"one of {', '.join(map(repr, allowed))}")
        self._number("clip_low", lambda x: 0 <= x <= 1, "a number in [0, 1]")
        self._number("clip_high", lambda x: x >= 0, "a number >= 0")
        self._number("dual_clip", lambda x: x > 1, "a number > 1, or None for no dual clip", optional=True)
        self._number("kl_coef", lambda x: x >= 0, "a number >= 0")
        self._number("sampler_correction_cap", lambda x: x > 0, "a number > 0")
        self._number("norm_length", lambda x: x > 0, "a number > 0, or None for the row width", optional=True)
        self._number("entropy_coef", lambda x: x >= 0, "a number >= 0")
        try:
            weights = tuple(self.role_weights)  # a list where the configuration came from YAML
        except TypeError:
            weights = ()
        if len(weights) != 2 or not all(_is_number(w) and w >= 0 for w in weights):
            raise _invalid("role_weights", self.role_weights, "two numbers >= 0: (act, rehearse)")
        object.__setattr__(self, "role_weights", weights)
        if self.kl == "k1":
            warnings.warn(
                "GRPOConfig.kl = 'k1': as a loss term its expected gradient vanishes, so it only adds noise; "
                "use 'k2' or 'k3+' for the gradient of the KL",
                stacklevel=3,
            )

    def _number(self, name: str, accepts, expected: str, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not (_is_number(value) and accepts(value)):
            raise _invalid(name, value, expected)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _invalid(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"GRPOConfig.{name} = {value!r}: expected {expected}")
