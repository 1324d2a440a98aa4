"""A run is one thing however often it was stopped, and its directory is nobody else's."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from envace_jax.errors import CheckpointError, EnvaceError
from envace_jax.train import export, load_model, run
from envace_jax.train.checkpoint import Checkpoints
from envace_jax.train.optim import make_optimizer, named
from envace_jax.train.record import read_metrics
from envace_jax.train.state import abstract_state

sys.path.insert(0, str(Path(__file__).parent))
from runs import episodes, make_config  # noqa: E402

TIMED = ("time/", "throughput/", "compile/")  # what no two runs share


def train(config, **arguments):
    return run(config, rollout=episodes, **arguments)


def metrics(out):
    """The lines of a run without what depends on the clock."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in read_metrics(out)]


def final_state(out, config, step):
    params = nnx.state(load_model(out))
    with Checkpoints(out, read_only=True) as checkpoints:
        return checkpoints.restore(abstract_state(params, make_optimizer(config.train)), step)


def assert_same_run(a, b, config, step=6):
    assert [line["step"] for line in metrics(a)] == [line["step"] for line in metrics(b)]
    assert metrics(a) == metrics(b)
    jax.tree.map(np.testing.assert_array_equal, final_state(a, config, step), final_state(b, config, step))


@pytest.fixture(scope="session")
def straight(policy, tmp_path_factory):
    """Six steps without a stop."""
    config = make_config(policy, tmp_path_factory.mktemp("straight") / "run")
    return train(config), config


def program(*args):
    """The run as a process of its own, with one device."""
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(Path(__file__).parent / "runs.py"), *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_every_step_has_one_line_with_the_figures_of_the_documentation(straight):
    out, _ = straight
    lines = read_metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    names = """reward/mean reward/std loss/total advantage/act_abs advantage/rehearse_abs tokens/act tokens/rehearse
        episodes/valid_fraction logps/sampler_trainer_diff time/rollout_s time/train_s
        throughput/sampled_tokens_per_s compile/count batch/pad_fraction grad/norm""".split()
    assert all(isinstance(line[name], float) for line in lines for name in names)
    assert lines[1]["compile/count"] == lines[-1]["compile/count"], "something compiles anew after the first steps"


def test_training_moves_the_policy_and_the_run_directory_is_enough_to_export_it(straight, policy, tmp_path):
    out, _ = straight
    before, after = (named(nnx.state(load_model(x))) for x in (policy, export(out, tmp_path / "hf", dtype="float32")))
    assert all((before[name] != after[name]).any() for name in before)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (policy / "tokenizer.json").read_bytes()


def test_six_steps_are_three_a_stop_and_three_more_bit_for_bit(straight, policy, tmp_path):
    out, config = straight
    train(make_config(policy, tmp_path / "run", 3))
    train(make_config(policy, tmp_path / "run", 6))
    assert_same_run(out, tmp_path / "run", config)


def test_a_stop_while_sampling_saves_the_steps_that_are_done(straight, policy, tmp_path, capsys):
    def rollout(model, tasks, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return episodes(model, tasks, step)

    with pytest.raises(SystemExit) as stopped:
        run(make_config(policy, tmp_path / "run"), rollout=rollout)
    assert stopped.value.code == 75
    assert "stopped by SIGTERM after step 4" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(make_config(policy, tmp_path / "run"))
    assert_same_run(straight[0], tmp_path / "run", straight[1])


def test_ctrl_c_saves_too_and_exits_130(policy, tmp_path, capsys):
    def rollout(model, tasks, step):
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return episodes(model, tasks, step)

    with pytest.raises(SystemExit) as stopped:
        run(make_config(policy, tmp_path / "run"), rollout=rollout)
    assert stopped.value.code == 130
    assert "stopped by Ctrl-C after step 1" in capsys.readouterr().out
    with Checkpoints(tmp_path / "run", read_only=True) as checkpoints:
        assert checkpoints.latest() == 1


@pytest.mark.slow("three processes")
def test_a_killed_process_goes_on_from_its_checkpoint_with_each_step_once(straight, policy, tmp_path):
    out = tmp_path / "run"
    killed = program(policy, out, 6, "kill_after=5")
    assert killed.returncode == -signal.SIGKILL
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4, 5]  # and the checkpoint is that of step 3
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')  # a line that broke off
    assert program(policy, out, 6).returncode == 0
    assert_same_run(straight[0], out, straight[1])


@pytest.mark.slow("a process of its own")
@pytest.mark.parametrize(("option", "status"), [("signal_at", 75), ("interrupt_at", 130)])
def test_the_process_says_how_it_was_stopped(policy, tmp_path, option, status):
    ended = program(policy, tmp_path / "run", 6, f"{option}=2")
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr and ended.stdout.strip().count("stopped by") == 1


