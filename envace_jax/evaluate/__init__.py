"""Measuring a model: success in the embedded world, and how true its rehearsals are."""

from envace_jax.evaluate.mini import during_training, evaluate_mini, mini
from envace_jax.evaluate.rehearsals import Outcome, rehearse_recorded
from envace_jax.evaluate.statistics import Share, share

__all__ = ["Outcome", "Share", "during_training", "evaluate_mini", "mini", "rehearse_recorded", "share"]
