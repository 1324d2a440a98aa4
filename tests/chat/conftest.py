"""A tokenizer of a few hundred ids, built once, and where it lies beside the repository also Qwen3's own."""

from pathlib import Path

import pytest

from envace_jax.chat import ChatTokenizer
from envace_jax.chat.build import train_tokenizer

SENTENCES = [
    "user assistant system tool: please cancel the order W12 and tell me the status\n",
    '{"name": "get_order", "arguments": {"id": "W12", "status": null}}\n',
    "It's done, they'll ship 144 items. The order isn't open; can you check it again?\n\n",
] * 4


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small_tokenizer")
    train_tokenizer(SENTENCES, 320, directory)
    return directory


@pytest.fixture(scope="session")
def small(small_directory: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(small_directory)


@pytest.fixture(scope="session")
def qwen(shared_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(shared_dir / "qwen3")


@pytest.fixture(params=["small", "qwen"])
def chat(request: pytest.FixtureRequest) -> ChatTokenizer:
    """Each tokenizer in turn; the real one is skipped on a machine that has only the repository."""
    return request.getfixturevalue(request.param)
