"""The tokenizer of the embedded world, as the rollout tests have it, and the tiny model of the sampling tests."""

from tests.rollout.conftest import chat
from tests.sampling.conftest import model

__all__ = ["chat", "model"]
