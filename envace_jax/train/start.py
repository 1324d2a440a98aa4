"""The start of a run on several processes: they find each other, and see that they are about to do the same.

    connect("10.0.0.1:8476", processes=4, process=2)      told
    connect(search=True)                                   by the environment: a TPU slice, SLURM, Kubernetes, MPI

One process needs nothing of this. Whatever is wrong ends every process with one message within `faults.start_s`, give
or take a few seconds.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax

from envace_jax.config import FaultsConfig, flatten, to_dict
from envace_jax.errors import ConfigError
from envace_jax.train.processes import ProcessError, Processes, adopt, processes

CLOCKS_S = 60.0  # by how much the clocks of hosts may differ
_ROOTS = ("envace_jax", "models")  # packages whose code must be the same everywhere


def in_a_cluster() -> bool:
    """Whether the environment says that this is one of several processes of a job."""
    tpu_hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 or len(tpu_hosts) > 1


def connect(
    coordinator: str | None = None,
    count: int | None = None,
    process: int | None = None,
    *,
    search: bool = False,
    faults: FaultsConfig | None = None,
) -> Processes:
    """Joins the other processes, and returns all of them; just this one where nothing speaks of others.

    Args:
        coordinator: HOST:PORT where process 0 listens.
        count: of processes. process: the number of this one, from 0.
        search: let JAX read coordinator, count and number from the cluster's environment, where they are not given.

    Raises ConfigError when they are given in part only, or cannot be found; ProcessError when the others do not come.
    """
    faults = faults or FaultsConfig()
    given = {"--coordinator": coordinator, "--processes": count, "--process": process}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3 and not search and not in_a_cluster():
        return processes()
    if 0 < len(missing) < 3 and not search:
        raise ConfigError(f"{', '.join(missing)} must be given too, or --distributed to search the environment for it")
    if not missing and not 0 <= process < count:
        raise ConfigError(f"--process {process} must lie in 0..{count - 1}, for --processes {count}")
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"--coordinator {coordinator}: expected HOST:PORT")
        if process is not None and process > 0:
            _reach(host, int(port), faults.start_s)
    # The coordination service ends a process that waits in vain by a crash: end it before, with one line.
    waiting = threading.Timer(faults.start_s, _not_all_came, [count, process, faults.start_s])
    waiting.daemon = True
    waiting.start()
    # Its handler of SIGTERM would swallow a signal that comes before `Stopping` listens.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            process,
            initialization_timeout=int(faults.start_s) + 60,
            # `Watch` looks for silent processes; this is for when it cannot. Signs of life are sent every half of it,
            # and JAX ends processes by a crash: that must come after `Watch` has ended them with one line.
            heartbeat_timeout_seconds=int(2.5 * faults.heartbeat_s) + 10,
            shutdown_timeout_seconds=30,
        )
    except ValueError as error:
        raise ConfigError(
            f"{error}; give --coordinator HOST:PORT --processes N --process I where the environment does not tell"
        ) from error
    except RuntimeError as error:
        if "already" in str(error) or "once" in str(error):
            raise
        raise ProcessError(f"the processes did not come together: {' '.join(str(error).split())[:300]}") from error
    finally:
        waiting.cancel()
    from jax._src.distributed import global_state  # the coordination service has no public name

    return adopt(Processes(jax.process_index(), jax.process_count(), global_state.client, wait_s=faults.start_s))


def check_alike(found: Processes, config: Any) -> None:
    """Raises ConfigError, on every process, naming a setting, file, version or number of devices that is not the same
    on two of them, or clocks that are apart."""
    if found.count == 1:
        return

    def mine() -> dict[str, dict[str, str]]:
        return {
            "setting": {key: repr(value) for key, value in flatten(to_dict(config)).items()},
            "code of": _digests(),
            "version of": {"python": sys.version.split()[0], "jax": jax.__version__, "flax": flax.__version__},
            "number of": {"local devices": str(jax.local_device_count())},
        }

    first, *others = found.each("comparing settings and code", mine)
    clocks = found.each("comparing clocks", time.time)
    with found.alike():
        for process, other in enumerate(others, start=1):
            apart = [
                f"the {kind} {name} is {other[kind].get(name)}, not {first[kind].get(name)}"
                for kind in first
                for name in sorted(first[kind].keys() | other[kind].keys())
                if first[kind].get(name) != other[kind].get(name)
            ]
            if apart:
                more = f", and {len(apart) - 3} more" if len(apart) > 3 else ""
                raise ConfigError(
                    f"process {process} is not like process 0: {'; '.join(apart[:3])}{more}; start all with the same"
                )
        if max(clocks) - min(clocks) > CLOCKS_S:
            off, process = max((abs(clock - clocks[0]), process) for process, clock in enumerate(clocks))
            raise ConfigError(f"the clock of process {process} is {off:.0f} s off that of process 0; set it right")


def _reach(host: str, port: int, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Until somebody listens there. Raises ProcessError when nobody does."""
    began = clock()
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if clock() - began > within_s:
                raise ProcessError(
                    f"no coordinator at {host}:{port} within faults.start_s={within_s:g} seconds ({error}); "
                    "start process 0 there, or mend --coordinator"
                ) from error
        time.sleep(0.5)


def _not_all_came(count: int | None, process: int | None, within_s: float) -> None:
    who = "this process" if process is None else f"process {process}"
    all_of_them = "processes" if count is None else f"{count} processes"
    line = f"error: {who}: not all {all_of_them} came within faults.start_s={within_s:g} seconds; see who did not start"
    print(line, file=sys.stderr, flush=True)
    os._exit(2)


def _digests() -> dict[str, str]:
    """A digest of every source file, by its name."""
    root = Path(__file__).resolve().parents[2]
    files = (path for name in _ROOTS for path in sorted((root / name).rglob("*.py")))
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}
