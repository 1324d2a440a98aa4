"""What all tests share: eight simulated CPU devices, a persistent compilation cache, small fixtures.

The environment is set here because it must be in place before jax is imported for the first time.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if "jax" in sys.modules:  # a plugin imported it: the settings below would silently do nothing
    raise RuntimeError("jax was imported before tests/conftest.py could set JAX_PLATFORMS and XLA_FLAGS")

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_user = os.getuid() if hasattr(os, "getuid") else "any"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"envace-jax-tests-{_user}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import pytest  # noqa: E402

from tests.tiny import tiny_config  # noqa: E402

if TYPE_CHECKING:
    from models.qwen3 import Qwen3Config

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Golden files that lie beside the repository; a test that wants them is skipped where they are absent."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("golden files (../shared) are not present")
    return path


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """Small files that belong to the tests and travel with them."""
    return ROOT / "tests" / "fixtures"


@pytest.fixture(scope="session")
def tiny_qwen3_config() -> "Qwen3Config":
    """A Qwen3 small enough to compile in a second."""
    return tiny_config()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves parity tests out where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("parity"):
                item.add_marker(pytest.mark.skip(reason="needs torch: pip install -e '.[parity]'"))
