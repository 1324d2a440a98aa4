"""Tiny Qwen3 checkpoints (see tests/fixtures/make_qwen3_tiny.py) with what transformers computes from them."""

from pathlib import Path

import numpy as np
import pytest

from models.qwen3 import Qwen3, load_hf

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


class Tiny:
    """One checkpoint: its directory, the model loaded from it, and the expected arrays."""

    def __init__(self, name: str):
        self.directory: Path = FIXTURES / f"qwen3_tiny_{name}"
        self.expected: dict[str, np.ndarray] = dict(np.load(FIXTURES / f"qwen3_tiny_{name}.npz"))
        self.model: Qwen3 = load_hf(self.directory)
        self.tokens: np.ndarray = self.expected["tokens"]


@pytest.fixture(scope="session", params=["tied", "untied"])
def tiny(request) -> Tiny:
    return Tiny(request.param)


@pytest.fixture(scope="session")
def tied() -> Tiny:
    return Tiny("tied")


@pytest.fixture(scope="session")
def untied() -> Tiny:
    return Tiny("untied")
