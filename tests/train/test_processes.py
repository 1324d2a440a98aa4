"""Two processes do what one does, end together, and name each other when something is wrong.

What they did is in `pair.py`; they run once for all tests of this file.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envace_jax.config import Config, from_dict
from envace_jax.errors import ConfigError
from envace_jax.evaluate import during_training
from envace_jax.tasks.mini import mini_tasks
from envace_jax.train import export, load_model, run
from envace_jax.train.local import local_mesh, make_local_copy
from envace_jax.train.optim import named
from envace_jax.train.outline import Outline, outline
from envace_jax.train.processes import Processes
from envace_jax.train.record import read_metrics
from envace_jax.train.start import check_alike, connect, in_a_cluster
from envace_jax.train.throughput import forward_flops
from models.qwen3 import Qwen3
from models.qwen3.sharding import make_mesh, shard_model

sys.path.insert(0, str(Path(__file__).parent))
from pair import episodes, make_config, make_sampled  # noqa: E402

HERE = Path(__file__).parent
# What is compiled runs for moments only: with less care it is ready a third sooner.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ONE_DEVICE = {"data": 1, "fsdp": 1, "tp": 1}
OF_THE_CLOCK = ("time/", "throughput/", "compile/")


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(program, process, *arguments, devices=2):
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, str(HERE / program), str(process), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="session")
def pair(policy, tmp_path_factory):
    """The directory of the runs, and what each process says that they came to."""
    root, port = tmp_path_factory.mktemp("pair"), free_port()
    both = [start("pair.py", process, port, policy, root) for process in range(2)]
    with ThreadPoolExecutor(2) as pool:  # of both at once, or one would wait for its reader
        said = list(pool.map(lambda process: process.communicate()[0], both))
    (root / "said.txt").write_text(said[0])
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    return root, [json.loads((root / f"{process}.json").read_text()) for process in range(2)]


@pytest.fixture(scope="session")
def alone(policy, tmp_path_factory):
    """The same run on one process with one device."""
    out = tmp_path_factory.mktemp("alone") / "run"
    return run(
        make_config(policy, out, mesh=ONE_DEVICE), rollout=episodes, evaluate=lambda model, step: {"eval/success": 0.5}
    )


def parameters(out):
    return named(nnx.state(load_model(out)))


def figures(out):
    return [
        {name: value for name, value in line.items() if not name.startswith(OF_THE_CLOCK)} for line in read_metrics(out)
    ]


def dumped(out, step):
    lines = []
    for path in sorted((out / "trajectories").glob(f"step_{step:06d}*.jsonl"), key=lambda path: len(path.name)):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    return lines


@pytest.mark.slow("two processes")
def test_two_processes_of_two_devices_train_as_one_with_one(pair, alone):
    root, ended = pair
    assert [found["straight"] for found in ended] == ["done", "done"]
    assert [line["step"] for line in figures(root / "straight")] == [0, 1, 2, 3]
    for ours, theirs in zip(figures(root / "straight"), figures(alone), strict=True):
        different = {"batch/rows", "batch/micro_batches", "batch/pad_fraction"}  # each process fills rows of its own
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - different:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
    for step in (1, 2, 3):
        assert dumped(root / "straight", step) == dumped(alone, step), "the same episodes with the same advantages"
    ours, theirs = parameters(root / "straight"), parameters(alone)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-4, err_msg=name)  # a tenth of the rate


@pytest.mark.slow("two processes")
def test_what_is_sampled_and_measured_does_not_depend_on_the_number_of_processes(pair, policy, tmp_path):
    root, ended = pair
    assert [found["sampled"] for found in ended] == ["done", "done"]
    config = make_sampled(policy, tmp_path / "run", mesh=ONE_DEVICE)
    alone = run(config, evaluate=during_training(config))
    ours, theirs = dumped(root / "sampled", 1), dumped(alone, 1)
    assert [record["trajectory"] for record in ours] == [0, 1, 2, 3, 4, 5]
    for name in ("task", "group", "tokens", "roles", "generations", "reward", "advantages", "finish"):
        assert [record[name] for record in ours] == [record[name] for record in theirs], name
    for ours, theirs in zip(figures(root / "sampled"), figures(alone), strict=True):
        measured = [name for name in theirs if name.startswith("eval/")]
        assert len(measured) > 20 and {name: ours[name] for name in measured} == pytest.approx(
            {name: theirs[name] for name in measured}, rel=1e-4
        )


@pytest.mark.slow("two processes")
def test_a_process_without_a_row_to_train_on_holds_nobody_up(pair):
    root, _ = pair
    line = read_metrics(root / "straight")[-1]
    assert line["episodes/valid_fraction"] == 0.5 and np.isfinite(line["grad/norm"])


@pytest.mark.slow("two processes")
def test_a_signal_to_one_stops_both_at_the_same_step_and_nothing_is_lost(pair):
    root, ended = pair
    assert [found["stopped"] for found in ended] == [75, 75]
    assert [found["resumed"] for found in ended] == ["done", "done"]
    assert figures(root / "stopped") == figures(root / "straight")
    ours, theirs = parameters(root / "stopped"), parameters(root / "straight")
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.slow("two processes")
def test_a_store_that_is_full_for_one_is_borne_for_a_while_and_then_ends_both(pair):
    root, ended = pair
    for found in ended:
        assert "2 checkpoints in a row could not be written (process 1: " in found["full"]
        assert "; the last is that of step 1. Mend the store" in found["full"]
    said = (root / "said.txt").read_text()
    assert "failure 1 of faults.saves_behind=2, it is tried again" in said
    lines = [line["loss/total"] for line in read_metrics(root / "full")]
    assert lines == [line["loss/total"] for line in read_metrics(root / "straight")[1:]], "trained on meanwhile"


@pytest.mark.slow("two processes")
def test_one_process_goes_on_from_what_two_have_saved(pair, policy, tmp_path):
    root, _ = pair
    shutil.copytree(root / "straight", tmp_path / "run")
    out = run(
        make_config(policy, tmp_path / "run", steps=4, mesh=ONE_DEVICE, evaluation={"every": 0}), rollout=episodes
    )
    assert [line["step"] for line in read_metrics(out)] == [0, 1, 2, 3, 4]
    assert [record["task"] for record in dumped(out, 4)] == [
        task.id for task in mini_tasks("train", 3, start=9) for _ in range(2)
    ]
    export(out, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


@pytest.mark.slow("two processes")
@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("broken", "ProcessError: process 1: RuntimeError: the second process breaks", "RuntimeError: the second"),
        ("seeds", "ConfigError: process 1 is not like process 0: the setting seed is 1, not 0", None),
        ("taken", "CheckpointError: ", "CheckpointError: process 0: "),
        ("misfit", "ConfigError: mesh data=3, fsdp=1, tp=1 needs 3 devices, there are 4", None),
        ("spans", "ConfigError: mesh.tp=4 spans processes of 2 devices each", None),
        ("late", "MissingProcess: a wait: process 1 has not come within faults.wait_s=3", "MissingProcess: a wait"),
    ],
)
def test_what_is_wrong_is_said_on_both(pair, case, first, second):
    _, ended = pair
    assert ended[0][case].startswith(first) and ended[1][case].startswith(second or first)


@pytest.mark.slow("two processes")
def test_each_process_gives_a_sign_of_life_and_the_first_alone_writes_figures(pair):
    root, _ = pair
    for process in range(2):
        beat = json.loads((root / "straight" / "heartbeat" / f"{process}.json").read_text())
        assert beat["process"] == process and beat["processes"] == 2 and beat["doing"] == "ended"
    line = read_metrics(root / "straight")[-1]
    for name in ("rollout", "judge", "pack", "train", "sync", "checkpoint"):
        assert line[f"time/{name}_s"] >= 0.0
    assert 0 < line["time/reshard_s"] < line["time/rollout_s"]
    assert line["time/straggler_ratio"] >= 1.0 and 0 < line["time/agreement_s"] < line["time/step_s"]
    assert line["throughput/sampled_tokens_per_s_per_chip"] == pytest.approx(
        line["throughput/sampled_tokens_per_s"] / 4
    )
    assert line["throughput/model_flops_utilisation"] > 0


def test_without_others_the_process_that_waits_for_them_ends_with_one_line(tmp_path):
    waits = (
        "import sys; from envace_jax.config import FaultsConfig; from envace_jax.train.start import connect\n"
        "try: connect(sys.argv[1], 2, int(sys.argv[2]), faults=FaultsConfig(start_s=2))\n"
        "except Exception as error: sys.exit(f'{type(error).__name__}: {error}')"
    )
    port = free_port()
    program = tmp_path / "waits.py"
    program.write_text(waits)
    ended = []
    for process in (0, 1):
        waiting = start(program, f"127.0.0.1:{port}", process)
        ended.append((waiting.communicate(timeout=120)[0].strip().splitlines()[-1], waiting.returncode))
    assert ended[0][0].startswith("error: process 0: not all 2 processes came within faults.start_s=2") and ended[0][1]
    assert ended[1][0].startswith(f"ProcessError: no coordinator at 127.0.0.1:{port}") and ended[1][1]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("host:1", None, 0), "--processes must be given too"),
        (("host", 2, 0), "--coordinator host: expected HOST:PORT"),
        (("host:1", 2, 2), "--process 2 must lie in 0..1, for --processes 2"),
    ],
)
def test_what_is_given_of_the_others_must_be_whole_and_right(given, problem):
    with pytest.raises(ConfigError, match=problem):
        connect(*given)


def test_nothing_said_of_others_is_one_process(monkeypatch):
    for name in ("SLURM_STEP_NUM_TASKS", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    assert connect().count == 1 and not in_a_cluster()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert in_a_cluster()


class WithATwin(Processes):
    """Two processes, of which the other one answers as this one does, but for one thing."""

    def __init__(self, part, change):
        super().__init__()
        self.count, self._part, self._change = 2, part, change

    def each(self, what, work, *, repeatable=False):
        mine = work()
        return [mine, self._change(mine) if self._part in what else mine]


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        (
            "code",
            lambda of: {**of, "code of": {**of["code of"], "envace_jax/cli.py": "0"}},
            "code of envace_jax/cli.py is",
        ),
        ("code", lambda of: {**of, "version of": {**of["version of"], "jax": "0.1"}}, "the version of jax is 0.1, not"),
        ("code", lambda of: {**of, "number of": {"local devices": "3"}}, "the number of local devices is 3, not"),
        ("clocks", lambda clock: clock + 100, "the clock of process 1 is 100 s off"),
    ],
)
def test_a_process_that_is_not_like_the_first_is_named_with_what_differs(part, change, problem):
    config = make_config("policy", "out")
    check_alike(WithATwin("nothing", None), config)
    with pytest.raises(ConfigError, match=problem):
        check_alike(WithATwin(part, change), config)


def test_shares_are_contiguous_complete_and_empty_where_there_is_too_little():
    for total in (0, 3, 8, 13):
        shares = [Processes(index, 4).share(total) for index in range(4)]
        assert [number for share in shares for number in share] == list(range(total))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_agrees_with_itself():
    alone = Processes()
    assert alone.each("nothing", lambda: 3) == [3] and alone.together("nothing", lambda: {1}) == {1}
    with pytest.raises(ZeroDivisionError):
        alone.each("nothing", lambda: 1 / 0)


class Meeting:
    """What JAX's coordination service does for the processes of a run, for threads."""

    def __init__(self, count):
        self._values, self._barrier = {}, threading.Barrier(count)

    def key_value_set_bytes(self, key, value):
        self._values[key] = value

    def key_value_dir_get_bytes(self, prefix):
        return [(key, value) for key, value in self._values.items() if key.startswith(prefix)]

    def key_value_delete(self, prefix):
        self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}

    def wait_at_barrier(self, name, timeout_ms):
        self._barrier.wait(timeout_ms / 1000)


