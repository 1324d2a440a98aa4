"""Metrics hold each step once, in JSON, and progress is readable without a terminal."""

import io
import json

import pytest
from rich.console import Console

from envace_jax.train.progress import Progress
from envace_jax.train.record import Metrics, read_metrics


def steps(run):
    return [line["step"] for line in read_metrics(run)]


@pytest.fixture
def written(tmp_path):
    with Metrics(tmp_path, -1, tensorboard=False) as log:
        for step in range(5):
            log.write(step, {"loss/total": step / 10})
    return tmp_path


def test_lines_beyond_the_step_a_run_goes_on_from_are_taken_back(written):
    with open(written / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    with Metrics(written, 2, tensorboard=False) as log:
        assert steps(written) == [0, 1, 2]
        log.write(3, {"loss/total": 1.0})
    assert steps(written) == [0, 1, 2, 3] and read_metrics(written)[3] == {"step": 3, "loss/total": 1.0}


def test_a_run_that_starts_anew_has_no_lines(written):
    Metrics(written, -1, tensorboard=False).close()
    assert steps(written) == []


def test_what_is_not_finite_is_null(tmp_path):
    with Metrics(tmp_path, -1, tensorboard=False) as log:
        log.write(1, {"grad/norm": float("nan"), "loss/total": float("inf"), "reward/mean": 0.5})

    def refuse(constant):
        raise ValueError(constant)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {
        "step": 1, "grad/norm": None, "loss/total": None, "reward/mean": 0.5
    }  # fmt: skip


def test_tensorboard_gets_the_same_figures(tmp_path):
    with Metrics(tmp_path, -1) as log:
        log.write(1, {"reward/mean": 0.5})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward/mean" in events.read_bytes()


def test_without_a_terminal_progress_is_plain_lines():
    out = io.StringIO()
    with Progress(4, 1, print_every=2, console=Console(file=out, width=20, soft_wrap=True)) as progress:
        for step in (2, 3, 4):
            progress.update(step, {"reward": 0.51234, "tokens/s": 1234.5})
        progress.note("saved in [somewhere]")
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[:3] for line in lines[:2]] == [
        ["step 2/4", "reward 0.512", "tokens/s 1,234"],
        ["step 4/4", "reward 0.512", "tokens/s 1,234"],
    ]
    assert "left 0:00:00" in lines[1] and lines[2] == "saved in [somewhere]"


def test_on_a_terminal_it_is_one_live_line():
    out = io.StringIO()
    with Progress(4, console=Console(file=out, force_terminal=True, width=120)) as progress:
        progress.update(1, {"reward": 0.5})
    assert "1/4" in out.getvalue() and "reward 0.5" in out.getvalue()
