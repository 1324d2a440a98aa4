"""Several processes as one run: how they agree on what comes next, and notice when one of them is missing.

What a process does alone (sampling, judging, packing, evaluating) takes as long as it takes. Behind each such part
stands one `each`: a small all-gather through JAX's coordination service, outside of the devices, so that nobody enters
a global program before all are there and know the same. It carries results, and also how the part ended:

- an error of one process becomes an error of all, with its number,
- a stop by signal becomes a stop of all, at the same step,
- a process that does not come within the time limit is named.

While a run goes on, `Watch` tells the others of a signal or a failure at once, and process 0 of a process that is gone.
On one process all of this is nothing: `each` calls its work.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from signal import Signals
from typing import Any, TypeVar

import jax

from envace_jax import errors
from envace_jax.errors import EnvaceError
from envace_jax.train.stopping import Stopping, StopRun

T = TypeVar("T")


class ProcessError(EnvaceError):
    """Another process is missing, failed, or does something else."""


class MissingProcess(ProcessError):
    """A process has not come, or is gone: nothing is left but to end and start again."""


class Processes:
    """All processes of the run, seen from this one.

    index: of this process. count: of all. client: of JAX's coordination service; None on one process.
    wait_s: how long `each` waits for the others.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None, *, wait_s: float = 1800.0):
        self.index, self.count, self.client, self.wait_s = index, count, client, wait_s
        self.stopping: Stopping | None = None  # whose signals are agreed on
        self.told: BaseException | None = None  # the error that all processes know of
        self.doing = "starting"  # for those who look on
        self.rounds = 0  # agreements so far
        self._waited = self._last = self._agreed = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="agreement") if count > 1 else None

    def each(self, what: str, work: Callable[[], Any], *, repeatable: bool = False) -> list[Any]:
        """What `work` returns on every process, in order; each runs its own and then waits for all.

        Args:
            what: names the part in messages; the same on all processes.
            work: what it returns must survive JSON, where several processes have to tell each other.
            repeatable: a signal may break it off anywhere (see `Stopping.at_once`).

        Raises the error of this process's work, or the first of the others'; StopRun when one was stopped;
        MissingProcess naming those who have not come after `wait_s`.
        """
        self.doing = what
        at_once = self.stopping.at_once() if repeatable and self.stopping is not None else nullcontext()
        if self.count == 1:
            with at_once:
                return [work()]
        mine: dict[str, Any] = {"what": what}
        failure: Exception | None = None
        try:
            with at_once:
                mine["value"] = work()
        except StopRun:
            mine["stop"] = int(self.stopping.signal)
        except Exception as error:  # whatever it is, the others must not wait for this process
            failure, mine["error"] = error, [type(error).__name__, isinstance(error, EnvaceError), str(error)]
        everyone = self._gather(what, mine)
        self._heed(everyone, failure)
        return [each["value"] for each in everyone]

    def together(self, what: str, work: Callable[[], T], *, repeatable: bool = False) -> T:
        """What `work` returns here, once it has succeeded everywhere. Raises as `each` does."""
        result: list[T] = []
        self.each(what, lambda: result.append(work()), repeatable=repeatable)
        return result[0]

    @contextmanager
    def alike(self) -> Iterator[None]:
        """What is done on all processes with the same outcome: an error in it needs no telling."""
        try:
            yield
        except Exception as error:
            self.told = error
            raise

    def waited(self) -> float:
        """Seconds spent in agreeing, the wait for slower processes included, since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def agreed(self) -> float:
        """Seconds that agreeing itself took since the last call, as all processes know them: of each round what the
        process spent on it that came last, and waited for nobody. A round counts when the next one is over."""
        agreed, self._agreed = self._agreed, 0.0
        return agreed

    def share(self, total: int, process: int | None = None) -> range:
        """Which of `total` things fall to this process: a contiguous range, the first ones longer by one."""
        small, longer = divmod(total, self.count)
        process = self.index if process is None else process
        start = process * small + min(process, longer)
        return range(start, start + small + (process < longer))

    def _gather(self, what: str, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.rounds += 1
        name = f"envace/round/{self.rounds}"
        began = time.perf_counter()
        try:
            data = json.dumps({**mine, "last_s": self._last}, separators=(",", ":")).encode()
            self.client.key_value_set_bytes(f"{name}/{self.index}", zlib.compress(data, 1))
            # In a thread, so that a second Ctrl-C is heard.
            self._pool.submit(self.client.wait_at_barrier, name, int(self.wait_s * 1000)).result()
            found = self._read(name)
            if self.index == 0 and self.rounds > 1:  # all are in this round, so all have read the last
                self.client.key_value_delete(f"envace/round/{self.rounds - 1}/")
        except jax.errors.JaxRuntimeError as error:
            self.told = MissingProcess(self._missing(what, name, error))
            raise self.told from None
        everyone = [json.loads(zlib.decompress(found[i])) for i in range(self.count)]
        self._last = time.perf_counter() - began
        self._waited += self._last
        self._agreed += min(each["last_s"] for each in everyone)
        apart = [i for i, each in enumerate(everyone) if each["what"] != what]
        if apart:
            self.told = ProcessError(f"{_listed(apart)} not at {what!r} but at {everyone[apart[0]]['what']!r}")
            raise self.told
        return everyone

    def _read(self, name: str) -> dict[int, bytes]:
        return {int(key.rpartition("/")[2]): data for key, data in self.client.key_value_dir_get_bytes(f"{name}/")}

    def _missing(self, what: str, name: str, error: Exception) -> str:
        try:
            there = self._read(name)
        except jax.errors.JaxRuntimeError:
            return f"{what}: process 0, which coordinates, is gone ({' '.join(str(error).split())[:200]})"
        missing = [i for i in range(self.count) if i not in there]
        if missing:
            return (
                f"{what}: {_listed(missing)} has not come within faults.wait_s={self.wait_s:g} seconds; see its output"
            )
        return f"{what}: a process is gone ({' '.join(str(error).split())[:200]})"

    def _heed(self, everyone: Sequence[Mapping[str, Any]], failure: Exception | None) -> None:
        """Raise what this part ended with, on whichever process."""
        if failure is not None:
            self.told = failure
            raise failure
        for i, each in enumerate(everyone):
            if "error" in each:
                kind, known, text = each["error"]
                # The same class where it is one of those that callers tell apart.
                raised = getattr(errors, kind, ProcessError) if known else ProcessError
                text = text if known else f"{kind}: {text}; see its output"
                self.told = raised(f"process {i}: {text}")
                raise self.told
        stops = [each["stop"] for each in everyone if "stop" in each]
        if stops:
            self.stopping.signal = self.stopping.signal or Signals(stops[0])
            raise StopRun


def of_all(error: BaseException) -> bool:
    """Whether it was a program of all processes that failed, as each does when one of them is gone.

    JAX raises JaxRuntimeError, but for some ways to wait for a result; then the words are those of its transport.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


def _listed(processes: Sequence[int]) -> str:
    return ("process " if len(processes) == 1 else "processes ") + ", ".join(map(str, processes))


_all = Processes()


def processes() -> Processes:
    """Those of this run; one until `start.connect` has found others."""
    return _all


def adopt(found: Processes) -> Processes:
    """Make `found` what `processes` returns."""
    global _all
    _all = found
    return found