def test_evaluation_comes_first_now_and_then_and_last(policy, tmp_path, capsys):
    seen = []

    def evaluate(model, step):
        seen.append(step)
        return {"eval/success": step / 10}

    config = make_config(policy, tmp_path / "run", 5, evaluation={"every": 2})
    train(config, evaluate=evaluate)
    assert seen == [0, 2, 4, 5]
    lines = read_metrics(config.output_dir)
    assert {line["step"]: line["eval/success"] for line in lines if "eval/success" in line} == {
        0: 0.0, 2: 0.2, 4: 0.4, 5: 0.5
    }  # fmt: skip
    assert "evaluation success 0.000 -> 0.500 in 5 steps" in capsys.readouterr().out


def test_a_setting_that_makes_another_run_is_refused_by_key(straight, policy):
    out, _ = straight
    with pytest.raises(CheckpointError, match=r"train.learning_rate is 0.5 here and 0.01 there"):
        train(make_config(policy, out, train={"learning_rate": 0.5}))


def test_checkpoints_elsewhere_are_enough_to_go_on_from_and_are_one_runs_alone(policy, tmp_path):
    def config(directory, steps, **sections):
        train = {"checkpoints": str(tmp_path / "bucket"), "save_every": 1}
        return make_config(policy, tmp_path / directory, steps, train=train, **sections)

    shutil.rmtree(train(config("lost", 1)))
    out = train(config("new", 2))
    assert [line["step"] for line in metrics(out)] == [2]
    straight = train(make_config(policy, tmp_path / "straight", 2))
    ours, theirs = (named(nnx.state(load_model(run))) for run in (out, straight))
    assert all((ours[name] == theirs[name]).all() for name in ours)
    with pytest.raises(CheckpointError, match=r"bucket/2: is of another run, which differs in seed"):
        train(config("other", 2, seed=1))


def test_foreign_files_are_refused_and_left_alone(policy, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="thesis.tex"):
        train(make_config(policy, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_cannot_train_in_one_directory(policy, tmp_path):
    refused = []

    def rollout(model, tasks, step):
        if not refused:
            try:
                train(make_config(policy, tmp_path / "run", 1))
            except EnvaceError as error:
                refused.append(str(error))
        return episodes(model, tasks, step)

    run(make_config(policy, tmp_path / "run", 1), rollout=rollout)
    assert "a run is going on there" in refused[0]


def test_a_wrong_model_is_an_error_of_the_user_that_can_be_mended_in_the_same_directory(policy, tmp_path):
    with pytest.raises(EnvaceError, match="no such directory"):
        train(make_config(tmp_path / "absent", tmp_path / "run", 1))
    train(make_config(policy, tmp_path / "run", 1))


def test_invalid_episodes_are_left_out_and_counted(policy, tmp_path):
    def rollout(model, tasks, step):
        made = episodes(model, tasks, step)
        lost = len(made) if step == 1 else 1
        return [dataclasses.replace(t, valid=False, reward=float("nan")) for t in made[:lost]] + made[lost:]

    out = run(make_config(policy, tmp_path / "run", 2), rollout=rollout)
    first, second = read_metrics(out)
    assert first["episodes/valid_fraction"] == 0.75 and np.isfinite(first["loss/total"])
    assert second["episodes/valid_fraction"] == 0.0 and second["reward/mean"] is None


def test_a_frozen_role_is_seen_and_not_trained(policy, tmp_path):
    out = train(make_config(policy, tmp_path / "run", 1, train={"rehearse": False}))
    (line,) = read_metrics(out)
    assert line["tokens/rehearse"] > 0 and line["advantage/rehearse_abs"] == 0.0 < line["advantage/act_abs"]


def test_episodes_are_dumped_with_their_text(policy, tmp_path):
    out = train(make_config(policy, tmp_path / "run", 3, logging={"trajectories_every": 2}))
    assert sorted(path.name for path in (out / "trajectories").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    records = [json.loads(line) for line in (out / "trajectories" / "step_000002.jsonl").read_text().splitlines()]
    assert len(records) == 4 and all(record["text"] and record["step"] == 2 for record in records)
    assert all(abs(sum(r["advantages"]["1"] for r in records[i : i + 2])) < 1e-6 for i in (0, 2))


def test_training_in_a_thread_leaves_signals_alone(policy, tmp_path):
    thread = threading.Thread(target=train, args=[make_config(policy, tmp_path / "run", 1)])
    thread.start()
    thread.join()
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]
