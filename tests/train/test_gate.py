"""Processes wait for each other, but not for one that has given up."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from envace_jax.train.gate import Gate


class Board:
    """What JAX's coordination service keeps, for threads."""

    def __init__(self):
        self._values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self._values
        self._values[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in list(self._values.items()) if key.startswith(prefix)]


@pytest.fixture
def both():
    """both(walk0, walk1): what the walks of two processes, given their gates, come to."""
    board = Board()

    def run(*walks):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda i: walks[i](Gate(i, 2, board, "gate")), range(2)))

    return run


def test_nobody_leaves_a_place_before_all_have_come_there_as_often(both):
    order = []

    def walk(name, pause):
        def go(gate):
            for number in range(3):
                time.sleep(pause)
                order.append((number, name))
                gate(key="written", timeout_ms=20_000)

        return go

    both(walk("quick", 0.0), walk("slow", 0.1))
    assert [number for number, _ in order] == [0, 0, 1, 1, 2, 2]


def test_who_waits_for_one_that_has_given_up_is_told_at_once_and_they_meet_at_the_end(both):
    def writes(gate):
        with pytest.raises(RuntimeError, match="process 1 has given the checkpoint up"):
            gate(key="async_write_complete.7", timeout_ms=20_000)
        gate(key="end", timeout_ms=20_000)
        return "met"

    def fails(gate):
        gate(key="end", timeout_ms=20_000)
        return "met"

    began = time.monotonic()
    assert both(writes, fails) == ["met", "met"] and time.monotonic() - began < 5


def test_one_that_does_not_come_is_named(both):
    def waits(gate):
        with pytest.raises(TimeoutError, match=r"process 1 has not written its part"):
            gate(key="written", timeout_ms=50)

    both(waits, lambda gate: None)
