"""What goes on beside a run: signs of life, and news for the processes that are busy elsewhere.

Every process writes RUN/heartbeat/PROCESS.json, so that one can see from outside what each host is at. Between several
processes the watch also passes on

- a signal: whoever gets SIGTERM or Ctrl-C tells the others, which break off what is repeatable,
- a failure outside of what is agreed on: the others end with its message,
- silence: process 0 ends the run when a process has given no sign of life for `heartbeat_s`.

The last two end the process at once, for a process that waits in a global program cannot be reached in another way:
with status 1 after a failure, and with 75, which asks a scheduler to start again, when a process is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import jax

from envace_jax.train.processes import MissingProcess, Processes, of_all
from envace_jax.train.stopping import EXIT_STATUS

DIRECTORY = "heartbeat"
_FILE_S = 10.0  # seconds between two writes of the file


class Watch:
    """Runs in a thread while it is entered.

    Args:
        processes: of the run; its `stopping` gets the signals of the others.
        run: the run directory.
        heartbeat_s: after so many seconds without a sign of life a process counts as gone.
    """

    def __init__(self, processes: Processes, run: Path, *, heartbeat_s: float = 100.0):
        self._processes, self._heartbeat_s = processes, heartbeat_s
        # All enter it behind the same agreement; what a run before this one left is not read.
        self._beats, self._news = (f"envace/{what}/{processes.rounds}" for what in ("beats", "news"))
        self._file = run / DIRECTORY / f"{processes.index}.json"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._heard: dict[str, tuple[str, float]] = {}
        self._listened = time.monotonic()
        self._told_stop = self._failing = False
        self._interval = min(1.0, heartbeat_s / 5)
        self.step = 0

    def __enter__(self) -> Watch:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._write("ended" if kind is None else f"ended by {kind.__name__}")

    def failed(self, error: BaseException) -> None:
        """The run ends here by an error; the others are told, unless they know. May end the process at once."""
        if self._processes.count == 1:
            return
        if isinstance(error, MissingProcess):
            self._leave(str(error), EXIT_STATUS[signal.SIGTERM])
        if isinstance(error, SystemExit) or error is self._processes.told:
            return
        if of_all(error):  # is a process gone? Give the watch the time to say which
            time.sleep(self._heartbeat_s + 5 * self._interval)
        self._failing = True
        text = " ".join(str(error).split())[:500]
        self._tell("failed", f"process {self._processes.index} failed: {type(error).__name__}: {text}")

    def _run(self) -> None:
        beat, written = 0, -_FILE_S
        while True:
            if time.monotonic() - written >= _FILE_S:
                self._write(self._processes.doing)
                written = time.monotonic()
            if self._processes.count > 1:
                beat += 1
                try:
                    self._exchange(beat)
                except jax.errors.JaxRuntimeError:
                    pass  # JAX itself ends this process when the coordinator is gone
            if self._closed.wait(self._interval):
                return

    def _exchange(self, beat: int) -> None:
        client, stopping = self._processes.client, self._processes.stopping
        client.key_value_set(f"{self._beats}/{self._processes.index}", str(beat), True)
        news = {key.rpartition("/")[2]: value for key, value in client.key_value_dir_get(self._news + "/")}
        if "gone" in news:
            self._leave(news["gone"], EXIT_STATUS[signal.SIGTERM])
        if "failed" in news and not self._failing:
            self._leave(news["failed"], 1)
        if stopping is not None and stopping.signal is not None and not self._told_stop:
            self._told_stop = True
            self._tell("stop", str(int(stopping.signal)))
        elif stopping is not None and "stop" in news:
            stopping.heed_from_afar(signal.Signals(int(news["stop"])))
        if self._processes.index == 0:
            self._listen()

    def _listen(self) -> None:
        now = time.monotonic()
        if now - self._listened > self._heartbeat_s / 2:
            # It is this process that was held up (a suspended machine, say): it cannot tell who was silent meanwhile.
            self._heard = {key: (beat, now) for key, (beat, _) in self._heard.items()}
        self._listened = now
        for key, beat in self._processes.client.key_value_dir_get(self._beats + "/"):
            if self._heard.get(key, ("", now))[0] != beat:
                self._heard[key] = beat, now
        silent = [int(key.rpartition("/")[2]) for key, (_, at) in self._heard.items() if now - at > self._heartbeat_s]
        if silent:
            names = ", ".join(map(str, sorted(silent)))
            news = f"process {names}: no sign of life for faults.heartbeat_s={self._heartbeat_s:g} seconds"
            self._tell("gone", news)
            time.sleep(3 * self._interval)  # the others read it from this process
            self._leave(news, EXIT_STATUS[signal.SIGTERM])

    def _tell(self, name: str, text: str) -> None:
        try:
            self._processes.client.key_value_set(f"{self._news}/{name}", text, True)
        except jax.errors.JaxRuntimeError:
            pass  # the coordinator is gone: JAX tells the others, who miss its heartbeat too

    def _leave(self, news: str, status: int) -> None:
        sys.stdout.flush()
        print(f"error: {news}; the same command goes on from the last checkpoint", file=sys.stderr, flush=True)
        self._write("ended because of another process")
        os._exit(status)

    def _write(self, doing: str) -> None:
        values = {
            "process": self._processes.index,
            "processes": self._processes.count,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self.step,
            "doing": doing,
            "time": time.time(),
        }
        temporary = self._file.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(values) + "\n", encoding="utf-8")
            os.replace(temporary, self._file)
        except OSError:  # a full disk must not end a run by its signs of life
            pass
