"""The tokenizer of the embedded world, as the rollout tests have it."""

from tests.rollout.conftest import chat

__all__ = ["chat"]
