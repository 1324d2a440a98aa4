"""What `envace compile` says, and that the real TPU compiler compiles the real programs."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

from envace_jax.config import Config, MeshConfig, load_config
from envace_jax.errors import ConfigError
from launch import compile, parse_topology
from launch.compile import Program, Report, _read_collectives, candidates, describe, needed_bytes
from launch.hlo import Collective
from launch.programs import as_on_tpu, find_compiler, mesh_sizes, read_model

V5P_64 = parse_topology("v5p-64")
CONFIG = Config(model="qwen3-8b", output_dir="out", mesh=MeshConfig(data=1, fsdp=-1))


def report(**changes):
    train = Program("train", 3 * 10**9, 0, 9 * 10**9, 0, 0, {"all-gather": Collective(2, 4 * 10**9)})
    decode = Program("decode", 7 * 10**9, 0, 10**9, 0, 2 * 10**9, {})
    values = {
        "model": "qwen3-8b",
        "topology": V5P_64,
        "mesh": (1, 32, 1),
        "micro_batch": 8,
        "remat": "layer",
        "parameters_bytes": 10**9,
        "optimizer_bytes": 2 * 10**9,
        "activations_bytes": 6 * 10**9,
        "programs": (train, decode),
        "flops": 1e18,
        "seconds": 90.0,
        "decode_seconds": 0.02,
    }
    return Report(**{**values, **changes})


def test_the_peak_is_that_of_the_largest_program_with_what_lies_beside_it():
    assert report().peak_bytes == 12 * 10**9
    resident = Program("decode", 10**9, 0, 0, 0, 20 * 10**9, {})
    assert report(programs=(report().programs[0], resident)).peak_bytes == 21 * 10**9


def test_it_fits_when_the_peak_is_within_the_chip():
    assert report().fits
    assert not report(topology=parse_topology("v5e-32"), programs=(Program("train", 17 * 10**9, 0, 0, 0, 0, {}),)).fits


def test_what_the_compiler_refuses_does_not_fit_whatever_its_size():
    refused = Program("train", 0, 0, 1, 0, 0, {}, refused="Used 1 of 2")
    assert not report(programs=(refused,)).fits


def test_json_has_the_figures_scripts_rely_on():
    found = json.loads(json.dumps(report().to_dict()))
    assert found["fits"] is True
    assert (found["peak_bytes"], found["hbm_bytes"]) == (12 * 10**9, 95 * 10**9)
    assert (found["parameters_bytes"], found["optimizer_bytes"]) == (10**9, 2 * 10**9)
    assert found["temporary_bytes"] == 9 * 10**9
    assert found["collectives"] == {"all-gather": {"count": 2, "bytes": 4 * 10**9}}
    assert (found["flops"], found["seconds_estimate"]) == (1e18, 90.0)


def test_collectives_that_cannot_be_read_are_said_to_be_unknown():
    class Unreadable:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: async-update instruction")

    assert _read_collectives(Unreadable(), ()) is None
    train = Program("train", 3 * 10**9, 0, 9 * 10**9, 0, 0, None)
    unread = report(programs=(train, Program("decode", 1, 0, 1, 0, 0, {})))
    assert unread.to_dict()["collectives"] is None and unread.fits
    assert "train: collectives unknown; install the libtpu" in describe(unread)


def test_text_states_the_assumption_of_its_estimate():
    text = describe(report())
    assert "50% of 459 TFLOP/s" in text and "fits: 12.00 GB of 95.00 GB" in text


def test_text_names_a_setting_that_would_fit():
    small = report(topology=parse_topology("v5e-4"), proposal=report())
    assert "--topology v5p:2x4x4 mesh.data=1 mesh.fsdp=32" in describe(small)


def test_the_compilers_refusal_says_how_much_was_needed():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 34.50G of 15.75G hbm. Exceeded hbm capacity by 18.75G."
    )
    assert needed_bytes(message) == 34.5 * 2**30
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (18.68G) exceeds available HBM (15.75G). HLO module: jit_counted.\nSee https://openxla.org"
    )
    assert needed_bytes(message) == int(18.68 * 2**30)
    assert needed_bytes("INTERNAL: something else") is None


def test_candidates_begin_with_the_slice_that_was_asked_for():
    wide = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, micro_batch=2))
    found = list(candidates(wide, report(micro_batch=2)))
    assert found[0][1] == V5P_64
    assert all(changed.train.remat == "layer" and changed.train.micro_batch <= 2 for changed, _ in found)
    assert [topology.chips for _, topology in found] == sorted(topology.chips for _, topology in found)


@pytest.fixture
def compiler(monkeypatch):
    """In the place of compiling: from 64 chips on it fits. Says what was compiled."""
    asked = []

    def measure(config, topology):
        asked.append(topology.name)
        size = 10**12 // topology.chips
        program = Program("train", size, 0, 0, 0, 0, {})
        return report(
            topology=topology, mesh=mesh_sizes(config.mesh, topology), programs=(program,), micro_batch=1, remat="layer"
        )

    monkeypatch.setattr(compile, "measure", measure)
    before = jax.config.jax_enable_compilation_cache
    yield asked
    jax.config.update("jax_enable_compilation_cache", before)


def test_the_status_is_0_when_it_fits(compiler, capsys):
    assert compile.run(CONFIG, "v5e-64", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["proposal"] is None and compiler == ["v5e:8x8"]


def test_the_status_is_1_when_it_does_not_and_what_would_is_proposed(compiler, capsys):
    assert compile.run(CONFIG, "v5e-32", as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["proposal"]["topology"] == "v5e:8x8"
    assert found["proposal"]["peak_bytes"] <= found["hbm_bytes"] < found["peak_bytes"]
    assert {setting.split("=")[0] for setting in found["proposal"]["overrides"]} == {
        "mesh.data",
        "mesh.fsdp",
        "mesh.tp",
        "train.micro_batch",
        "train.remat",
    }
    assert compile.run(CONFIG, "v5e-32", proposal=False) == 1
    assert "does not fit: 31.25 GB of 16.00 GB" in capsys.readouterr().out


def test_one_mesh_axis_takes_the_rest_of_the_slice():
    assert mesh_sizes(MeshConfig(data=1, fsdp=-1, tp=4), V5P_64) == (1, 8, 4)


def test_a_mesh_that_is_not_the_slice_is_refused():
    with pytest.raises(ConfigError, match="32 chips of v5p:2x4x4"):
        mesh_sizes(MeshConfig(data=1, fsdp=3, tp=1), V5P_64)
    with pytest.raises(ConfigError, match="-1"):
        mesh_sizes(MeshConfig(data=5, fsdp=-1, tp=1), V5P_64)


def test_a_model_is_a_preset_or_a_directory(fixtures_dir):
    assert read_model("qwen3-8b").hidden_size == 4096
    assert read_model(str(fixtures_dir / "qwen3_tiny_tied")).tie_word_embeddings
    with pytest.raises(ConfigError, match="qwen3-32b"):
        read_model("qwen3-9b")


def test_tracing_for_a_tpu_leaves_the_process_as_it_was():
    with as_on_tpu():
        assert jax.default_backend() == "tpu"
    assert jax.default_backend() == "cpu"


def test_configurations_for_tpus_are_at_the_papers_setting(root):
    files = sorted((root / "configs").glob("tpu_*.yaml"))
    assert files
    for file in files:
        config = load_config(file)
        assert config.rollout.tasks_per_step * config.rollout.group_size == 64, file
        assert config.rollout.max_length == 20_480, file
        read_model(config.model)


@pytest.mark.slow(reason="compiles four programs with the TPU compiler")
@pytest.mark.skipif(find_compiler() is None, reason="needs libtpu: pip install -e '.[tpu-compile]'")
def test_a_small_run_compiles_for_a_tpu(tmp_path, root):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "vocab_size": 1024,
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 128,
            }
        )
    )
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {tmp_path}\noutput_dir: {tmp_path}/out\nrollout: {{max_length: 512, tasks_per_step: 2}}\n"
        "grpo: {kl: k3, kl_coef: 1.0e-4}\ntrain: {micro_batch: 1}\nmesh: {data: 1, fsdp: -1, tp: 2}\n"
    )
    # In a process of its own: libtpu is loaded once for all, and this one's devices are simulated.
    done = subprocess.run(
        [sys.executable, "-m", "envace_jax.cli", "compile", str(file), "--topology", "v5e-4", "--json"],
        cwd=root,
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["fits"] and found["mesh"] == {"data": 1, "fsdp": 2, "tp": 2}
    assert set(found["programs"]) == {"train", "reference", "prefill", "decode"}
    # Matrices are split over all four chips, norms are not.
    matrices = 4 * (2 * 1024 * 256 + 2 * 256 * (2 * 4 * 128 + 2 * 2 * 128 + 3 * 512))
    norms = 4 * (5 * 256 + 4 * 128)
    assert found["parameters_bytes"] == matrices // 4 + norms
    assert found["optimizer_bytes"] == pytest.approx(2 * found["parameters_bytes"], abs=64)
    assert found["collectives"]
