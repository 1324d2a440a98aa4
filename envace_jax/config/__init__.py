"""What a run is: frozen dataclasses as the schema, YAML and `key=value` overrides as the input.

`load_config` merges a file and overrides, checks every key, type and choice, and returns a `Config`;
`save_config` writes the resolved form into the run directory; `diff_on_resume` names what may not change.
"""

from envace_jax.config.load import MAY_CHANGE, diff_on_resume, flatten, from_dict, load_config, save_config, to_dict
from envace_jax.config.schema import (
    AdvantageConfig,
    Config,
    EndpointConfig,
    EvalConfig,
    FaultsConfig,
    LoggingConfig,
    MeshConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainConfig,
    TasksConfig,
    TrainConfig,
    WorldConfig,
)
from envace_jax.errors import ConfigError

__all__ = [
    "MAY_CHANGE",
    "AdvantageConfig",
    "Config",
    "ConfigError",
    "EndpointConfig",
    "EvalConfig",
    "FaultsConfig",
    "LoggingConfig",
    "MeshConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainConfig",
    "TasksConfig",
    "TrainConfig",
    "WorldConfig",
    "diff_on_resume",
    "flatten",
    "from_dict",
    "load_config",
    "save_config",
    "to_dict",
]
