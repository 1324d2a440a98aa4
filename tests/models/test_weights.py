"""Checkpoints: what is read and written is the same bytes, and what is wrong is said all at once."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from models.qwen3 import CheckpointError, load_hf, save_hf, sharding, weights

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


# Writing


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


def test_interrupted_save_leaves_nothing_behind(tied, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(weights, "_write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(tied.model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_refused_together(tied, tmp_path):
    with pytest.raises(CheckpointError) as error:
        save_hf(tied.model, tmp_path / "out", dtype="int8", like=tmp_path / "absent")
    assert len(error.value.problems) == 2
    assert "'int8'" in str(error.value) and "absent" in str(error.value)
