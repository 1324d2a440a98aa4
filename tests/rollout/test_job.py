"""`envace rollout`: episodes as JSON lines, each once, however often the command is given."""

import dataclasses
import json
import os

import pytest
from flax import nnx

from envace_jax.config import Config, RolloutConfig, TasksConfig
from envace_jax.errors import CheckpointError, ConfigError
from envace_jax.rollout import run
from models.qwen3 import Qwen3, Qwen3Config, save_hf


@pytest.fixture(scope="module")
def model(chat, tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("model")
    shape = dict(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True
    )
    config = Qwen3Config(vocab_size=chat.vocab_size, hidden_size=16, intermediate_size=16, **shape)
    save_hf(Qwen3(config, rngs=nnx.Rngs(0)), directory, dtype="float32")
    chat.save(directory)
    return str(directory)


@pytest.fixture
def config(model) -> Config:
    rollout = RolloutConfig(
        group_size=2, tasks_per_step=3, thinking=False, max_length=900, turn_tokens=4, slots=2, engine="hosted"
    )
    return Config(model, "unused", tasks=TasksConfig(), rollout=rollout)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_episode_is_a_line_that_says_what_came_of_it(config, chat, tmp_path, capsys):
    out = run(config, tmp_path / "new" / "episodes.jsonl")
    lines = read(out)
    assert [line["trajectory"] for line in lines] == list(range(6))
    assert [line["group"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert lines[0]["task"] == "mini-train-0-full-0"
    for line in lines:
        assert chat.decode(line["tokens"]) == line["text"]
        assert len(line["tokens"]) == len(line["roles"]) == len(line["generations"]) == len(line["behavior_logps"])
        assert sum(r > 0 for r in line["roles"]) <= 4 * max(line["generations"])
        assert [m["role"] for m in line["messages"]][:2] == ["system", "user"]
    assert "6 episodes" in capsys.readouterr().err


def test_what_is_there_is_kept_and_the_rest_is_the_same(config, tmp_path, capsys):
    whole = run(config, tmp_path / "whole.jsonl").read_text()
    part = tmp_path / "part.jsonl"
    lines = whole.splitlines(keepends=True)
    part.write_text("".join(lines[:3]) + lines[3][:50])  # killed while it wrote
    run(config, part)
    assert sorted(map(json.dumps, read(part))) == sorted(json.dumps(json.loads(line)) for line in lines)
    before = os.stat(part).st_mtime_ns
    capsys.readouterr()
    run(config, part)
    assert os.stat(part).st_mtime_ns == before
    assert "all 6 episodes are there already" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["text\n", '{"a": 1}\n', '{"trajectory": 0, "task": "x", "seed": 0, "model": "m"}\n'])
def test_a_file_of_something_else_is_refused(config, tmp_path, line):
    out = tmp_path / "other.jsonl"
    out.write_text(line)
    with pytest.raises(ConfigError, match="other.jsonl, line 1: .* choose another --out"):
        run(config, out)
    assert out.read_text() == line


def test_a_model_that_is_not_there_is_named(config, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        run(dataclasses.replace(config, model=str(tmp_path / "nowhere")), tmp_path / "out.jsonl")
