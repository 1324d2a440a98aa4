"""Sampling: the slot engine, and the loop in which acting and rehearsing alternate on the device."""

from .engine import Engine
from .params import Completion, SamplingParams, sequence_key, sequence_keys
from .slots import Slots

__all__ = ["Completion", "Engine", "SamplingParams", "Slots", "sequence_key", "sequence_keys"]
