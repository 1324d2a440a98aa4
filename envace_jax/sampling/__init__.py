"""Sampling: the slot engine, the grammar of inline episodes, and the loop that runs them on the device."""

from .engine import Engine
from .fused import FusedLoop, FusedState, Recorded, Report, Status
from .grammar import ACT, FINISH_REASONS, REHEARSE, Budgets, Event, Forced, Grammar, Machine
from .params import Completion, SamplingParams, sequence_key, sequence_keys
from .slots import Slots

__all__ = [
    "ACT",
    "FINISH_REASONS",
    "REHEARSE",
    "Budgets",
    "Completion",
    "Engine",
    "Event",
    "Forced",
    "FusedLoop",
    "FusedState",
    "Grammar",
    "Machine",
    "Recorded",
    "Report",
    "SamplingParams",
    "Slots",
    "Status",
    "sequence_key",
    "sequence_keys",
]
