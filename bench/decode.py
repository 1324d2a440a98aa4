"""Sampling speed on a small random Qwen3: B prompts of P tokens, G new tokens each, on this machine.

    python bench/decode.py                          16 x (128 + 128) and 64 x (128 + 128)
    python bench/decode.py 16 128 128 --runs 5
    python bench/decode.py --peers DIR --python tunix=TUNIX_VENV/bin/python

With `--peers`, the scripts `peer_hf_generate.py` and, where its Python is given, `peer_tunix_sampler.py` of that folder
run on the same shapes, alternating with ours, and medians are compared. transformers needs `pip install -e '.[parity]'`
here; tunix has an environment of its own:

    python -m venv tunix && tunix/bin/pip install google-tunix

A run samples from the first token of the prompt to the last new one, prefill included, compilation left out. One JSON
line a shape; `ratio` is a peer's time over ours, `bound_tok_s` what the products alone would allow (see `sampling`),
`temporaries` the memory that the compiled decoding loop needs beside its arguments, as a share of the cache. The aim is
1.3 times the best peer or 85 % of the bound, whichever is lower; `met` says so where a peer was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sampling import CONFIG, Products, bound_seconds, peer_arguments, peer_pythons, run_peer, summary  # noqa: E402
from envace_jax import huge_pages  # noqa: E402
from envace_jax.sampling import Engine, SamplingParams  # noqa: E402
from envace_jax.sampling.params import slot_sampling  # noqa: E402
from models.qwen3 import Qwen3  # noqa: E402

PEERS = {"hf": "peer_hf_generate.py", "tunix": "peer_tunix_sampler.py"}
AIM_OVER_PEER, AIM_OF_BOUND = 1.3, 0.85


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
        """Seconds of one run."""
        begin = time.perf_counter()
        out = self.engine.generate(self.model, self.prompts, SamplingParams(max_new_tokens=self.new, seed=seed))
        seconds = time.perf_counter() - begin
        assert all(len(completion.tokens) == self.new for completion in out)
        return seconds

    def temporaries(self) -> float:
        """Of the decoding loop over all slots, as a share of the cache; by the compiler's account."""
        cache = sum(x.nbytes for x in jax.tree.leaves(self.engine.start().cache))
        graph, params = self.engine.split(self.model)
        none = np.zeros(self.rows, np.int32)
        lowered = self.engine._decode.lower(
            graph=graph,
            params=params,
            state=self.engine.start(),
            rows=None,
            sampling=slot_sampling(self.rows, {}),
            budgets=none,
            min_tokens=none,
            steps=np.int32(1),
            enough=np.int32(1),
            window=self.engine.max_length,
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes / cache


def aim(found: dict) -> dict:
    """What is aimed at, and whether it is met, beside a summary in which peers were measured."""
    if not found["others_tok_s"]:
        return {}
    goal = min(AIM_OVER_PEER * max(found["others_tok_s"].values()), AIM_OF_BOUND * found["bound_tok_s"])
    return {"aim_tok_s": round(goal, 1), "met": found["tok_s"] >= goal}


def main() -> None:
    huge_pages.use()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="*", type=int, help="B P G; by default 16 128 128, then 64 128 128")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each")
    parser.add_argument("--memory", action="store_true", help="also compile for the compiler's account of memory")
    peer_arguments(parser, tuple(PEERS), scripts=True)
    args = parser.parse_args()
    if len(args.shape) not in (0, 3):
        parser.error("the shape is three numbers: B P G")
    pythons = peer_pythons(parser, args, tuple(PEERS))
    for shape in [tuple(args.shape)] if args.shape else [(16, 128, 128), (64, 128, 128)]:
        rows, prompt, new = shape
        ours, prefill, decode = Ours(*shape), Products(rows * prompt), Products(rows)
        seconds: dict[str, list[float]] = {name: [] for name in ("envace_jax", *pythons)}
        rates = []
        for run in range(args.runs):
            rates.append((prefill(5), decode()))
            seconds["envace_jax"].append(ours(run + 1))
            for name, python in pythons.items():
                seconds[name].append(run_peer(python, args.peers / PEERS[name], *shape)["s"])
        rate = tuple(float(np.median(column)) for column in zip(*rates, strict=True))
        bound = bound_seconds(rows * prompt, rows * new, rate)
        more = {"B": rows, "P": prompt, "G": new, "runs": args.runs, "matmul_gflops": [round(r / 1e9, 1) for r in rate]}
        if args.memory:
            more["temporaries"] = round(ours.temporaries(), 3)
        found = summary("decode", rows * new, seconds, bound, **more)
        print(json.dumps(found | aim(found)), flush=True)


if __name__ == "__main__":
    main()
