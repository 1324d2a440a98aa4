"""The conversion bench goes the whole way, and sees a model that does not come back as it was."""

import sys

import pytest

from bench import convert
from models.qwen3 import Qwen3Config

TINY = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)


@pytest.mark.slow(reason="starts three processes that import jax")
def test_a_small_model_comes_back_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(Qwen3Config, "preset", lambda name: TINY)
    found = convert.convert("tiny", tmp_path)
    assert found["same_bytes"] and found["load"]["kept_gb"] == 0.0
    assert all(found[kind]["wall_s"] > 0 and found[kind]["peak_gb"] > 0 for kind in ("load", "import", "export"))
    assert not list(tmp_path.iterdir())


def test_other_bytes_are_seen(tmp_path):
    for name, content in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    assert convert._digests(tmp_path / "a") != convert._digests(tmp_path / "b")


def test_a_program_that_fails_is_named():
    with pytest.raises(SystemExit, match="ended with 3"):
        convert.watched([sys.executable, "-c", "raise SystemExit(3)"])
