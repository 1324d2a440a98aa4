"""Who is silent for too long is gone; whoever was held up itself cannot tell."""

from types import SimpleNamespace

import jax
import pytest

from envace_jax.train import watch as module
from envace_jax.train.processes import Processes
from envace_jax.train.watch import Watch


class Beats:
    """Signs of life of both processes, as JAX's coordination service keeps them."""

    def __init__(self):
        self.told = {}
        self.beats = [0, 0]

    def key_value_dir_get(self, prefix):
        return [(f"{prefix}{process}", str(beat)) for process, beat in enumerate(self.beats)]

    def key_value_set(self, key, value, allow_overwrite):
        self.told[key.rpartition("/")[2]] = value


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A watch of process 0 of two, its client, a clock that sleeping moves, and what it has ended with."""
    client, now, left = Beats(), [100.0], []

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    watch = Watch(Processes(0, 2, client), tmp_path, heartbeat_s=10.0)
    monkeypatch.setattr(watch, "_leave", lambda news, status: left.append((news, status)))
    return watch, client, now, left


@pytest.fixture
def watched(made):
    """look(seconds, who): time passes, `who` give a sign of life, and process 0 looks; returns what it ends with."""
    watch, client, now, left = made

    def look(seconds, *who):
        now[0] += seconds
        for process in who:
            client.beats[process] += 1
        watch._listen()
        return left

    return look


def test_a_silent_process_ends_the_run_with_the_status_for_a_restart(watched):
    for _ in range(11):
        assert watched(1.0, 0) == []
    ((news, status),) = watched(1.0, 0)
    assert news.startswith("process 1: no sign of life for faults.heartbeat_s=10 seconds") and status == 75


def test_a_process_that_was_held_up_itself_blames_nobody(watched):
    watched(1.0, 0, 1)
    assert watched(300.0, 0) == [], "this process slept, and looks before the other can write"
    for _ in range(9):
        assert watched(1.0, 0) == []
    assert watched(1.0, 0, 1) == []


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: a collective failed"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (ValueError("rows must be positive"), False),
    ],
)
def test_a_program_of_all_that_fails_leaves_time_to_find_who_is_gone(made, error, waits):
    watch, client, now, _ = made
    began = now[0]
    watch.failed(error)
    assert (now[0] - began > 10.0) == waits
    assert client.told["failed"].startswith(f"process 0 failed: {type(error).__name__}: ")
