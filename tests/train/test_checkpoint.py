"""A checkpoint is whole or absent, comes back bit for bit on any mesh, and carries what an export needs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envace_jax.config import TrainConfig
from envace_jax.errors import CheckpointError
from envace_jax.train import stores
from envace_jax.train.checkpoint import Checkpoints, export, import_hf, load_model, write_model_source
from envace_jax.train.optim import make_optimizer
from envace_jax.train.state import TrainState, abstract_state, create_state, state_shardings
from models.qwen3 import Qwen3, load_hf, save_hf
from models.qwen3.sharding import make_mesh


@pytest.fixture
def state(tiny_model):
    """A state whose every array is different from a fresh one's."""
    fresh = create_state(nnx.state(tiny_model), make_optimizer(TrainConfig()))
    return jax.tree.map(lambda x: (x + 3).astype(x.dtype), fresh)


@pytest.fixture
def like(tiny_qwen3_config):
    model = nnx.eval_shape(lambda: Qwen3(tiny_qwen3_config, rngs=nnx.Rngs(0), dtype=jnp.float32))
    return abstract_state(nnx.state(model), make_optimizer(TrainConfig()))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def at(state, step):
    return TrainState(state.params, state.opt_state, jnp.asarray(step, jnp.int32), state.skipped)


def test_what_was_saved_comes_back_bit_for_bit(tmp_path, state, like):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {"note": [1, "two"]})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 3
        assert checkpoints.metadata() == {"note": [1, "two"]}
        equal(checkpoints.restore(like), state)


def test_it_comes_back_on_another_mesh_in_its_shards(tmp_path, state, tiny_qwen3_config):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
    mesh = make_mesh(2, 2, 2)
    model = nnx.eval_shape(lambda: Qwen3(tiny_qwen3_config, rngs=nnx.Rngs(0), mesh=mesh))
    like = abstract_state(nnx.state(model), make_optimizer(TrainConfig()), mesh)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        restored = checkpoints.restore(like)
    assert jax.tree.map(lambda x: x.sharding, restored) == state_shardings(like, mesh)
    equal(jax.tree.leaves(restored), jax.tree.leaves(state))


def test_only_the_latest_are_kept(tmp_path, state):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(at(state, step), {})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_a_half_written_checkpoint_is_never_picked(tmp_path, state, like):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(state, 1), {})
    broken = tmp_path / "checkpoints" / "7"
    (broken / "params").mkdir(parents=True)
    (tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp-0").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 1
        assert int(checkpoints.restore(like).step) == 1
        checkpoints.save(at(state, 7), {})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 7


def test_a_damaged_checkpoint_is_named_with_the_one_to_fall_back_on(tmp_path, state, like):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(state, 1), {})
        checkpoints.save(at(state, 2), {})
    for path in (tmp_path / "checkpoints" / "2" / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.restore(like)
    assert "checkpoints/2: cannot be restored" in str(error.value) and "use step 1" in str(error.value)


def test_a_process_that_is_lost_while_it_is_read_does_not_make_a_checkpoint_a_damaged_one(
    tmp_path, state, like, monkeypatch
):
    def lost(*arguments, **more):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:1")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(state, 1), {})
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="closed by peer"):
        monkeypatch.setattr(checkpoints._manager, "restore", lost)
        checkpoints.restore(like)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path, state, like):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(state, 4), {})
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are 4"):
            checkpoints.restore(like, 5)


@pytest.fixture
def hf(tmp_path, tiny_model):
    """A Hugging Face directory with a tokenizer file and a setting of its own in config.json."""
    directory = tmp_path / "hf"
    save_hf(tiny_model, directory, "float32")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "name_of_my_own": 1}))
    (directory / "tokenizer_config.json").write_text('{"chat_template": "t"}')
    (directory / "generation_config.json").write_text("{}")
    return directory


def test_import_and_export_give_the_same_model_back(tmp_path, hf):
    import_hf(hf, tmp_path / "run")
    exported = export(tmp_path / "run", tmp_path / "out", dtype="float32")
    equal(nnx.state(load_hf(exported)), nnx.state(load_hf(hf)))
    assert (exported / "tokenizer_config.json").read_text() == '{"chat_template": "t"}'
    assert (exported / "generation_config.json").is_file()
    assert json.loads((exported / "config.json").read_text())["name_of_my_own"] == 1


