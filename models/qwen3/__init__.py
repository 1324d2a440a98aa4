"""Qwen3 (dense) in Flax NNX: configuration, forward pass, KV cache, sharding, Hugging Face weights."""

from models.qwen3.cache import CacheRows, KVCache, init_cache
from models.qwen3.config import Qwen3Config, RopeScaling
from models.qwen3.layered import LayeredCache, Layers, TakenApart, Unrolled
from models.qwen3.modeling import Qwen3
from models.qwen3.saving import save_hf
from models.qwen3.verify import compare_logits, verify_hf
from models.qwen3.weights import CheckpointError, load_hf

__all__ = [
    "CheckpointError",
    "CacheRows",
    "KVCache",
    "LayeredCache",
    "Layers",
    "Qwen3",
    "Qwen3Config",
    "TakenApart",
    "Unrolled",
    "RopeScaling",
    "compare_logits",
    "init_cache",
    "load_hf",
    "save_hf",
    "verify_hf",
]
