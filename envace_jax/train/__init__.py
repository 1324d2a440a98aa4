"""Training: packing, the update, checkpoints, the loop, and the supervised warm start."""

from envace_jax.train.checkpoint import Checkpoints, export, import_hf, load_model, tokenizer_directory
from envace_jax.train.loop import run
from envace_jax.train.optim import make_optimizer, make_schedule
from envace_jax.train.packing import PackingError, pack, pad_fraction
from envace_jax.train.sft import sft
from envace_jax.train.state import TrainState, create_state, make_update, place_batch

__all__ = [
    "Checkpoints",
    "PackingError",
    "TrainState",
    "create_state",
    "export",
    "import_hf",
    "load_model",
    "make_optimizer",
    "make_schedule",
    "make_update",
    "pack",
    "pad_fraction",
    "place_batch",
    "run",
    "sft",
    "tokenizer_directory",
]
