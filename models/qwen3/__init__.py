"""Qwen3 (dense) in Flax NNX: configuration, forward pass, KV cache, sharding, Hugging Face weights."""

from models.qwen3.cache import KVCache, init_cache
from models.qwen3.config import Qwen3Config, RopeScaling
from models.qwen3.modeling import Qwen3

__all__ = ["KVCache", "Qwen3", "Qwen3Config", "RopeScaling", "init_cache"]