def test_what_agreeing_takes_is_known_to_all_and_is_not_the_wait_for_the_slowest():
    meeting = Meeting(2)
    both = [Processes(index, 2, meeting, wait_s=20) for index in range(2)]

    def work(process):
        process.each("uneven work", lambda: time.sleep(0.5 * process.index))
        process.each("nothing", lambda: None)
        return process.waited(), process.agreed()

    with ThreadPoolExecutor(2) as pool:
        (waited, agreed), (_, agreed_too) = pool.map(work, both)
    assert waited > 0.4 and 0 < agreed < 0.2 and agreed == agreed_too


def test_an_outline_survives_the_way_to_another_process(policy, tmp_path):
    class Task:
        id = "t"

    class Model:
        norm = jax.numpy.ones((2,))

    for i, t in enumerate(episodes(Model, [Task], 1)):
        o = outline(t, 1, i)
        assert Outline.from_json(json.loads(json.dumps(o.to_json()))) == o
        assert o.generation_roles() == t.generation_roles() and len(o) == len(t)
        assert [o.sampled(role) for role in (1, 2)] == [t.sampled(role) for role in (1, 2)]


def test_the_mesh_to_sample_on_is_the_processs_own_devices_with_tp_as_in_training():
    mesh = make_mesh(2, 2, 2)
    assert local_mesh(mesh, 0).shape == {"data": 4, "fsdp": 1, "tp": 2}
    assert (local_mesh(mesh, 0).devices.reshape(mesh.devices.shape) == mesh.devices).all()
    with pytest.raises(ConfigError, match="no device of process 1"):
        local_mesh(mesh, 1)


