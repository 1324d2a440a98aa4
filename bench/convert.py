"""Time and memory of a checkpoint of full size, with random weights: loaded, imported, and exported again.

    python bench/convert.py qwen3-0.6b qwen3-1.7b --work DIR

In `DIR`, which needs three times the model's size on disk, a Hugging Face directory in bfloat16 is written and

    load      `load_hf` into float32
    import    `envace import`, into an Orbax checkpoint
    export    `envace export`, back into a directory, which must be the same byte for byte

each run in a process of its own. One JSON line for each model: the seconds that each took, the most anonymous memory
in GB (pages of mapped files left out), and of `load` also what it took above its parameters and the process before, as
a multiple of the largest tensor as it is stored (`above_per_largest`; the aim is at most 1.3). Status 1 where bytes
differ or that aim is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.qwen3 import Qwen3, Qwen3Config, save_hf  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
AIM = 1.3
# Prints the memory before the model, and the bytes of its parameters; the rest is seen from outside.
LOAD = """
import sys, jax
from flax import nnx
from bench.convert import anonymous
from models.qwen3 import load_hf
jax.devices()
print(anonymous("self"), flush=True)
model = load_hf(sys.argv[1])
print(sum(x.nbytes for x in jax.tree.leaves(nnx.state(model))))
"""


def watched(command: list[str]) -> tuple[dict[str, float], list[str]]:
    """Runs a program: its seconds and its most anonymous memory in GB, and the lines it printed.

    Raises SystemExit when it fails.
    """
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    most = 0
    while process.poll() is None:
        most = max(most, anonymous(process.pid))
        time.sleep(0.01)
    lines = process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {"wall_s": round(time.perf_counter() - began, 1), "peak_gb": round(most / 1e9, 2)}, lines


def anonymous(pid: int | str) -> int:
    """Bytes of anonymous memory of a process; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    return 1024 * int(status.split("RssAnon:")[1].split()[0]) if "RssAnon:" in status else 0


def convert(name: str, work: Path) -> dict[str, Any]:
    """The line of one preset."""
    source, checkpoint, back = (work / f"{name}-{kind}" for kind in ("source", "checkpoint", "back"))
    for path in (source, checkpoint, back):
        shutil.rmtree(path, ignore_errors=True)
    config = Qwen3Config.preset(name)
    save_hf(Qwen3(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16), source)

    load, (before, kept) = watched([sys.executable, "-c", LOAD, str(source)])
    largest = 2 * config.vocab_size * config.hidden_size
    above = load["peak_gb"] - int(kept) / 1e9 - int(before) / 1e9
    load |= {"kept_gb": round(int(kept) / 1e9, 2), "above_per_largest": round(above / (largest / 1e9), 2)}
    command = [sys.executable, "-m", "envace_jax.cli"]
    imported, _ = watched([*command, "import", str(source), str(checkpoint)])
    exported, _ = watched([*command, "export", str(checkpoint), str(back)])
    same = _digests(source) == _digests(back)
    for path in (source, checkpoint, back):
        shutil.rmtree(path)
    found = {"bench": "convert", "model": name, "same_bytes": same}
    return {**found, "load": load, "import": imported, "export": exported}


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(directory.glob("*.safetensors"))
    return {file.name: hashlib.file_digest(file.open("rb"), "sha256").hexdigest() for file in files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="presets, such as qwen3-0.6b")
    parser.add_argument("--work", type=Path, required=True, help="folder to write into; it is left empty")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    missed = 0
    for name in args.models:
        found = convert(name, args.work)
        print(json.dumps(found), flush=True)
        missed |= not found["same_bytes"] or found["load"]["above_per_largest"] > AIM
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
