"""Sampling speed on a small random Qwen3: prompts of P tokens, N new tokens each, on this machine.

    python bench/decode.py                                     16 x (128 + 128) and 64 x (128 + 128)
    python bench/decode.py --shape 16,128,128 --runs 5
    python bench/decode.py --peers DIR --python hf=HF_VENV/bin/python --python tunix=TUNIX_VENV/bin/python

With `--peers`, the scripts `peer_hf_generate.py` and `peer_tunix_sampler.py` of that folder run on the same shapes,
each with its own Python and alternating with ours, and medians are compared. Prints one JSON object a line. A run
samples from the first token of the prompt to the last new one, prefill included, compilation left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envace_jax.sampling import Engine, SamplingParams  # noqa: E402
from models.qwen3 import Qwen3, Qwen3Config  # noqa: E402

# The model of the peers' scripts.
CONFIG = Qwen3Config(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)
PEERS = {"hf": "peer_hf_generate.py", "tunix": "peer_tunix_sampler.py"}


class Ours:
    """The engine on one shape, compiled once and timed many times."""

    def __init__(self, rows: int, prompt: int, new: int):
        self.rows, self.new = rows, new
        self.model = Qwen3(CONFIG, rngs=nnx.Rngs(0))
        self.engine = Engine(CONFIG, slots=rows, max_length=prompt + new)
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(5, 8000, prompt).astype(np.int32) for _ in range(rows)]
        self(0)

    def __call__(self, seed: int) -> float:
        """Tokens a second of one run."""
        begin = time.perf_counter()
        out = self.engine.generate(self.model, self.prompts, SamplingParams(max_new_tokens=self.new, seed=seed))
        return sum(len(c.tokens) for c in out) / (time.perf_counter() - begin)


def run_peer(python: str, script: Path, shape: tuple[int, int, int]) -> float:
    """Tokens a second that a peer's script reports in its last line."""
    command = [python, str(script), *map(str, shape)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])["tok_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="ROWS,PROMPT,NEW; may be given more than once")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each")
    parser.add_argument("--peers", type=Path, help="folder with the peers' scripts")
    parser.add_argument("--python", action="append", default=[], help="hf=PATH or tunix=PATH: a peer's Python")
    args = parser.parse_args()
    pythons = dict(item.split("=", 1) for item in args.python)
    if unknown := set(pythons) - set(PEERS):
        parser.error(f"--python knows {', '.join(PEERS)}, found {', '.join(sorted(unknown))}")
    if bool(pythons) != bool(args.peers):
        parser.error("--peers DIR and --python NAME=PATH go together")
    for text in args.shape or ["16,128,128", "64,128,128"]:
        shape = tuple(int(n) for n in text.split(","))
        ours = Ours(*shape)
        speeds = {name: [] for name in ("envace_jax", *pythons)}
        for run in range(args.runs):
            speeds["envace_jax"].append(ours(run + 1))
            for name, python in pythons.items():
                speeds[name].append(run_peer(python, args.peers / PEERS[name], shape))
        for name, values in speeds.items():
            rows, prompt, new = shape
            line = {"name": name, "rows": rows, "prompt": prompt, "new": new, "runs": len(values)}
            line |= {"tokens_per_s": round(statistics.median(values), 1), "spread": [min(values), max(values)]}
            print(json.dumps(line | {"device": jax.devices()[0].device_kind}), flush=True)


if __name__ == "__main__":
    main()
