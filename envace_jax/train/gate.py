"""Where the processes wait for each other while a checkpoint is written in the background.

Orbax has a process wait until all have written. One whose write has failed never comes there, and the others would wait
for many minutes. With a `Gate` in place of Orbax's barrier they see that it has gone on to another place, and give the
checkpoint up at once.
"""

from __future__ import annotations

import json
import time
from typing import Any

GIVEN_UP = "has given the checkpoint up"
_PAUSE_S = (0.01, 2.0)  # between two looks: it doubles from the first to the second
_LEFT_OUT = ("async_write_complete", "async_commit_complete")  # Orbax's names of where one that failed never comes
_REMEMBERED = 8  # places; nobody is more than one ahead of the slowest


class Gate:
    """gate(key=..., timeout_ms=...) returns when all processes have come to `key` as often as this one.

    Args:
        index, count: of this process, and how many there are.
        client: of JAX's coordination service.
        name: tells gates apart; the same on all processes.
    """

    def __init__(self, index: int, count: int, client: Any, name: str):
        self._index, self._count, self._client, self._name = index, count, client, name
        self._visits: dict[str, int] = {}
        self._been: list[str] = []

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Raises RuntimeError when another process has left this place out, TimeoutError when it does not come."""
        self._visits[key] = self._visits.get(key, 0) + 1
        here = f"{key}#{self._visits[key]}"
        self._been = [*self._been[1 - _REMEMBERED :], here]
        self._client.key_value_set(f"{self._name}/{self._index}", json.dumps(self._been), True)
        limit, (pause, longest) = time.monotonic() + timeout_ms / 1000, _PAUSE_S
        while True:
            others = {
                int(name.rpartition("/")[2]): json.loads(been)
                for name, been in self._client.key_value_dir_get(f"{self._name}/")
            }
            missing = [i for i in range(self._count) if here not in others.get(i, ())]
            if not missing:
                return
            elsewhere = [i for i in missing if i in others and others[i][-1] not in self._been]
            if elsewhere and any(place in key for place in _LEFT_OUT):
                raise RuntimeError(f"process {elsewhere[0]} {GIVEN_UP}")
            if time.monotonic() > limit:
                raise TimeoutError(f"process {missing[0]} has not written its part within {timeout_ms / 1000:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)
