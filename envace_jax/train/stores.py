"""Where the checkpoints of a run lie, and which of them are whole.

    RUN/checkpoints/STEP/     as a rule
    RUN/checkpoints           a file that names another directory or a URL, where `train.checkpoints` asks for one

On a disk a checkpoint appears by a rename, whole or not at all. A bucket (gs://) cannot rename: there Orbax
writes a file of its own when the rest is complete.
"""

from __future__ import annotations

import errno
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import orbax.checkpoint as ocp
from etils import epath

from envace_jax.errors import CheckpointError

CHECKPOINTS = "checkpoints"
ITEMS = ("params", "optimizer", "metadata")

Store = Path | epath.Path  # a directory, or a URL that is used like one


def check_room(directory: Store, size: int, process: int) -> None:
    """Raises OSError when `directory` takes no file, or has no room for `size` bytes of this process."""
    probe = directory / f".probe{process}"
    probe.write_text("")
    probe.unlink()
    if isinstance(directory, Path) and shutil.disk_usage(directory).free < size:
        raise OSError(errno.ENOSPC, f"no room for {size / 1e9:.1f} GB in {directory}")


def located(place: str) -> Store:
    """The directory or URL that `place` names. Raises CheckpointError where the library for buckets is missing."""
    if "://" not in place:
        return Path(place).absolute()
    if not any(find_spec(name) for name in ("gcsfs", "tensorflow")):
        raise CheckpointError(f"{place}: buckets need a library that is not here: pip install gcsfs")
    return epath.Path(place)


def store(run: str | Path) -> Store:
    """Where the checkpoints of the run directory `run` lie."""
    own = Path(run).absolute() / CHECKPOINTS
    if not own.is_file():
        return own
    return located(own.read_text(encoding="utf-8").strip())


def put(run: str | Path, place: str) -> None:
    """Lets RUN/checkpoints name `place`. Raises CheckpointError when checkpoints lie in RUN/checkpoints itself."""
    own = Path(run).absolute() / CHECKPOINTS
    if own.is_dir():
        if any(own.iterdir()):
            raise CheckpointError(f"{own}: holds checkpoints; move them to {place}, or leave train.checkpoints out")
        own.rmdir()
    path = located(place)
    own.parent.mkdir(parents=True, exist_ok=True)
    temporary = own.with_name(f".{CHECKPOINTS}")
    temporary.write_text(f"{path}\n", encoding="utf-8")
    os.replace(temporary, own)


def whole(directory: Store) -> list[int]:
    """Steps whose checkpoint is complete."""
    if isinstance(directory, Path):
        if not directory.is_dir():
            return []
        return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and _complete(path))
    return sorted(step for step in _finished(directory) if _complete(directory / str(step)))


def set_aside_incomplete(directory: Store) -> list[str]:
    """Orbax takes any directory with a number for a checkpoint: a copy that broke off must not be the latest. What
    Orbax itself left unfinished is removed (in a bucket it does that itself). Returns the names of both."""
    if not isinstance(directory, Path):
        finished = set(map(str, whole(directory)))
        return sorted(name for name in _numbers(directory) if name not in finished)
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.isdecimal() and not _complete(path):
            path.rename(path.with_name(f"{path.name}.incomplete"))
            found.append(path.name)
        elif "orbax-checkpoint-tmp" in path.name:
            shutil.rmtree(path)
            found.append(path.name.partition(".")[0])
    return found


def _complete(checkpoint: Store) -> bool:
    return (checkpoint / "_CHECKPOINT_METADATA").exists() and all((checkpoint / item).is_dir() for item in ITEMS)


def _finished(directory: epath.Path) -> list[int]:
    return [step for step in ocp.utils.checkpoint_steps(directory) if str(step) in _numbers(directory)]


def _numbers(directory: epath.Path) -> list[str]:
    if not directory.exists():
        return []
    return [path.name for path in directory.iterdir() if path.name.isdecimal()]
