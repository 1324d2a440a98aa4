"""A store that fails for a while costs checkpoints, not the run; one that goes on failing ends it cleanly."""

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import orbax.checkpoint as ocp
import pytest

from envace_jax.errors import CheckpointError
from envace_jax.train import run, saving, stores
from envace_jax.train.checkpoint import Checkpoints
from envace_jax.train.record import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
from runs import episodes, make_config  # noqa: E402


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(steps): what is saved under these steps fails, each time that it is tried."""

    def fill(steps):
        save = ocp.CheckpointManager.save

        def fails(self, step, *args, **arguments):
            if step in steps:
                raise OSError(28, "No space left on device")
            return save(self, step, *args, **arguments)

        monkeypatch.setattr(ocp.CheckpointManager, "save", fails)

    monkeypatch.setattr(saving, "PAUSE_S", 0.0)
    return fill


def train(policy, out):
    return run(make_config(policy, out, 4, train={"save_every": 1}, faults={"saves_behind": 3}), rollout=episodes)


def saved(out):
    with Checkpoints(out, read_only=True) as checkpoints:
        return checkpoints.latest()


def test_checkpoints_that_fail_are_reported_and_the_next_one_is_whole(policy, tmp_path, full_disk, capsys):
    full_disk({1, 2})
    out = train(policy, tmp_path / "run")
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4] and saved(out) == 4
    said = capsys.readouterr().out
    assert said.count("could not be written (process 0: OSError: [Errno 28] No space left on device)") == 2
    assert "none is complete; failure 2 of faults.saves_behind=3" in said


def test_too_many_in_a_row_end_the_run_and_it_goes_on_from_the_last_whole_one(policy, tmp_path, full_disk, monkeypatch):
    full_disk({2, 3, 4})
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row could not be written .* the last is that of"):
        train(policy, tmp_path / "run")
    assert saved(tmp_path / "run") == 1
    monkeypatch.undo()
    assert [line["step"] for line in read_metrics(train(policy, tmp_path / "run"))] == [1, 2, 3, 4]


def test_a_store_without_room_is_not_even_tried(policy, tmp_path, monkeypatch, capsys):
    rooms = iter([0, 10**12, 10**12, 10**12, 10**12])
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda path: SimpleNamespace(free=next(rooms)))
    out = train(policy, tmp_path / "run")
    assert "could not be written (process 0: OSError: [Errno 28] no room for 0.0 GB" in capsys.readouterr().out
    assert sorted(int(path.name) for path in (out / "checkpoints").iterdir()) == [2, 3, 4]


def test_a_failure_while_it_is_written_is_found_when_the_next_is_due(policy, tmp_path, capsys):
    def rollout(model, tasks, step):
        # Parameters need 130 KB. The checkpoint of step 2 is written under the limit, its neighbours perhaps.
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000 if step in (1, 2) else hard, hard))
        return episodes(model, tasks, step)

    config = make_config(policy, tmp_path / "run", 5, train={"save_every": 1}, faults={"saves_behind": 4})
    out = run(config, rollout=rollout)
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4, 5] and saved(out) == 5
    assert 1 <= capsys.readouterr().out.count("could not be written") <= 3


def test_a_half_written_checkpoint_is_left_out_with_a_line_that_says_so(policy, tmp_path, capsys):
    out = run(make_config(policy, tmp_path / "run", 2), rollout=episodes)
    (out / "checkpoints" / "9").mkdir()
    capsys.readouterr()
    run(make_config(policy, tmp_path / "run", 2), rollout=episodes)
    assert "going on from step 2 to 2; half-written and left out: checkpoint 9" in capsys.readouterr().out