def test_an_export_needs_the_run_directory_alone_and_may_name_a_step(tmp_path, hf, tiny_model, state):
    run = tmp_path / "run"
    write_model_source(run, hf, tiny_model.config)
    assert not list(run.rglob("*.safetensors"))
    with Checkpoints(run) as checkpoints:
        checkpoints.save(at(state, 1), {"model": tiny_model.config.to_hf()})
        checkpoints.save(at(jax.tree.map(lambda x: x * 0, state), 2), {"model": tiny_model.config.to_hf()})
    run = run.rename(tmp_path / "moved")
    hf.rename(tmp_path / "gone")
    first = load_hf(export(run / "checkpoints" / "1", tmp_path / "first", dtype="float32"))
    equal(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(state.params))
    latest = load_hf(export(run, tmp_path / "latest"))
    assert all((x == 0).all() for x in jax.tree.leaves(nnx.state(latest)))
    equal(nnx.state(load_model(run)), nnx.state(latest))


def test_checkpoints_may_lie_elsewhere_and_the_run_directory_says_where(tmp_path, hf, tiny_model, state):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    write_model_source(run, hf, tiny_model.config)
    with Checkpoints(run, place=str(elsewhere)) as checkpoints:
        checkpoints.save(at(state, 1), {"model": tiny_model.config.to_hf()})
    assert (elsewhere / "1").is_dir() and (run / "checkpoints").read_text() == f"{elsewhere}\n"
    equal(jax.tree.leaves(nnx.state(load_model(run))), jax.tree.leaves(state.params))
    with Checkpoints(run) as checkpoints:
        assert checkpoints.latest() == 1


def test_checkpoints_of_the_run_directory_are_not_left_behind(tmp_path, state):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
    with pytest.raises(CheckpointError, match="holds checkpoints; move them to gs://bucket/run"):
        Checkpoints(tmp_path, place="gs://bucket/run")


def test_a_bucket_without_its_library_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="gs://bucket/run: buckets need a library .* pip install gcsfs"):
        Checkpoints(tmp_path, place="gs://bucket/run")


def test_an_import_keeps_the_stored_type_and_comes_back_byte_for_byte(tmp_path, hf, tiny_model):
    save_hf(tiny_model, tmp_path / "stored", "bfloat16", like=hf, max_shard_size=5000)
    import_hf(tmp_path / "stored", tmp_path / "run")
    with Checkpoints(tmp_path / "run", read_only=True) as checkpoints:
        assert checkpoints.metadata()["model"]["torch_dtype"] == "bfloat16"
    exported, said = tmp_path / "out", []
    export(tmp_path / "run", exported, max_shard_size="5KB", verify=True, say=said.append)
    names = [path.name for path in sorted((tmp_path / "stored").iterdir())]
    assert len(names) > 5 and names == [path.name for path in sorted(exported.iterdir())]
    for name in names:
        assert (exported / name).read_bytes() == (tmp_path / "stored" / name).read_bytes(), name
    assert said[0] == "25 tensors read back, all as they were saved"  # 11 of each of two layers, and three
    assert said[1].startswith("logits of transformers, as a share of the largest: ")


def test_parameters_of_float32_are_rounded_once(tmp_path, hf, tiny_model):
    import_hf(hf, tmp_path / "run")
    save_hf(tiny_model, tmp_path / "direct", "bfloat16")
    exported = export(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    assert (exported / "model.safetensors").read_bytes() == (tmp_path / "direct" / "model.safetensors").read_bytes()


def test_an_export_asks_before_it_loads(tmp_path, hf):
    import_hf(hf, tmp_path / "run")
    with pytest.raises(CheckpointError, match="'int8' cannot be saved"):
        export(tmp_path / "run", tmp_path / "out", dtype="int8")
    with pytest.raises(CheckpointError, match="'5 apples': expected bytes, or a text such as 500MB"):
        export(tmp_path / "run", tmp_path / "out", max_shard_size="5 apples")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["absent", "empty", "run/checkpoints/9"])
def test_what_is_no_run_is_refused_by_name(tmp_path, state, name):
    (tmp_path / "empty").mkdir()
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(at(state, 4), {})
    with pytest.raises(CheckpointError, match=f"{name}: neither a run directory nor a checkpoint"):
        export(tmp_path / name, tmp_path / "out")


def test_a_broken_hugging_face_directory_is_an_error_of_the_user(tmp_path, hf):
    (hf / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="model.safetensors: truncated"):
        import_hf(hf, tmp_path / "run")
    (hf / "note.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        import_hf(hf, hf)
