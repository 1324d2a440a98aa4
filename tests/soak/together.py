"""What the programs of this directory share: processes that are started together."""

from __future__ import annotations

import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_THE_CLOCK = ("time/", "throughput/", "compile/")
# Programs run for moments only: compiled without care they are ready a third sooner.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax remarks on what is as it should be


def free_port() -> int:
    """Of this host, for a coordinator."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(
    commands: Sequence[Sequence[object]], logs: Sequence[Path], cache: Path, *, devices: int = 1, compiled: str = QUICK
) -> list:
    """A process for each command (arguments of Python), with `devices` CPU devices and a log of its own; `cache` keeps
    what they compile, by XLA's options `compiled`."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {compiled}",
    }
    started = []
    for command, path in zip(commands, logs, strict=True):
        with open(path, "w") as log:
            arguments = [sys.executable, *map(str, command)]
            started.append(subprocess.Popen(arguments, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return started


def wait_for_all(started: Sequence[subprocess.Popen], within_s: float) -> list[int]:
    """Their exit statuses; those who have not ended in time are killed, and an error raised."""
    limit = time.monotonic() + within_s
    try:
        return [process.wait(max(limit - time.monotonic(), 0.1)) for process in started]
    finally:
        for process in started:
            process.kill()


def show(logs: Sequence[Path], lines: int = 30) -> None:
    """Prints how the logs end, for whoever finds out why something failed."""
    for path in logs:
        end = path.read_text(errors="replace").splitlines()[-lines:] if path.is_file() else ["is not there"]
        print(f"--- {path}", *end, sep="\n", flush=True)


def machine() -> str:
    """When and where: for the head of a log."""
    import flax
    import jax

    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        told = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in told if line.startswith("model name")), name)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores ({name}), load {load}; "
        f"Python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}"
    )
