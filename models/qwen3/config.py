"""The architecture of a dense Qwen3, with the field names of Hugging Face's `config.json`.

A `Qwen3Config` holds only what changes the computation. It is frozen and hashable, so that it can travel as a static
part of a jitted function. `from_hf` reads both spellings in use (`rope_theta` + `rope_scaling`, and the newer
`rope_parameters`), and refuses what the forward pass does not implement instead of ignoring it.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# name: (hidden, intermediate, layers, heads, kv heads, tied). Common to all: head_dim 128, vocabulary 151,936.
# Source: the config.json files of the Qwen3 release (Qwen/Qwen3-0.6B ... Qwen/Qwen3-32B).
_PRESETS = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
}

# Without these a config.json does not say which model it is.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context. Names and defaults as in transformers."""

    rope_type: str  # "linear" or "yarn"
    factor: float
    original_max_position_embeddings: int | None = None  # yarn; None: the config's max_position_embeddings
    attention_factor: float | None = None  # yarn; None: from `factor` and the two mscale fields
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "RopeScaling | None":
        """Reads `rope_scaling` / `rope_parameters` of a config.json; None for the plain (`default`) type.

        Raises:
            ValueError: an unknown type, an unknown key, or a missing `factor`.
        """
        values = {key: value for key, value in values.items() if value is not None and key != "rope_theta"}
        if values.get("partial_rotary_factor") == 1.0:
            del values["partial_rotary_factor"]
        rope_type = values.pop("rope_type", None) or values.get("type", "default")
        values.pop("type", None)
        if rope_type == "default":
            return None
        if rope_type not in ("linear", "yarn"):
            raise ValueError(
                f"rope_type {rope_type!r} is not implemented; use 'default', 'linear' or 'yarn' in the config's "
                "rope_scaling (rope_parameters)"
            )
        known = {field.name for field in dataclasses.fields(RopeScaling)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"rope_scaling has keys that are not implemented: {unknown}; known are {sorted(known)}")
        if "factor" not in values:
            raise ValueError(f"rope_scaling of type {rope_type!r} lacks 'factor'")
        return RopeScaling(rope_type=rope_type, **values)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the defaults, as `rope_scaling` of a config.json."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = dataclasses.asdict(self)
        return {key: value for key, value in values.items() if value != defaults[key] or key in ("rope_type", "factor")}


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Shape and constants of a dense Qwen3; field names as in Hugging Face's config.json."""

    vocab_size: int = 151_936
    hidden_size: int = 4096
    intermediate_size: int = 12_288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 40_960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None  # a dict, as in config.json, is converted
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self):
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling.from_dict(self.rope_scaling))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "Qwen3Config":
        """The configuration of a released size: "qwen3-0.6b", 1.7b, 4b, 8b, 14b, 32b. `changes` replace fields.

        Raises:
            ValueError: an unknown name; the message lists the known ones.
        """
        try:
            hidden, intermediate, layers, heads, kv_heads, tied = _PRESETS[name.lower()]
        except KeyError:
            raise ValueError(f"unknown preset {name!r}; known are {', '.join(_PRESETS)}") from None
        values = {
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "tie_word_embeddings": tied,
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
        }
        return cls(**{**values, **changes})

    @classmethod
    def from_hf(cls, source: str | os.PathLike | Mapping[str, Any]) -> "Qwen3Config":
        """Reads a config.json: its dict, its path, or the directory that holds it.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a dense Qwen3, or a setting the forward pass does not implement.
        """
        if isinstance(source, Mapping):
            values, where = dict(source), "config"
        else:
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file; expected the config.json of a Hugging Face Qwen3")
            values, where = json.loads(path.read_text(encoding="utf-8")), str(path)

        refused = []
        if values.get("model_type", "qwen3") != "qwen3":
            refused.append(f"model_type is {values['model_type']!r}, expected 'qwen3' (dense)")
        if values.get("attention_bias"):
            refused.append("attention_bias is true; Qwen3 has no attention bias")
        if values.get("use_sliding_window"):
            refused.append("use_sliding_window is true; only full attention is implemented")
        elif "sliding_attention" in (values.get("layer_types") or ()):
            refused.append("layer_types has 'sliding_attention'; only full attention is implemented")
        if values.get("hidden_act", "silu") != "silu":
            refused.append(f"hidden_act is {values['hidden_act']!r}, expected 'silu'")
        if values.get("quantization_config"):
            refused.append("quantization_config is set; load the unquantized checkpoint")
        missing = [name for name in _REQUIRED if name not in values]
        if missing:
            refused.append(f"{', '.join(missing)} missing; expected the complete config.json of a Qwen3")
        if refused:
            raise ValueError(f"{where}: " + "; ".join(refused))

        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        theta = values.get("rope_theta") or rope.get("rope_theta") or 10_000.0  # transformers' default
        names = {field.name for field in dataclasses.fields(cls)} - {"rope_theta", "rope_scaling"}
        fields = {name: values[name] for name in names if values.get(name) is not None}
        if isinstance(fields.get("eos_token_id"), list):
            fields["eos_token_id"] = fields["eos_token_id"][0]
        if values["num_key_value_heads"] is None:
            fields["num_key_value_heads"] = values["num_attention_heads"]
        try:
            return cls(**fields, rope_theta=float(theta), rope_scaling=RopeScaling.from_dict(rope))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The content of a config.json that transformers (4.51 and later) and the inference servers read."""
        values = dataclasses.asdict(self)
        values["rope_scaling"] = self.rope_scaling.to_dict() if self.rope_scaling else None
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **values,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "max_window_layers": self.num_hidden_layers,
            "sliding_window": None,
            "torch_dtype": dtype,
            "use_cache": True,
            "use_sliding_window": False,
        }

    def rope_frequencies(self) -> tuple[np.ndarray, float]:
        """Inverse frequencies float32[head_dim / 2] and the factor on cos and sin.

        Plain RoPE (arXiv 2104.09864), linear position interpolation (2306.15595) or YaRN (2309.00071), each as
        transformers' `modeling_rope_utils` computes it.
        """
        dim, base, scaling = self.head_dim, self.rope_theta, self.rope_scaling
        wavelengths = np.float32(base) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
        plain = (1.0 / wavelengths).astype(np.float32)
        if scaling is None:
            return plain, 1.0
        if scaling.rope_type == "linear":
            return (plain / np.float32(scaling.factor)).astype(np.float32), 1.0

        trained = scaling.original_max_position_embeddings or self.max_position_embeddings

        def dimension(rotations: float) -> float:
            # The dimension whose frequency turns `rotations` times over the trained context.
            return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        frequencies = plain / np.float32(scaling.factor) * ramp + plain * (1 - ramp)
        return frequencies.astype(np.float32), scaling_attention_factor(scaling)


def scaling_attention_factor(scaling: RopeScaling) -> float:
    """YaRN's factor on cos and sin: given, or 0.1 ln(factor) + 1, or the ratio of the two mscale variants."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