def test_the_copy_to_sample_from_has_the_type_of_the_arithmetic_and_computes_the_same(tiny_qwen3_config):
    def build(mesh):
        return Qwen3(tiny_qwen3_config, rngs=nnx.Rngs(0), mesh=mesh, dtype=jnp.bfloat16)

    mesh = make_mesh(2, 2, 2)
    copy = make_local_copy(lambda on: nnx.eval_shape(lambda: build(on)), mesh, 0)
    copied = copy(nnx.state(shard_model(build(None), mesh)))
    types = {name: leaf.dtype for name, leaf in named(nnx.state(copied)).items()}
    assert {name for name, kind in types.items() if kind == jnp.float32} == {name for name in types if "norm" in name}
    assert {str(kind) for kind in types.values()} == {"float32", "bfloat16"}
    wide = shard_model(build(None), local_mesh(mesh, 0))
    tokens = jnp.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(copied.logits(copied(tokens)[0]), wide.logits(wide(tokens)[0]))


def test_operations_of_a_forward_pass_are_two_for_each_weight_and_token_and_four_for_each_pair(tiny_qwen3_config):
    # By hand, of the tiny model: q 32x32, k and v 32x16 each, o 32x32, three of 32x64; two layers; head 96x32.
    layers, head = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64), 96 * 32
    pairs = 10 * 10 / 2
    assert forward_flops(tiny_qwen3_config, [10], 4) == 2 * layers * 10 + 2 * head * 4 + 2 * 4 * (4 * 8) * pairs


def test_a_profile_of_some_steps_is_written(policy, tmp_path):
    config = make_config(policy, tmp_path / "run", steps=2, mesh=ONE_DEVICE, logging={"profile": [2, 2]})
    out = run(config, rollout=episodes)
    assert list((out / "profile").rglob("*.xplane.pb"))


def test_limits_of_faults_must_be_positive():
    with pytest.raises(ConfigError, match="faults.wait_s must be positive"):
        from_dict(Config, {"model": "m", "output_dir": "o", "faults": {"wait_s": 0}})
