"""Checkpoints are read tensor by tensor, and what is wrong with one is said all at once."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.qwen3 import CheckpointError, load_hf, sharding, weights

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copy(untied, tmp_path):
    """A copy of the untied checkpoint to damage: (directory, its tensors)."""
    directory = tmp_path / "model"
    shutil.copytree(untied.directory, directory)
    return directory, load_file(directory / WEIGHTS)


def write(directory, tensors, shards=1):
    """Stores tensors in one file, or in several with an index."""
    (directory / WEIGHTS).unlink(missing_ok=True)
    if shards == 1:
        save_file(tensors, directory / WEIGHTS)
        return
    weight_map = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def same_parameters(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), nnx.state(a), nnx.state(b)))


def problems_of(directory):
    with pytest.raises(CheckpointError) as error:
        load_hf(directory)
    assert str(directory) in str(error.value)
    return error.value.problems


# Reading


def test_the_mapping_covers_every_parameter_once():
    assert sorted(weights.CHECKPOINT.values()) == sorted(sharding.PARAM_AXES)


def test_stacked_parameters_hold_each_layer_as_stored(untied):
    stored = load_file(untied.directory / WEIGHTS)
    up = untied.model.layers.up_proj[...]
    assert up.dtype == jnp.float32
    for layer in range(3):
        np.testing.assert_array_equal(up[layer], stored[f"model.layers.{layer}.mlp.up_proj.weight"].astype(np.float32))


def test_shards_with_an_index_load_as_one_file_does(copy, untied):
    directory, tensors = copy
    write(directory, tensors, shards=3)
    assert same_parameters(load_hf(directory), untied.model)


def test_parameters_take_the_type_asked_for(tied):
    model = load_hf(tied.directory, param_dtype=jnp.bfloat16, dtype=jnp.float32, remat="layer", attention="xla")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    assert (model.dtype, model.remat, model.attention) == (jnp.float32, "layer", "xla")


def test_tied_checkpoint_may_store_the_head_when_it_is_equal(tied, tmp_path):
    shutil.copytree(tied.directory, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / WEIGHTS)
    assert "lm_head.weight" not in tensors  # without it, `tied` was loaded
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write(tmp_path / "model", tensors)
    assert same_parameters(load_hf(tmp_path / "model"), tied.model)

    tensors["lm_head.weight"][7, 3] += 1
    write(tmp_path / "model", tensors)
    [problem] = problems_of(tmp_path / "model")
    assert "lm_head.weight: differs" in problem and "tie_word_embeddings" in problem


def test_each_device_reads_only_its_part(untied, monkeypatch):
    read = []
    original = weights._put

    class Recording:
        def __init__(self, tensor):
            self.tensor = tensor

        def get_shape(self):
            return self.tensor.get_shape()

        def __getitem__(self, index):
            part = self.tensor[index]
            read.append(part.size)
            return part

    monkeypatch.setattr(weights, "_put", lambda tensor, place: original(Recording(tensor), place))
    load_hf(untied.directory, sharding.make_mesh(1, 4, 2))
    assert max(read) == 320 * 48 / 8  # an eighth of the largest tensor


# Everything wrong, at once


def test_untied_checkpoint_without_head_is_refused(copy):
    directory, tensors = copy
    del tensors["lm_head.weight"]
    write(directory, tensors)
    [problem] = problems_of(directory)
    assert problem.startswith("lm_head.weight: missing") and "tie_word_embeddings to true" in problem


def test_all_problems_come_in_one_error(copy):
    directory, tensors = copy
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:5]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((96, 48), np.float32)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(16, np.int8)
    write(directory, tensors)
    problems = "\n".join(problems_of(directory))
    assert "model.norm.weight: missing, expected shape [48]" in problems
    assert "model.layers.1.mlp.up_proj.weight: shape [5, 48], but config.json makes it [96, 48]" in problems
    assert "model.layers.3.mlp.up_proj.weight: not a tensor of this model (3 layers)" in problems
    assert "model.layers.0.self_attn.q_norm.weight: stored as I8" in problems
    assert len(problems.splitlines()) == 4


def test_missing_and_truncated_shards_are_named_instead_of_their_tensors(copy):
    directory, tensors = copy
    write(directory, tensors, shards=3)
    (directory / "part-1.safetensors").unlink()
    whole = (directory / "part-2.safetensors").read_bytes()
    (directory / "part-2.safetensors").write_bytes(whole[:-100])
    missing, truncated = problems_of(directory)
    assert missing.startswith("part-1.safetensors: missing") and INDEX in missing
    assert truncated.startswith("part-2.safetensors: truncated") and f"{len(whole) - 100:,} bytes" in truncated


def test_tensor_the_index_promises_but_its_file_lacks(copy):
    directory, tensors = copy
    write(directory, tensors, shards=2)
    file = json.loads((directory / INDEX).read_text())["weight_map"]["model.norm.weight"]
    kept = load_file(directory / file)
    del kept["model.norm.weight"]
    save_file(kept, directory / file)
    [problem] = problems_of(directory)
    assert problem == f"model.norm.weight: missing (the index says in {file}), expected shape [48]"


def test_an_index_of_other_files_is_told_tensor_by_tensor(copy):
    directory, tensors = copy
    write(directory, tensors, shards=2)
    index = json.loads((directory / INDEX).read_text())
    place = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.norm.weight"] = "part-0.safetensors" if "1" in place else "part-1.safetensors"
    del index["weight_map"]["lm_head.weight"]
    (directory / INDEX).write_text(json.dumps(index))
    unlisted, moved = problems_of(directory)
    assert unlisted.startswith("lm_head.weight: lies in part-") and f"{INDEX} does not list it" in unlisted
    assert moved.startswith(f"model.norm.weight: lies in {place}, but {INDEX} says part-")


def test_a_tensor_stored_twice_is_refused(copy):
    directory, tensors = copy
    write(directory, tensors, shards=2)
    for file in ("part-0.safetensors", "part-1.safetensors"):
        kept = load_file(directory / file)
        save_file({**kept, "model.norm.weight": tensors["model.norm.weight"]}, directory / file)
    problems = "\n".join(problems_of(directory))
    assert "model.norm.weight: stored twice, in part-0.safetensors and part-1.safetensors" in problems


@pytest.mark.parametrize("damage", ["truncated", "index", "bin", "config", "no config"])
def test_other_damage_is_named_with_a_remedy(copy, damage):
    directory, _ = copy
    if damage == "truncated":
        (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:1000])
        expected = "model.safetensors: truncated or not a safetensors file (1,000 bytes"
    elif damage == "index":
        (directory / INDEX).write_text("{}")
        expected = f"{INDEX}: not a safetensors index"
    elif damage == "bin":
        (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
        expected = "found only pytorch_model.bin); save the model as safetensors"
    elif damage == "config":
        (directory / "config.json").write_text('{"model_type": "llama"}')
        expected = "model_type is 'llama'"
    else:
        (directory / "config.json").unlink()
        expected = "config.json: no such file"
    [problem] = problems_of(directory)
    assert expected in problem


def test_missing_directory_is_named(tmp_path):
    [problem] = problems_of(tmp_path / "absent")
    assert "no such directory" in problem and "not downloaded" in problem
