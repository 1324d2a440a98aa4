"""What is saved are the same bytes that were loaded, whole or not at all, and it can be checked."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from models.qwen3 import CheckpointError, load_hf, save_hf, saving, sharding, verify_hf

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def same_parameters(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), nnx.state(a), nnx.state(b)))


@pytest.mark.parametrize("mesh_shape", [None, (2, 2, 2)], ids=["one device", "mesh"])
def test_bfloat16_checkpoint_comes_back_byte_for_byte(tiny, tmp_path, mesh_shape):
    mesh = None if mesh_shape is None else sharding.make_mesh(*mesh_shape)
    save_hf(load_hf(tiny.directory, mesh), tmp_path / "out", like=tiny.directory)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tiny.directory / WEIGHTS).read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text().strip() == (tiny.directory / name).read_text().strip()


def test_float32_is_saved_exactly_and_said_in_the_config(tied, tmp_path):
    save_hf(tied.model, tmp_path / "out", dtype="float32", like=tied.directory)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {**config, "dtype": "bfloat16"} == json.loads((tied.directory / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert load_file(tmp_path / "out" / WEIGHTS)["model.norm.weight"].dtype == np.float32
    assert same_parameters(load_hf(tmp_path / "out"), tied.model)


def test_large_models_are_split_with_an_index(untied, tmp_path):
    save_hf(untied.model, tmp_path / "out", max_shard_size=50_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2 and all((tmp_path / "out" / f).stat().st_size < 55_000 for f in files)
    stored = load_file(untied.directory / WEIGHTS)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in stored.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "numpy") as handle:
            assert handle.get_tensor(name).tobytes() == stored.pop(name).tobytes()
    assert not stored
    assert same_parameters(load_hf(tmp_path / "out"), untied.model)


def test_tokenizer_and_template_are_carried_over_untouched(tied, tmp_path):
    like = tmp_path / "like"
    shutil.copytree(tied.directory, like)
    contents = {"tokenizer.json": b'{"a":\r\n1}', "tokenizer_config.json": b"{ }", "chat_template.jinja": b"{% x %}\n"}
    for name, content in contents.items():
        (like / name).write_bytes(content)
    (like / "optimizer.pt").write_bytes(b"no")
    save_hf(tied.model, tmp_path / "out", like=like)
    for name, content in contents.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    expected = {*contents, "config.json", "generation_config.json", WEIGHTS}
    assert {p.name for p in (tmp_path / "out").iterdir()} == expected


def test_config_of_another_model_is_not_carried_over(tied, untied, tmp_path):
    save_hf(tied.model, tmp_path / "out", like=untied.directory)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert same_parameters(load_hf(tmp_path / "out"), tied.model)


def test_existing_directory_is_kept_unless_told(tied, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty.*overwrite=True"):
        save_hf(tied.model, out)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["notes.txt"]
    save_hf(tied.model, out, overwrite=True)
    assert {p.name for p in out.iterdir()} == {"config.json", WEIGHTS}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["_append", "_sync", "_write_json", "_take_name"])
def test_interrupted_save_leaves_nothing_behind(tied, tmp_path, monkeypatch, where):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(saving, where, fail)
    with pytest.raises(CheckpointError, match="cannot be written .disk full."):
        save_hf(tied.model, tmp_path / "out", max_shard_size=50_000)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_refused_together(tied, tmp_path):
    with pytest.raises(CheckpointError) as error:
        save_hf(tied.model, tmp_path / "out", dtype="int8", like=tmp_path / "absent", max_shard_size=0)
    assert len(error.value.problems) == 3
    assert all(word in str(error.value) for word in ("'int8'", "absent", "max_shard_size=0"))


@pytest.mark.parametrize("stacked", [True, False])
def test_a_tensor_is_sliced_and_cast_before_it_is_gathered(stacked):
    # A stacked matrix of the largest model would be 33 GB on every device.
    mesh = sharding.make_mesh(1, 4, 2)
    place = jax.sharding.NamedSharding(mesh, sharding.spec(["layers"] * stacked + ["mlp", "embed"]))
    shape = (3,) * stacked + (64, 32)
    value = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    take = saving._take(jnp.dtype(jnp.float16), place, stacked)
    lines = take.lower(value, 0).compile().as_text().splitlines()
    gathers = [line for line in lines if re.search(r" all-gather(-start)?\(", line)]
    assert gathers and all("f16[" in line.split(" all-gather")[0] for line in gathers)
    assert not any("[3,64" in line or "[3,32,32" in line for line in lines)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_both_end_ids_are_named_where_nothing_says_them(tied, tmp_path, tokenizer):
    # One ends a turn, the other a text: a server must stop at either.
    like = tmp_path / "like"
    like.mkdir()
    shutil.copy(tied.directory / "config.json", like)
    if tokenizer:
        added = [{"id": 301, "content": "<|endoftext|>"}, {"id": 303, "content": "<|im_end|>"}]
        (like / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    save_hf(tied.model, tmp_path / "out", like=like)
    written = tmp_path / "out" / "generation_config.json"
    assert written.exists() == tokenizer  # the ids of a config alone may be anything
    if tokenizer:
        assert json.loads(written.read_text())["eos_token_id"] == [303, 301]


# Checking


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_saved_is_verified_in_its_type(untied, tmp_path, dtype):
    save_hf(untied.model, tmp_path / "out", dtype, max_shard_size=50_000)
    assert verify_hf(untied.model, tmp_path / "out") == 3 * 11 + 3


def test_verification_lists_every_difference(untied, tied, tmp_path):
    out = tmp_path / "out"
    save_hf(untied.model, out)
    tensors = load_file(out / WEIGHTS)
    tensors["model.norm.weight"][3] *= 2
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.copy()
    del tensors["lm_head.weight"]
    save_file({**tensors, "more": np.ones(1, tensors["model.norm.weight"].dtype)}, out / WEIGHTS)
    with pytest.raises(CheckpointError) as error:
        verify_hf(untied.model, out)
    assert sorted(error.value.problems) == [
        "lm_head.weight: missing",
        "model.layers.1.mlp.up_proj.weight: not what was saved",
        "model.norm.weight: not what was saved",
        "more: not a tensor of this model",
    ]
    with pytest.raises(CheckpointError, match="no .safetensors"):
        verify_hf(untied.model, tmp_path)


@pytest.mark.slow(reason="starts two processes")
def test_two_processes_save_the_model_that_both_hold(tiny, tmp_path):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    program = Path(__file__).with_name("save_pair.py")
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(program.parents[2]),
    }
    out = tmp_path / "out"
    command = [sys.executable, str(program)]
    started = [
        subprocess.Popen([*command, str(i), str(port), tiny.directory, out], env=environment, stdout=subprocess.PIPE)
        for i in range(2)
    ]
    first, second = (json.loads(process.communicate(timeout=500)[0].splitlines()[-1]) for process in started)
    assert first["verified"] == second["verified"] == 3 * 11 + 2 + (not tiny.model.config.tie_word_embeddings)
    assert (out / WEIGHTS).read_bytes() == (tiny.directory / WEIGHTS).read_bytes()
    # Only the first sees that the directory is taken; the second must not wait for it.
    assert "not empty" in first["again"] and "another process" in second["again"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
